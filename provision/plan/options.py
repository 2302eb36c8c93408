"""Options: what the user requested on the command line besides the hosts, and the requirements that follow from it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from provision.base import downloads, run_folders, tarball
from provision.base.documents import Document
from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError
from provision.base.panels import ADVANCED, OF_UP, FoldedPanel
from provision.base.validation import MAX_COUNT
from provision.inventory import Inventory, last_run
from provision.plan.model import without_credentials
from provision.plan.requirements import WHAT, Choices, Requirements, option

SOURCES = FoldedPanel("Where packages come from", OF_UP, home="up")
SOURCES_FILE = "sources.json"  # in the folder of a run: `sources_of`
DataSource = Literal["auto", "mnist", "digits"]
DATA = option(None, "--data DIR", "Folder with the four MNIST files, instead of a download.", file_okay=False)


# fmt: off
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SmokeOptions:
    """Ranks, epochs and data of the smoke job; None stands for the inventory's slots and the data set's defaults.

    ``cache`` and ``source``: where `mnist.obtain` looks, and for which data set; a bundle contains its own. ``oversubscribe``: more
    ranks than slots are intended.
    """

    np: Annotated[int | None, option(None, "--np -np N", "Number of ranks; by default all slots.", min=1, max=MAX_COUNT)] = None
    oversubscribe: Annotated[bool, option(None, "--oversubscribe", "Allow more ranks than slots.")] = False
    epochs: Annotated[int | None, option(None, "--epochs N", "Number of epochs; by default that of the data.", min=1, max=MAX_COUNT)] = None
    data: Annotated[Path | None, DATA] = None
    cache: Path | None = None
    source: DataSource = "auto"


@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Options(Choices):
    """Options of the command line, besides the hosts; an annotated field is an option of its own.

    ``nccl_strict``: no NCCL that was built for a newer CUDA than the driver's. None keeps the choice of earlier runs, for it, ``cpu`` and
    ``horovod_names``.
    """

    index_url: str | None = None
    nccl_local: Path | None = None
    nccl_tarball: tarball.Sources | None = None
    nccl_strict: bool | None = None
    openmpi_tarball: Path | None = None
    cpu: Annotated[bool | None, option(WHAT, "--cpu/--no-cpu", "Install CPU builds without CUDA, also on hosts with GPUs; by default as "
                                       "in the last installation.")] = None
    horovod_names: Annotated[bool | None, option(WHAT, "--horovod-names/--no-horovod-names", "Install Horovod's module names for the "
                                                 "engine, so that `import horovod.torch` works; by default as installed.")] = None
    env: Annotated[Path | None, option(WHAT, "--env FILE", "Also create the environment of this uv.lock, pyproject.toml or "
                                       "requirements.txt.")] = None
    upgrade: Annotated[bool, option(WHAT, "--upgrade", "Resolve again instead of following provision.lock, and show what changes.")] = False
    wheels: Annotated[Path | None, option(SOURCES, "--wheels DIR", "Folder on this machine with PyTorch's wheels, and the engine's of "
                                          "the same sources.")] = None
    apt_mirror: Annotated[str | None, option(SOURCES, "--apt-mirror URL", "Mirror for Debian's or Ubuntu's packages; the hosts' own lists "
                                             "stay as they are.")] = None
    bundle: Annotated[Path | None, option(SOURCES, "--bundle FILE", "Install from this file of `provision bundle`; no host needs a "
                                           "network.", dir_okay=False)] = None
    check: Annotated[bool, option(None, "--check", "Change nothing; show what would change.")] = False
    full: Annotated[bool, option(ADVANCED, "--full", "Run every step, even where the survey shows that nothing has to change.")] = False
    first_step: Annotated[str | None, option(ADVANCED, "--from STEP", "Skip the steps before this one, e.g. `engine`.")] = None
    smoke: SmokeOptions | None = field(default_factory=SmokeOptions)
# fmt: on


def requirements_of(options: Options, engine: EngineSource) -> Requirements:
    """The resolver's input; of files their names and checksums."""
    choices = {each.name: getattr(options, each.name) for each in fields(Choices)}
    sources = options.nccl_tarball
    nccl_source = options.nccl_source
    if nccl_source == "auto":  # a file implies its source
        nccl_source = "local_repository" if options.nccl_local else "source" if sources else "auto"
    return Requirements(
        **{**choices, "nccl_source": nccl_source},
        wheels=tuple(sorted(path.name for path in options.wheels.glob("*.whl"))) if options.wheels else (),
        nccl_local=options.nccl_local.name if options.nccl_local else None,
        nccl_local_sha256=downloads.digest(options.nccl_local) if options.nccl_local else None,
        nccl_tarball=sources.path.name if sources else None,
        nccl_tarball_version=sources.version if sources else None,
        nccl_tarball_sha256=sources.sha256 if sources else None,
        openmpi_tarball=options.openmpi_tarball.name if options.openmpi_tarball else None,
        openmpi_tarball_sha256=downloads.digest(options.openmpi_tarball) if options.openmpi_tarball else None,
        nccl_strict=bool(options.nccl_strict),
        cpu=bool(options.cpu),
        horovod_names=bool(options.horovod_names),
        engine_version=engine.version,
        engine_sha256=engine.sha256,
        engine_wheels=tuple(path.name for path in engine.wheels),
    )


def sources_of(inventory: Inventory, options: Options) -> Document:
    """Where packages come from, for `with_earlier_sources`; logins are left out."""
    return {
        "inventory": last_run.identity(inventory),
        **{name: str(path.absolute()) for name in ("wheels", "bundle") if (path := getattr(options, name))},
        **{name: without_credentials(url) for name in ("index_url", "apt_mirror") if (url := getattr(options, name))},
    }


def with_earlier_sources(inventory: Inventory, options: Options) -> Options:
    """The options with the package index, apt mirror, wheels and bundle of the newest installation from here.

    Raises ProvisionError where its wheels or its bundle are gone.
    """
    for folder in run_folders.newest_first():
        with suppress(ValueError):
            given = json.loads(run_folders.content(folder / SOURCES_FILE) or b"{}")
            if given.pop("inventory", None) == last_run.identity(inventory):
                files = {name: Path(given[name]) for name in ("wheels", "bundle") if name in given}
                if gone := [path for path in files.values() if not path.exists()]:
                    hint = f"provision up {inventory.argument}, with where packages come from now"
                    raise ProvisionError("the installation came from there, and it is gone", where=str(gone[0]), hint=hint)
                return replace(options, **given | files)
    return options
