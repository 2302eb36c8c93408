"""The options of `provision run`, checked against each other; each of them is in launch/option_table.py."""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import os
import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.base.validation import MAX_COUNT, MAX_SECONDS, count
from provision.cli.help import Command
from provision.cli.options import one_of, url
from provision.inventory import loading
from provision.launch import forwarded_variables, horovod_config, tuning
from provision.launch.launchers import Elastic, RunOptions
from provision.launch.option_table import ELASTIC, HOROVOD, HOST_OPTIONS, JOB_OPTIONS, signature
from provision.launch.program import Containers
from provision.launch.stall_watch import StallOptions
from provision.launch.target_hosts import HostOptions
from provision.remote.session import Session
from provision.sandbox.containers import image_names

if TYPE_CHECKING:
    from typer._click import Context


def run_options(command: list[str] | None = None, **typed: Any) -> RunOptions:
    """What to launch; the signature has a parameter for each of `JOB_OPTIONS`. Raises UsageError for options that contradict each other."""
    bound = inspect.signature(run_options).bind(command, **typed)
    bound.apply_defaults()
    values = SimpleNamespace(**bound.arguments)
    for option in JOB_OPTIONS:
        if isinstance(option.kind, tuple) and (word := getattr(values, option.parameter)) is not None:
            one_of(option.names[0], word, option.kind)
    if values.jsrun:
        raise UsageError("--jsrun: LSF's launcher is not supported", hint="leave it out: ranks are started by mpirun or over ssh")
    if values.node_rank:
        what = f"--node-rank {values.node_rank}: a job is started once, on one machine, with the ranks of all hosts"
        raise UsageError(what, hint="leave it out, and name the hosts: --hosts hosts.ini, or -H a,b")
    for option in JOB_OPTIONS:
        if option.unused and getattr(values, option.parameter):
            terminal.say(f"{option.names[0]} has no effect: {option.unused}")
    project = _project(values)
    nodes, per_node = _size(values)
    config = horovod_config.read(values.config_file) if values.config_file is not None else horovod_config.Config()
    for sentence in config.unknown:
        terminal.say(f"warning: {sentence}")
    elastic = _elastic(values)
    _check_servers(values)
    if elastic is None:
        for option in JOB_OPTIONS:
            if option.panel == ELASTIC and getattr(values, option.parameter):
                terminal.say(f"{option.names[0]} has no effect: it is for elastic jobs (--min-np, --max-np or --host-discovery-script)")
    elif values.tune in (tuning.ENGINE, tuning.BF16):
        what = f"--tune {values.tune}: it is the same on all hosts of a job, and an elastic job's change"
        raise UsageError(what, hint="leave it out; the program can do the same itself: docs/run.md")
    files = tuple(values.copy or ())
    if files and values.workdir is not None:
        raise UsageError("--copy and --workdir: with your own folder nothing is copied", hint="leave one of them out")
    if values.detach and (values.output_filename or values.quiet_ranks or values.on_stall != "report"):
        raise UsageError("--detach: this machine is needed for --output-filename, --quiet-ranks and --on-stall", hint="leave them out")
    return RunOptions(
        _command(values),
        values.np,
        _environment(values, config),
        values.workdir,
        files,
        values.modules,
        output=values.output_filename,
        quiet=values.quiet_ranks,
        launcher=_launcher(values, config.launcher, elastic),
        python=values.python,
        networks=_networks(values),
        start_timeout=values.start_timeout,
        verbose=values.verbose,
        elastic=elastic,
        timestamps=values.prefix_output_with_timestamp,
        mpi_args=_words("--mpi-args", values.mpi_args),
        binding=_words("--binding-args", values.binding_args),
        oversubscribe=values.oversubscribe,
        nodes=nodes,
        per_node=per_node,
        restarts=values.max_restarts if elastic is not None else values.max_restarts or None,
        project=project,
        index_url=url("--index-url", values.index_url),
        stall=_stall(values, elastic),
        detach=values.detach,
        wait=values.wait,
        tune=values.tune,
    )


def job_containers(where: HostOptions, options: RunOptions) -> Callable[[Session], AbstractContextManager[Containers]] | None:
    """What starts the containers of ``--image``; None without it. Raises UsageError for options that it excludes."""
    if where.image is None:
        if where.volume or where.keep_image:
            raise UsageError("--volume and --keep-image need --image", hint="leave them out, or name an image")
        return None
    image_names.checked(where.image)
    if where.check_build:
        raise UsageError("--check-build: an image says by its labels what it holds", hint=f"docker image inspect {where.image}")
    if options.python is not None:
        raise UsageError("--python: the image has its own", hint="leave it out")
    if options.detach:
        raise UsageError("--detach: containers end with this machine's connection", hint="leave it out, or --image")
    if options.project is not None:
        raise UsageError("--env: the image has its own environment", hint="base an image with the packages on it: FROM IMAGE")
    for volume in where.volume or ():
        if not re.fullmatch(r"/[^:]*:/[^:]*(:ro|:rw)?", volume):
            raise UsageError(f"invalid --volume {volume}: expected a pair of folders such as /data:/data:ro")
    from provision.image import containers  # it loads the container engine's client

    return partial(containers.started, image=where.image, options=options, volumes=tuple(where.volume or ()), keep=where.keep_image)


_COMMAND = Annotated[
    list[str] | None,
    typer.Argument(metavar="COMMAND", help="The program and its arguments; `python` is the one of the installation."),
]
HostOptions.__signature__ = signature(HOST_OPTIONS)  # type: ignore[attr-defined]
run_options.__signature__ = signature(  # type: ignore[attr-defined]
    JOB_OPTIONS, inspect.Parameter("command", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=_COMMAND)
)


def _stall(values: SimpleNamespace, elastic: Elastic | None) -> StallOptions | None:
    """How the job is watched. Raises UsageError for an action that the job's launcher has not."""
    text, action = values.stall_after, values.on_stall
    after = 0.0 if text == "off" else float(text) if re.fullmatch(r"\d{1,9}(\.\d{1,3})?", text) else -1.0
    if after != 0 and not 1 <= after <= MAX_SECONDS:
        raise UsageError(f"invalid --stall-after {text}: expected seconds, 1 to {MAX_SECONDS}, or off")
    if action == "restart" and (not values.max_restarts or elastic is not None):
        what = "--on-stall restart: all ranks are started again by --max-restarts N alone, which no elastic job has"
        raise UsageError(what, hint="add --max-restarts N, and leave elastic options out")
    if after == 0 and action != "report":
        raise UsageError(f"--on-stall {action} and --stall-after {text} exclude each other", hint="leave one of them out")
    from provision.doctor.stall import examination  # not needed to parse

    examine = partial(examination.of_run, is_elastic=elastic is not None)
    return StallOptions(after, action, examine, values.max_restarts or 0) if after else None


def _networks(values: SimpleNamespace) -> tuple[str, ...]:
    names = tuple(name for names in values.network_interfaces or () for name in names.split(",") if name)
    for name in names:
        try:
            re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", name) or ipaddress.ip_network(name, strict=False)
        except ValueError:
            raise UsageError(f"invalid --network-interfaces {name}: expected an interface or a network, such as 10.0.0.0/8") from None
    return names


def _project(values: SimpleNamespace) -> Path | None:
    """The file of `--env`. Raises UsageError where it is missing, or contradicts other options."""
    file: Path | None = values.env
    if file is not None and not file.exists():
        listed = "|".join(forwarded_variables.CHOICES)
        hint = f"name a uv.lock, pyproject.toml or requirements.txt; which of this shell's variables ranks get: --variables {listed}"
        raise UsageError(f"--env {file}: no such file", hint=hint)
    if file is None and values.index_url is not None:
        raise UsageError("--index-url needs --env", hint="leave it out, or name the file: --env uv.lock")
    if file is not None and values.python is not None:
        raise UsageError("--env and --python name different environments", hint="leave one of them out")
    return file


def _command(values: SimpleNamespace) -> tuple[str, ...]:
    """The program as it is started: as under torchrun, Python runs modules and scripts."""
    command = tuple(values.command or ())
    if values.module and command:
        return ("python", "-m", *command)
    is_script = bool(command) and command[0].endswith(".py")
    return ("python", *command) if is_script and not values.no_python else command


class HostsFirst(Command):
    """``provision run hosts.ini -np 4 train.py`` as if it said ``--hosts hosts.ini``, as other commands take HOSTS."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        options, _, _ = self.make_parser(ctx).parse_args(list(args))
        rest = options["command"] or ()
        before = args[: len(args) - len(rest)]
        has_hosts = any(options.get(name) for name in ("hosts", "host", "hostfile"))
        if rest and not has_hosts and "--" not in before and is_hosts(rest[0]):
            args = [*before, "--hosts", *args[len(before) :]]
        return super().parse_args(ctx, args)


def is_hosts(word: str) -> bool:
    """Whether a word that may be HOSTS or a program is meant as HOSTS: a file that cannot be executed is a program only as a script."""
    is_data = word.endswith(loading.DATA_ENDINGS) or (os.path.isfile(word) and not word.endswith(loading.FILE_ENDINGS))
    return word == loading.LOCAL or "," in word or (is_data and not os.access(word, os.X_OK))


def _size(values: SimpleNamespace) -> tuple[int | None, int | None]:
    """How many hosts, and ranks on each, as torchrun's options say it; sets ``np``, and an elastic job's limits and slots, to what follows.

    Raises UsageError for numbers that contradict each other.
    """
    per_node = _per_node(values.nproc_per_node)
    if per_node and values.host_discovery_script is not None:
        values.slots_per_host = per_node
    if values.nnodes is None:
        if per_node and values.np and values.np % per_node and values.min_np is None and values.max_np is None:
            raise UsageError(f"-np {values.np} and --nproc-per-node {per_node} contradict each other", hint="leave one of them out")
        return None, per_node
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", values.nnodes)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < fewest <= most <= MAX_COUNT:
        raise UsageError(f"invalid --nnodes {values.nnodes}: expected N, or MIN:MAX for an elastic job, 1 <= MIN <= MAX")
    if values.min_np is not None or values.max_np is not None:
        raise UsageError(f"--nnodes {values.nnodes} and --min-np or --max-np say the same thing", hint="leave one of them out")
    if fewest < most:
        if per_node is None:
            raise UsageError(f"--nnodes {values.nnodes}: how many ranks has a host?", hint="say it: --nproc-per-node N")
        values.min_np, values.max_np = fewest * per_node, most * per_node
        return None, per_node
    if values.host_discovery_script is not None:
        raise UsageError(f"--nnodes {fewest}: with a discovery script the number of hosts changes", hint="write --nnodes MIN:MAX")
    if values.np is not None:
        if values.np % fewest or (per_node is not None and values.np != fewest * per_node):
            asked = f"--nnodes {fewest}" + (f" and --nproc-per-node {per_node}" if per_node else "")
            raise UsageError(f"-np {values.np} and {asked} contradict each other", hint="leave one of them out")
        per_node = values.np // fewest
    values.np = fewest * per_node if per_node else None
    return fewest, per_node


def _per_node(text: str | None) -> int | None:
    if text is None or text in ("auto", "gpu"):
        return None  # one per slot: that is one per GPU, where the inventory does not say otherwise
    number = count(text)
    if number is None:
        raise UsageError(f"invalid --nproc-per-node {text}: expected a number, auto or gpu")
    return number


def _launcher(values: SimpleNamespace, configured: str | None, elastic: Elastic | None) -> str | None:
    named = {name for name in ("own" if values.gloo else "", "mpi" if values.mpi else "", values.launcher) if name}
    if len(named) > 1:
        raise UsageError("--gloo, --mpi and --launcher name different launchers", hint="leave all but one of them out")
    default = None if values.python is None and elastic is None and not values.max_restarts else "own"
    chosen = named.pop() if named else configured or default
    if values.python is not None and not values.python.startswith("/"):
        what = f"--python {values.python}: not an absolute path"
        raise UsageError(what, hint="write it as it is on every host: /path/to/bin/python")
    if values.python is not None and chosen == "mpi":
        what = "--python and --launcher mpi exclude each other: only the mpirun that `provision up` installed is used"
        raise UsageError(what, hint="use the engine's launcher: --launcher own; or leave --python out")
    if elastic is not None and chosen == "mpi":
        elastic_options = {"--min-np": values.min_np, "--max-np": values.max_np, "--host-discovery-script": values.host_discovery_script}
        names = " and ".join(name for name, value in elastic_options.items() if value is not None)
        raise UsageError(f"{names}: mpirun ends a job when a rank dies", hint="use the engine's launcher: --launcher own")
    if values.max_restarts and chosen == "mpi":
        raise UsageError("--max-restarts: mpirun starts no rank again", hint="use the engine's launcher: --launcher own")
    if chosen == "own" and (values.mpi_args or values.binding_args):
        raise UsageError("--mpi-args and --binding-args are mpirun's", hint="use it: --mpi")
    return chosen


def _environment(values: SimpleNamespace, config: horovod_config.Config) -> dict[str, str]:
    """The variables of every rank: -x wins over the options, they over the file, and the file over this shell."""
    settings = dict(config.variables)
    for option in JOB_OPTIONS:
        value = getattr(values, option.parameter) if option.spelled else None
        if value is None:
            continue
        if option.panel == HOROVOD:
            typed = _number(value) if option.kind is float else value
            settings[option.horovod] = horovod_config.as_text(option, typed, option.names[0])
        elif option.engine:
            settings[option.engine] = str(int(value) if option.kind is bool else value)
    inherited = forwarded_variables.select(os.environ, values.variables)
    if values.network_interfaces:
        inherited.pop("COLLECTIVE_NETWORK", None)
        inherited.pop("HOROVOD_GLOO_IFACE", None)
    environment = {**inherited, **horovod_config.unset(settings, os.environ), **settings}
    for entry in values.x or ():
        name, has_value, value = entry.partition("=")
        if not has_value and name not in os.environ:
            raise UsageError(f"-x {name}: this shell has no such variable", hint=f"give its value: -x {name}=…")
        environment[name] = value if has_value else os.environ[name]
    return environment


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text  # refused like a wrong value of the file


def _elastic(values: SimpleNamespace) -> Elastic | None:
    """An elastic job, if one of its options is given. Raises UsageError for numbers that do not rise, and a script that cannot run."""
    np, max_np, script, cooldown = values.np, values.max_np, values.host_discovery_script, values.blacklist_cooldown_range
    if values.min_np is None and max_np is None and script is None:
        return None
    min_np = values.min_np or np or 1
    if not min_np <= (np or min_np) <= (max_np or np or min_np):
        numbers = {"--min-np": min_np, "-np": np, "--max-np": max_np}
        typed = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
        raise UsageError(f"{typed}: wrong order", hint="1 <= min-np <= np <= max-np")
    if script is not None:
        try:
            is_script = script.read_bytes()[:2] == b"#!" and bool(script.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            is_script = False
        if not is_script:
            what = "it is copied to the first host and run there, so it must be a script that begins with #!"
            raise UsageError(what, where=f"--host-discovery-script {script}", hint="write one that calls your program: #!/bin/sh")
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1] <= MAX_SECONDS:
        what = f"invalid --blacklist-cooldown-range {cooldown[0]} {cooldown[1]}"
        raise UsageError(f"{what}: expected 0 < min <= max <= {MAX_SECONDS}")
    if values.oversubscribe:
        hint = "leave it out, and give the hosts the slots that you need (`slots` in the inventory, -H a:8)"
        raise UsageError("--oversubscribe: an elastic job starts as many ranks as its hosts have slots", hint=hint)
    return Elastic(np, min_np, max_np, script, values.slots_per_host, values.elastic_timeout, values.reset_limit, cooldown)


def _check_servers(values: SimpleNamespace) -> None:
    """Where the number of ranks is known. Raises UsageError if none is left to train."""
    fewest = values.min_np or values.np
    if values.servers is not None and fewest is not None and values.servers >= fewest:
        what = f"--servers {values.servers}: all {fewest} ranks would be parameter servers, and none a worker, which trains"
        raise UsageError(what, hint=f"start more ranks: -np {values.servers + 1} or more, or fewer servers")


def _words(option: str, text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}", hint="quote it as for a shell") from error
