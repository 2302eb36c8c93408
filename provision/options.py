"""Options that several commands share, each written down once, and what becomes of them."""

from __future__ import annotations

import functools
import getpass
import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args
from urllib.parse import urlsplit

import typer

from provision import downloads, horovod_config, inventory, last_run, main_job, tarball
from provision.errors import UsageError
from provision.inventory import Inventory
from provision.launch import LAUNCHERS, Elastic
from provision.resolve.nccl_builds import local_repository
from provision.resolve.openmpi import known_checksum, tarball_version
from provision.resolve.wishes import NcclSource, OpenMpiSource
from provision.run import RunOptions

_Command = TypeVar("_Command", bound=Callable[..., Any])

Hosts = Annotated[str, typer.Argument(metavar="HOSTS", help="An Ansible inventory (INI or YAML), `host1,host2`, or `localhost`.")]
HostsOrNot = Annotated[
    str | None, typer.Argument(metavar="[HOSTS]", show_default=False, help="As for `up`; with --facts it may be left out.")
]
Limit = Annotated[
    str | None,
    typer.Option("--limit", help="Only these hosts, as Ansible writes it: `a,b`, `!c`, a group; `@failed`: those that failed last time."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output and nothing else there.")]
Np = Annotated[int | None, typer.Option("--np", min=1, help="Ranks; all slots of the inventory by default.")]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1, help="Epochs to train; the data set's own number by default.")]
Data = Annotated[Path | None, typer.Option("--data", help="A folder with the four MNIST files, instead of fetching them.", file_okay=False)]


def wishes(
    torch: Annotated[str | None, typer.Option("--torch", help="A PyTorch release, e.g. 2.13.0.", metavar="VERSION")] = None,
    torch_index: Annotated[str | None, typer.Option(help="A package index to take PyTorch from.", metavar="URL")] = None,
    index_url: Annotated[str | None, typer.Option(help="A package index for everything else.", metavar="URL")] = None,
    wheels: Annotated[Path | None, typer.Option(help="A folder of wheels on this machine to take PyTorch from.", file_okay=False)] = None,
    without_torch: Annotated[
        bool,
        typer.Option(
            "--without-torch", help="Open MPI and the engine's NumPy side only; its self-check takes the place of the training job."
        ),
    ] = False,
    nccl: Annotated[str | None, typer.Option("--nccl", help="An NCCL version, e.g. 2.21.5.", metavar="VERSION")] = None,
    nccl_source: Annotated[str, typer.Option(help=f"Take NCCL only from here: {', '.join(get_args(NcclSource))}.")] = "auto",
    nccl_local: Annotated[Path | None, typer.Option(help="NVIDIA's nccl-local-repo-*.deb, as downloaded by hand.", dir_okay=False)] = None,
    nccl_tarball: Annotated[Path | None, typer.Option(help="A tarball of NCCL's sources to build it from.", dir_okay=False)] = None,
    openmpi: Annotated[str, typer.Option(help=f"Take Open MPI only from here: {', '.join(get_args(OpenMpiSource))}.")] = "auto",
    openmpi_version: Annotated[str | None, typer.Option(help="An Open MPI 4.x.", metavar="VERSION")] = None,
    openmpi_tarball: Annotated[
        Path | None, typer.Option(help="A tarball openmpi-4.x.y.tar.gz or .bz2 to build it from.", dir_okay=False)
    ] = None,
    openmpi_cuda: Annotated[bool, typer.Option("--openmpi-cuda", help="Build Open MPI for buffers in GPU memory.")] = False,
    openmpi_verbs: Annotated[bool, typer.Option("--openmpi-verbs", help="Build Open MPI with InfiniBand verbs.")] = False,
    allow_bad: Annotated[bool, typer.Option("--allow-bad", help="Take a version that was asked for even if it is known bad.")] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Resolve anew instead of keeping to provision.lock, and show what differs.")
    ] = False,
) -> main_job.Options:
    """What the plan is to take into account. Raises UsageError for what cannot be meant."""
    if wheels is not None and not wheels.is_dir():
        raise UsageError(f"--wheels {wheels}: no such folder")
    _one_of("--nccl-source", nccl_source, get_args(NcclSource))
    return main_job.Options(
        torch=not without_torch,
        torch_version=_version("--torch", torch),
        torch_index=url("--torch-index", torch_index),
        index_url=url("--index-url", index_url),
        wheels=wheels.resolve() if wheels else None,
        nccl_source=nccl_source,  # type: ignore[arg-type]
        nccl_version=_version("--nccl", nccl),
        nccl_local=_nccl_local(nccl_local, nccl_source),
        nccl_tarball=_nccl_tarball(nccl_tarball, nccl_local, nccl_source, _version("--nccl", nccl)),
        openmpi=_one_of("--openmpi", openmpi, get_args(OpenMpiSource)),
        openmpi_version=_version("--openmpi-version", openmpi_version),
        openmpi_tarball=_openmpi_tarball(openmpi_tarball),
        openmpi_cuda=openmpi_cuda,
        openmpi_verbs=openmpi_verbs,
        allow_bad=allow_bad,
        upgrade=upgrade,
        smoke=None,
    )


def run_options(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND…", help="The program and its arguments; `python` is the hosts' own.")
    ] = None,
    np: Annotated[int | None, typer.Option("-np", "--num-proc", min=1, help="Ranks; all slots by default.")] = None,
    min_np: Annotated[
        int | None, typer.Option("--min-np", min=1, help="An elastic job: goes on while there are so many ranks (our own launcher).")
    ] = None,
    max_np: Annotated[int | None, typer.Option("--max-np", min=1, help="An elastic job: at most so many ranks.")] = None,
    host_discovery_script: Annotated[
        Path | None,
        typer.Option(
            help="An elastic job: a program that prints `host:slots` lines; asked again and again, on the first host.", exists=True
        ),
    ] = None,
    variables: Annotated[
        list[str] | None, typer.Option("-x", metavar="NAME[=VALUE]", help="A variable for every rank; without a value, this shell's.")
    ] = None,
    bring: Annotated[
        list[Path] | None, typer.Option("--bring", help="A file or folder to bring along besides the program's file.", exists=True)
    ] = None,
    workdir: Annotated[
        str | None, typer.Option("--workdir", help="Run in this folder, which is there on every host; nothing is brought.", metavar="DIR")
    ] = None,
    restart_from: Annotated[
        str | None,
        typer.Option(help="Go on from the last valid checkpoint in this folder of rank 0's host (hvd.Checkpoints).", metavar="DIR"),
    ] = None,
    output_filename: Annotated[
        Path | None, typer.Option(help="Keep each rank's output in DIR/rank.N/stdout and stderr.", metavar="DIR", file_okay=False)
    ] = None,
    quiet_ranks: Annotated[bool, typer.Option("--quiet-ranks", help="Show rank 0's output only.")] = False,
    timeline_filename: Annotated[str | None, typer.Option(help="Write the timeline to this file on rank 0's host.")] = None,
    fusion_threshold_mb: Annotated[float | None, typer.Option(help="Gradients up to this size travel together.", min=0)] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds in which all hosts answer and all ranks meet.", min=1)] = None,
    launcher: Annotated[str | None, typer.Option(help="`mpi`: under mpirun; `own`: over ssh, without MPI.", metavar="mpi|own")] = None,
    gloo: Annotated[bool, typer.Option("--gloo", help="The same as --launcher own.")] = False,
    mpi: Annotated[bool, typer.Option("--mpi", help="The same as --launcher mpi (default).")] = False,
    python: Annotated[
        str | None,
        typer.Option(
            help="A Python with the engine, there on every host: own launcher, nothing of ours need be installed.", metavar="PATH"
        ),
    ] = None,
    network_interfaces: Annotated[
        str | None, typer.Option(help="What hosts use between them: interfaces or networks (CIDR), comma separated.", metavar="eth0,…")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="Settings as horovodrun's YAML file has them; options win.", metavar="FILE", dir_okay=False)
    ] = None,
    autotune: Annotated[bool, typer.Option("--autotune", help="Let the engine choose how much travels together, while training.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what is started where.")] = False,
) -> RunOptions:
    """What is to be launched. Raises UsageError for what cannot be meant."""
    config = horovod_config.read(config_file) if config_file is not None else horovod_config.Config()
    elastic = Elastic(np, min_np or 1, max_np, host_discovery_script) if min_np or max_np or host_discovery_script else None
    if elastic and not elastic.least <= (np or elastic.least) <= (max_np or np or elastic.least):
        asked_for = {"--min-np": elastic.least, "-np": np, "--max-np": max_np}
        said = ", ".join(f"{name} {number}" for name, number in asked_for.items() if number is not None)
        raise UsageError(f"{said}: they must rise", todo="1 <= min-np <= np <= max-np")
    asked = {name for name in ("own" if gloo else "", "mpi" if mpi else "", launcher) if name}
    if len(asked) > 1:
        raise UsageError("--gloo, --mpi and --launcher name different launchers", todo="leave all but one of them out")
    usual = "mpi" if python is None and elastic is None else "own"
    chosen = _one_of("--launcher", asked.pop() if asked else config.launcher or usual, tuple(LAUNCHERS))
    if python is not None and not python.startswith("/"):
        raise UsageError(f"--python {python}: this is no absolute path", todo="write it as it is on every host: /path/to/bin/python")
    if python is not None and chosen == "mpi":
        raise UsageError("--python: mpirun would have to be found beside it", todo="use our own launcher: --launcher own")
    if elastic is not None and chosen == "mpi":
        raise UsageError("--min-np and --max-np: mpirun ends a job when a rank dies", todo="use our own launcher: --launcher own")
    if bring and workdir is not None:
        raise UsageError("--bring and --workdir: with a folder of yours nothing is brought", todo="leave one of them out")
    settings = {
        "COLLECTIVE_TIMELINE": timeline_filename,
        "COLLECTIVE_RESTART_FROM": restart_from,
        "COLLECTIVE_FUSION_MB": fusion_threshold_mb,
        "COLLECTIVE_START_TIMEOUT": start_timeout,
        "COLLECTIVE_AUTOTUNE": 1 if autotune or config.autotune else None,
    }
    environment = {**config.variables, **{name: str(value) for name, value in settings.items() if value is not None}}
    for entry in variables or ():
        name, has_value, value = entry.partition("=")
        if not has_value and name not in os.environ:
            raise UsageError(f"-x {name}: there is no such variable here", todo=f"give its value: -x {name}=…")
        environment[name] = value if has_value else os.environ[name]
    return RunOptions(
        tuple(command or ()),
        np,
        environment,
        workdir,
        tuple(bring or ()),
        output_filename,
        quiet_ranks,
        launcher=chosen,
        python=python,
        networks=tuple(name for name in (network_interfaces or "").split(",") if name),
        start_timeout=start_timeout,
        verbose=verbose,
        elastic=elastic,
    )


def passwords(
    ask_become_pass: Annotated[bool, typer.Option("--ask-become-pass", "-K", help="Ask for the hosts' sudo password.")] = False,
    ask_pass: Annotated[bool, typer.Option("--ask-pass", "-k", help="Ask for the hosts' ssh password (needs sshpass).")] = False,
    become_password_file: Annotated[Path | None, typer.Option(help="A file that holds the sudo password.", dir_okay=False)] = None,
) -> Mapping[str, str]:
    """``connection`` and ``become``, where they are given. Raises UsageError where there is nobody to ask."""
    found = {}
    if ask_pass:
        found["connection"] = _ask("SSH password: ")
    if become_password_file is not None:
        try:
            found["become"] = become_password_file.read_text(encoding="utf-8").strip("\n")
        except OSError as error:
            raise UsageError(f"cannot read it: {error.strerror}", where=str(become_password_file)) from error
    elif ask_become_pass:
        found["become"] = _ask("sudo password of the hosts: ")
    return found


def inventory_of(hosts: str, limit: str | None) -> Inventory:
    """HOSTS and ``--limit`` as an inventory; what is odd about it goes to standard error. Raises UsageError for what cannot be used."""
    if limit is not None and last_run.FAILED in limit.split(","):
        failed = ",".join(last_run.failed_hosts(inventory.load(hosts)))
        limit = ",".join(failed if word == last_run.FAILED else word for word in limit.split(","))
    found = inventory.load(hosts, limit=limit)
    for finding in found.findings:
        todo = f"\n  → {finding.todo}" if finding.todo else ""
        typer.echo(f"{finding.where}: {finding.level}: {finding.message}{todo}", err=True)
    return found


def also(**groups: Callable[..., Any]) -> Callable[[_Command], _Command]:
    """Give a command the options of other functions: ``@also(options=wishes)`` calls ``wishes`` with its own and passes on what it returns.

    The command takes that as the keyword argument ``options``.
    """

    def decorate(command: _Command) -> _Command:
        own = inspect.signature(command, eval_str=True)
        shared = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

        @functools.wraps(command)
        def called(**given: Any) -> Any:
            for name, group in groups.items():
                given[name] = group(**{option: given.pop(option) for option in shared[name]})
            return command(**given)

        mine = [parameter for name, parameter in own.parameters.items() if name not in groups]
        parameters = [*mine, *(parameter for group in shared.values() for parameter in group.values())]
        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        called.__signature__ = own.replace(parameters=keyword)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword} | {"return": own.return_annotation}
        return called  # type: ignore[return-value]

    return decorate


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise UsageError(f"{option} {value}: one of {', '.join(choices)}")
    return value


def _version(option: str, value: str | None) -> str | None:
    """A release alone. Which build of it (``+cu126``, ``-1+cuda12.4``) a host gets is what the plan finds out."""
    if value is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)+", value):
        release = re.match(r"[0-9]+(\.[0-9]+)+(?=[-+])", value)
        if release:
            raise UsageError(f"{option} {value}: name the release alone; the plan takes each host's build", todo=f"{option} {release[0]}")
        raise UsageError(f"{option} {value}: this is no version", todo="write it like 2.21.5")
    return value


def url(option: str, value: str | None) -> str | None:
    """An address that was given, if it is one. Raises UsageError."""
    if value is not None:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https", "file") or not (parts.netloc or parts.scheme == "file") or not value.isprintable():
            raise UsageError(f"{option} {value}: this is no address", todo="write it like https://index.example/simple")
    return value


def _nccl_local(path: Path | None, source: str) -> Path | None:
    if path is None:
        if source == "local":
            raise UsageError("--nccl-source local: no package is given", todo="give it: --nccl-local FILE")
        return None
    if source not in ("auto", "local"):
        raise UsageError(f"--nccl-local and --nccl-source {source} exclude each other", todo="leave one of them out")
    name = _file("--nccl-local", path)
    if path.suffix == ".rpm":
        todo = "take NCCL from NVIDIA's repository (--nccl-source repository) or the wheel (--nccl-source wheel)"
        raise UsageError(f"--nccl-local {path}: only .deb packages can be used", todo=todo)
    if local_repository(name) is None:
        example = "nccl-local-repo-ubuntu2204-2.21.5-cuda12.4_1.0-1_amd64.deb"
        raise UsageError(f"--nccl-local {path}: not one of NVIDIA's local repository packages", todo=f"they are called {example}")
    return path.resolve()


def _nccl_tarball(path: Path | None, local: Path | None, source: str, version: str | None) -> Path | None:
    if path is None:
        return None
    if source not in ("auto", "source") or local is not None:
        other = "--nccl-local" if local is not None else f"--nccl-source {source}"
        raise UsageError(f"--nccl-tarball and {other} exclude each other", todo="leave one of them out")
    _file("--nccl-tarball", path)
    inside = tarball.nccl_version(path)
    if version is not None and inside != version:
        raise UsageError(f"--nccl-tarball {path}: it holds NCCL {inside}, and --nccl {version} was asked for", todo="leave one of them out")
    return path.resolve()


def _openmpi_tarball(path: Path | None) -> Path | None:
    if path is None:
        return None
    name = _file("--openmpi-tarball", path)
    if tarball_version(name) is None:
        raise UsageError(f"--openmpi-tarball {path}: its name does not say a version", todo="call it openmpi-4.1.8.tar.gz")
    expected = known_checksum(name)
    if expected is not None and downloads.digest(path) != expected:
        raise UsageError(
            f"--openmpi-tarball {path}: it is damaged, or not what its name says: its SHA-256 is not {expected}",
            todo="fetch it again from open-mpi.org; or leave it out: the plan fetches that very file",
        )
    return path.resolve()


def _file(option: str, path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"{option} {path}: no such file")
    return path.name


def _ask(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError:
        raise UsageError("no terminal to ask for the password on", todo="use --become-password-file FILE") from None
