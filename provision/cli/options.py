"""Options that several commands share, and the values they are turned into."""

from __future__ import annotations

import functools
import getpass
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args
from urllib.parse import urlsplit

import typer

from provision import catalog, inventory
from provision.base import downloads, tarball, terminal
from provision.base.errors import UsageError
from provision.base.validation import MAX_COUNT
from provision.catalog import overlay
from provision.inventory import Inventory
from provision.plan.options import Options
from provision.plan.requirements import NcclSource, OpenMpiSource
from provision.resolve.nccl_builds import local_repository
from provision.resolve.openmpi import known_checksum, tarball_version

_Command = TypeVar("_Command", bound=Callable[..., Any])

Hosts = Annotated[str, typer.Argument(metavar="HOSTS", help="An Ansible inventory (INI or YAML), `host1,host2`, or `localhost`.")]
OptionalHosts = Annotated[
    str | None, typer.Argument(metavar="HOSTS", show_default=False, help="As for `up`; may be left out with --facts.")
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        help="Only these hosts, as with Ansible: `a,b`, `!c`, a group; `@failed`: those that failed in the last run; `!@FILE`: "
        "not those that FILE lists.",
    ),
]
Cpu = Annotated[
    bool | None,
    typer.Option(
        "--cpu/--no-cpu",
        show_default=False,
        help="Install CPU builds without CUDA, also on hosts with GPUs; by default as in the last installation.",
    ),
]
Driver = Annotated[
    str | None,
    typer.Option(
        "--driver",
        metavar="auto|BRANCH",
        help="Also install NVIDIA's driver, e.g. 580, on hosts with GPUs, which are rebooted one after the other. Without it drivers stay.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")]
Np = Annotated[int | None, typer.Option("--np", "-np", min=1, max=MAX_COUNT, help="Number of ranks; by default all slots.")]
Oversubscribe = Annotated[bool, typer.Option("--oversubscribe", help="Allow more ranks than slots.")]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1, max=MAX_COUNT, help="Number of epochs; by default that of the data set.")]
AptMirror = Annotated[
    str | None,
    typer.Option(
        "--apt-mirror",
        metavar="URL",
        help="Mirror for Debian's or Ubuntu's packages; the hosts' own lists stay as they are, and `plan` uses them.",
    ),
]
CatalogFolder = Annotated[
    Path | None,
    typer.Option("--catalog", metavar="DIR", help="Folder with catalogue files that are merged over ours and yours.", file_okay=False),
]
Data = Annotated[Path | None, typer.Option("--data", help="Folder with the four MNIST files, instead of a download.", file_okay=False)]


def existing(option: str, folder: Path, hint: str | None = None) -> Path:
    """A folder that an option names. Raises UsageError where it is missing."""
    if not folder.is_dir():
        raise UsageError(f"{option} {folder}: no such folder", hint=hint)
    return folder


def use_own_files(*folders: Path) -> None:
    """Use the user's own catalogue files, and those of these folders over them. Raises UsageError for an invalid one."""
    catalog.use(overlay.read([overlay.folder_of_user(), *folders]))


def requirements(
    torch: Annotated[str | None, typer.Option("--torch", help="PyTorch release, e.g. 2.13.0.", metavar="VERSION")] = None,
    torch_index: Annotated[str | None, typer.Option(help="Package index for PyTorch.", metavar="URL")] = None,
    index_url: Annotated[str | None, typer.Option(help="Package index for everything else.", metavar="URL")] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(help="Folder on this machine with PyTorch's wheels, and the engine's for hosts without a compiler.", file_okay=False),
    ] = None,
    without_torch: Annotated[
        bool,
        typer.Option(
            "--without-torch", help="Install Open MPI and the engine for NumPy only; the engine's self-check replaces the training job."
        ),
    ] = False,
    nccl: Annotated[str | None, typer.Option("--nccl", help="NCCL release, e.g. 2.21.5.", metavar="VERSION")] = None,
    nccl_source: Annotated[str, typer.Option(help=f"Source of NCCL: {', '.join(get_args(NcclSource))}.")] = "auto",
    nccl_local: Annotated[Path | None, typer.Option(help="A downloaded nccl-local-repo-*.deb of NVIDIA's.", dir_okay=False)] = None,
    nccl_tarball: Annotated[Path | None, typer.Option(help="Tarball with NCCL's sources, to build it from.", dir_okay=False)] = None,
    nccl_strict: Annotated[
        bool | None,
        typer.Option(
            "--nccl-strict/--no-nccl-strict",
            help="No NCCL built for a newer CUDA than the driver's, even if it runs; by default as installed.",
        ),
    ] = None,
    openmpi: Annotated[str, typer.Option(help=f"Source of Open MPI: {', '.join(get_args(OpenMpiSource))}.")] = "auto",
    openmpi_version: Annotated[str | None, typer.Option(help="Open MPI release, e.g. 4.1.8.", metavar="VERSION")] = None,
    openmpi_tarball: Annotated[
        Path | None, typer.Option(help="Tarball openmpi-4.x.y.tar.gz or .bz2, to build it from.", dir_okay=False)
    ] = None,
    allow_downgrade: Annotated[
        bool, typer.Option("--allow-downgrade", help="Replace a newer NCCL among a host's system packages by the older one of the plan.")
    ] = False,
    horovod_names: Annotated[
        bool | None,
        typer.Option(
            "--horovod-names/--no-horovod-names",
            help="Install Horovod's module names for the engine, so that `import horovod.torch` works; by default as installed.",
        ),
    ] = None,
    allow_bad: Annotated[bool, typer.Option("--allow-bad", help="Accept a requested version even if it is known to be bad.")] = False,
    catalog_folder: CatalogFolder = None,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Resolve again instead of following provision.lock, and show what changes.")
    ] = False,
) -> Options:
    """The options that a plan depends on. Raises UsageError for invalid ones."""
    if catalog_folder is not None:
        use_own_files(existing("--catalog", catalog_folder))
    if wheels is not None:
        existing("--wheels", wheels)
    one_of("--nccl-source", nccl_source, get_args(NcclSource))
    return Options(
        torch=not without_torch,
        torch_version=_version("--torch", torch),
        torch_index=url("--torch-index", torch_index),
        index_url=url("--index-url", index_url),
        wheels=wheels.resolve() if wheels else None,
        nccl_source=nccl_source,  # type: ignore[arg-type]
        nccl_version=_version("--nccl", nccl),
        nccl_local=_nccl_local(nccl_local, nccl_source),
        nccl_tarball=_nccl_tarball(nccl_tarball, nccl_local, nccl_source, _version("--nccl", nccl)),
        nccl_strict=nccl_strict,
        openmpi=one_of("--openmpi", openmpi, get_args(OpenMpiSource)),
        openmpi_version=_version("--openmpi-version", openmpi_version),
        openmpi_tarball=_openmpi_tarball(openmpi_tarball),
        allow_downgrade=allow_downgrade,
        horovod_names=horovod_names,
        allow_bad=allow_bad,
        upgrade=upgrade,
        smoke=None,
    )


AskPass = Annotated[bool, typer.Option("--ask-pass", "-k", help="Prompt for the hosts' SSH password (needs sshpass).")]


def ssh_password(ask_pass: AskPass = False) -> str | None:
    """The SSH password, where requested. Raises UsageError without a terminal to prompt on."""
    return _ask("SSH password: ") if ask_pass else None


def passwords(
    ask_become_pass: Annotated[bool, typer.Option("--ask-become-pass", "-K", help="Prompt for the hosts' sudo password.")] = False,
    ask_pass: AskPass = False,
    become_password_file: Annotated[Path | None, typer.Option(help="File that contains the sudo password.", dir_okay=False)] = None,
) -> Mapping[str, str]:
    """The passwords ``connection`` and ``become``, where requested. Raises UsageError without a terminal to prompt on."""
    found = {}
    if (password := ssh_password(ask_pass)) is not None:
        found["connection"] = password
    if become_password_file is not None:
        try:
            found["become"] = become_password_file.read_text(encoding="utf-8").strip("\n")
        except OSError as error:
            raise UsageError(f"cannot read it: {error.strerror}", where=str(become_password_file)) from error
    elif ask_become_pass:
        found["become"] = _ask("sudo password of the hosts: ")
    return found


def inventory_of(hosts: str, limit: str | None) -> Inventory:
    """HOSTS and ``--limit`` as an inventory, whose warnings are printed. Raises UsageError for an invalid one."""
    found = inventory.load(hosts, limit=limit)
    for problem in found.problems:
        terminal.err().say(f"{problem.where}: {problem.severity}: {problem.what}", hint=problem.hint)
    return found


def with_options(**groups: Callable[..., Any]) -> Callable[[_Command], _Command]:
    """Add the options of other functions to a command.

    ``@with_options(options=requirements)`` adds those of ``requirements``, calls it with their values, and passes what it returns to the
    command as the keyword argument ``options``.
    """

    def decorate(command: _Command) -> _Command:
        own = inspect.signature(command, eval_str=True)
        shared = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

        @functools.wraps(command)
        def called(*arguments: Any, **values: Any) -> Any:
            for name, group in groups.items():
                values[name] = group(**{option: values.pop(option) for option in shared[name] if option in values})
            return command(*arguments, **values)

        mine = [parameter for name, parameter in own.parameters.items() if name not in groups]
        parameters = [*mine, *(parameter for group in shared.values() for parameter in group.values())]
        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        called.__signature__ = own.replace(parameters=keyword)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword} | {"return": own.return_annotation}
        return called  # type: ignore[return-value]

    return decorate


def one_of(option: str, value: str, choices: tuple[str, ...]) -> Any:
    """The value, if it is one of the choices. Raises UsageError."""
    if value not in choices:
        raise UsageError(f"{option} {value}: must be one of {', '.join(choices)}")
    return value


def _version(option: str, value: str | None) -> str | None:
    """A release, without its build (``+cu126``, ``-1+cuda12.4``), which the plan chooses per host. Raises UsageError."""
    if value is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)+", value):
        release = re.match(r"[0-9]+(\.[0-9]+)+(?=[-+])", value)
        if release:
            raise UsageError(f"{option} {value}: name the release alone; the plan chooses each host's build", hint=f"{option} {release[0]}")
        raise UsageError(f"{option} {value}: not a version", hint="write it like 2.21.5")
    return value


def url(option: str, value: str | None) -> str | None:
    """The value, if it is a URL. Raises UsageError."""
    if value is not None:
        try:
            parts = urlsplit(value)
            named = parts.hostname if parts.scheme in ("http", "https") else parts.scheme == "file"
        except ValueError:  # brackets that are no IPv6 address
            named = None
        if not named or not value.isprintable() or " " in value:
            raise UsageError(f"{option} {value}: not a URL", hint="write it like https://host.example/path")
    return value


def _nccl_local(path: Path | None, source: str) -> Path | None:
    if path is None:
        if source == "local":
            raise UsageError("--nccl-source local: the package's file is missing", hint="name it: --nccl-local FILE")
        return None
    if source not in ("auto", "local"):
        raise UsageError(f"--nccl-local and --nccl-source {source} exclude each other", hint="leave one of them out")
    name = _file("--nccl-local", path)
    if path.suffix == ".rpm":
        hint = "take NCCL from NVIDIA's repository (--nccl-source repository) or the wheel (--nccl-source wheel)"
        raise UsageError(f"--nccl-local {path}: only .deb packages can be used", hint=hint)
    if local_repository(name) is None:
        example = "nccl-local-repo-ubuntu2204-2.21.5-cuda12.4_1.0-1_amd64.deb"
        raise UsageError(f"--nccl-local {path}: not one of NVIDIA's local repository packages", hint=f"they are called {example}")
    return path.resolve()


def _nccl_tarball(path: Path | None, local: Path | None, source: str, version: str | None) -> tarball.Sources | None:
    if path is None:
        return None
    if source not in ("auto", "source") or local is not None:
        other = "--nccl-local" if local is not None else f"--nccl-source {source}"
        raise UsageError(f"--nccl-tarball and {other} exclude each other", hint="leave one of them out")
    _file("--nccl-tarball", path)
    sources = tarball.nccl(path)
    if version not in (None, sources.version):
        raise UsageError(
            f"--nccl-tarball {path}: it contains NCCL {sources.version}, but --nccl requests {version}", hint="leave one of them out"
        )
    return sources


def _openmpi_tarball(path: Path | None) -> Path | None:
    if path is None:
        return None
    name = _file("--openmpi-tarball", path)
    if tarball_version(name) is None:
        raise UsageError(f"--openmpi-tarball {path}: its name does not say a version", hint="call it openmpi-4.1.8.tar.gz")
    expected = known_checksum(name)
    if expected is not None and downloads.digest(path) != expected:
        raise UsageError(
            f"--openmpi-tarball {path}: it is damaged, or not what its name says: its SHA-256 is not {expected}",
            hint="fetch it again from open-mpi.org; or leave it out: the plan fetches that very file",
        )
    return path.resolve()


def _file(option: str, path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"{option} {path}: no such file")
    return path.name


def _ask(prompt: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", getpass.GetPassWarning)  # it would read a password and show it
            return getpass.getpass(prompt)
    except (EOFError, getpass.GetPassWarning):
        raise UsageError("no terminal to prompt for the password on", hint="use --become-password-file FILE") from None
