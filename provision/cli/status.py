"""`provision status` on the command line: parse, call one function, print."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated, NamedTuple

import typer

from provision.base import signals, terminal, text
from provision.base.errors import UsageError
from provision.cli.options import Json, Limit, inventory_of, passwords, with_options
from provision.inventory import last_run
from provision.report.status import show
from provision.report.status.model import Status
from provision.report.status.observer import Observer, Poller

_TICK_S = 0.1  # how soon Ctrl-C is noticed
_PATIENCE_S = 5.0  # after which the hosts that are waited for are named

OptionalHosts = Annotated[
    list[str] | None,
    typer.Argument(metavar="HOSTS", show_default=False, help="As for `up`; by default those of the last run that made hosts ready."),
]


def hosts_or_last(hosts: str | Sequence[str] | None) -> str | Sequence[str]:
    """HOSTS, else those of the last run. Raises UsageError where there is none."""
    found: str | Sequence[str] | None = hosts or last_run.newest_inventory()
    if found is None:
        raise UsageError("no hosts are named, and no earlier run has made hosts ready", hint="name HOSTS: provision status hosts.ini")
    return found


class _View(NamedTuple):
    watch: bool
    port: int | None
    interval: float
    json: bool


def view_options(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh in place until Ctrl-C, which ends it with exit code 0.")] = False,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve",
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve a page and /status.json at this port (0: a free one), on this machine alone and until Ctrl-C.",
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval", min=1, max=86400, metavar="SECONDS", help="Between two looks at the hosts: 5 with --watch, 15 with --serve."
        ),
    ] = None,
    json_: Json = False,
) -> _View:
    """How the state is shown. Raises UsageError for options that exclude each other."""
    if sum((watch, serve is not None, json_)) > 1:
        raise UsageError("--watch, --serve and --json exclude each other", hint="leave two of them out; --serve has /status.json")
    if interval is not None and not watch and serve is None:
        raise UsageError("--interval needs --watch or --serve")
    if watch and not terminal.out().file.isatty():
        raise UsageError("--watch needs a terminal", hint="for programs: --json, or --serve")
    return _View(watch, serve, interval or (5.0 if watch else 15.0), json_)


@with_options(view=view_options, passwords=passwords)
def status(hosts: OptionalHosts = None, limit: Limit = None, *, view: _View, passwords: Mapping[str, str]) -> None:
    """Show each host's state, load, GPUs and jobs, and how it differs from provision.lock. Changes nothing, also while a job runs.

    The exit code is 0 if every host holds what was installed, and 1 if one does not: unreachable, not installed, drifted, locked by an
    installation, or without an answer of nvidia-smi. Whether the training job passed is the last run's verdict.
    """
    console = terminal.out()
    observer = Observer(inventory_of(hosts_or_last(hosts), limit), passwords)
    if view.port is not None:
        _serve(observer, view.port, view.interval)
    elif view.watch:
        _watch(observer, view.interval, console)
    else:
        found = _look_once(observer)
        if view.json:
            terminal.print_json(found.model_dump(mode="json", by_alias=True))
        else:
            show.show(found, console)
        if not found.ok:
            raise typer.Exit(1)


def _look_once(observer: Observer) -> Status:
    """The status now. Hosts that let it wait are named: one that hangs does so for more than a minute."""
    with signals.as_event() as stopped, ThreadPoolExecutor(1) as pool:
        looking = pool.submit(observer.look, stopped)
        if wait([looking], timeout=_PATIENCE_S).not_done:
            terminal.say(_waiting(observer))
        found = looking.result()
    if stopped.is_set():
        raise KeyboardInterrupt
    return found


def _waiting(observer: Observer) -> str:
    return f"waiting for {text.folded(observer.waiting_for) or 'the hosts'} …"


def _watch(observer: Observer, interval: float, console: terminal.Console) -> None:
    with signals.as_event() as stopped:
        poller = Poller(observer, interval, stopped)

        def draw() -> terminal.RenderableType:
            return show.view(poller.latest, console) if poller.latest is not None else terminal.styled(_waiting(observer))

        with terminal.live(console, draw):
            _attend(poller, stopped)
    if poller.latest is not None:
        show.show(poller.latest, console)


def _serve(observer: Observer, port: int, interval: float) -> None:
    with signals.as_event() as stopped:
        from provision.report.status.server import Server  # it takes a moment, in which Ctrl-C must end this as later

        poller = Poller(observer, interval, stopped)
        with Server(port, secrets.token_urlsafe(32), lambda: poller.latest, interval) as server:
            server.history = poller.history
            threading.Thread(target=server.serve_forever, daemon=True).start()
            terminal.out().say(server.url)
            terminal.say("on this machine alone; /status.json takes the same token, also as bearer; Ctrl-C ends it")
            _attend(poller, stopped)
            server.shutdown()


def _attend(poller: Poller, stopped: threading.Event) -> None:
    """Let it run until a signal; only a signal ends it."""
    poller.start()
    while not stopped.is_set():
        poller.check()
        time.sleep(_TICK_S)
