"""`provision ssh` on the command line: a shell on a host of the inventory."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from typing import Annotated

import typer

from provision.base.errors import ProvisionError, UsageError
from provision.base.text import few
from provision.base.validation import did_you_mean
from provision.cli.options import inventory_of, ssh_password, with_options
from provision.cli.run_options import is_hosts
from provision.cli.status import hosts_or_last
from provision.inventory import Host, last_run, load
from provision.plan.requirements import DEFAULT_PREFIX, HOME_PREFIX
from provision.remote.ssh import terminal

COMMAND = {"context_settings": {"allow_interspersed_args": False}}


@with_options(password=ssh_password)
def ssh(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[HOSTS] HOST [[--] COMMAND]",
            help="The host's name in the inventory; before it the inventory, if it is not that of the last run that made hosts ready; "
            "after it what the host's shell runs in place of a session.",
        ),
    ],
    hosts: Annotated[str | None, typer.Option("--hosts", metavar="HOSTS", help="The inventory, as before HOST.")] = None,
    *,
    password: str | None,
) -> None:
    """Open a shell on a host: `provision ssh node1`, `provision ssh hosts.ini node1 -- nvidia-smi -L`.

    It connects with the inventory's user, port, key and jump host, and `python` is the one of the installation. The exit code is ssh's:
    that of the command or session, or 255 where the host cannot be reached.
    """
    if hosts is None and len(words) > 1 and words[1] != "--" and is_hosts(words[0]) and not _is_of_last_run(words[0]):
        hosts, words = words[0], words[1:]
    name, command = words[0], words[1:]
    if command[:1] == ["--"]:
        command = command[1:]
    elif command and command[0].startswith("-"):
        raise UsageError(f"{command[0]} after the host", hint=f"options go before it; a command of this name: provision ssh {name} -- …")
    inventory = inventory_of(hosts_or_last(hosts), None)
    known = {host.name: host for host in inventory.hosts}
    if name not in known:
        raise UsageError(f"no host {name} in {inventory.where}{did_you_mean(name, known)}", hint=f"its hosts are {few(list(known), 16)}")
    script = _script(known[name], " ".join(command))
    argv, variables = terminal(known[name], script, password, is_session=not command)
    try:
        os.execvpe(argv[0], argv, {**os.environ, **variables})  # noqa: S606  terminal, signals and exit code are ssh's
    except OSError as error:
        raise ProvisionError(f"{argv[0]} cannot be started: {error.strerror}", hint=f"install {argv[0]} on this machine") from error


def _is_of_last_run(name: str) -> bool:
    """Whether a host of the last run has this name, as a file may have, too."""
    last = last_run.newest_inventory()
    with suppress(ProvisionError):  # it is gone, or invalid
        return last is not None and any(host.name == name for host in load(last).hosts)
    return False


def _script(host: Host, command: str) -> str:
    """Runs the command, or the login shell, with the installation's programs first on its path; for any login shell."""
    places = shlex.quote(host.prefix) if host.prefix else f'{DEFAULT_PREFIX} "$HOME/{HOME_PREFIX}"'
    found = 'if [ -x "$p/venv/bin/python" ]; then PATH="$p/venv/bin:$PATH"; export PATH; [ ! -r "$p/env.sh" ] || . "$p/env.sh"; break; fi'
    then = f"{command}" if command else 'exec "${SHELL:-/bin/sh}"'
    return f"exec /bin/sh -c {shlex.quote(f'for p in {places}; do {found}; done; unset p; {then}')}"
