"""Options: what the user requested on the command line besides the hosts, and the requirements that follow from it."""

from __future__ import annotations

from dataclasses import field, fields
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from provision.base import downloads, tarball
from provision.base.engine_source import EngineSource
from provision.plan.requirements import Choices, Requirements

DataSource = Literal["auto", "mnist", "digits"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SmokeOptions:
    """Ranks, epochs and data of the smoke job; None stands for the inventory's slots and the data set's defaults.

    ``cache`` and ``source``: where `mnist.obtain` looks, and for which data set; a bundle contains its own. ``oversubscribe``: more
    ranks than slots are intended.
    """

    np: int | None = None
    epochs: int | None = None
    data: Path | None = None
    cache: Path | None = None
    source: DataSource = "auto"
    oversubscribe: bool = False


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Options(Choices):
    """Options of the command line, besides the hosts.

    ``upgrade`` ignores provision.lock, ``full`` runs every step even if the survey shows nothing to do, and ``first_step`` skips the
    steps before it. ``cpu``, ``horovod_names`` and ``nccl_strict``: None keeps the choice of earlier runs. ``bundle``: install from this
    file without a network. ``env``: also create the environment of this file's project.
    """

    index_url: str | None = None
    wheels: Path | None = None
    nccl_local: Path | None = None
    nccl_tarball: tarball.Sources | None = None
    openmpi_tarball: Path | None = None
    cpu: bool | None = None
    horovod_names: bool | None = None
    nccl_strict: bool | None = None
    check: bool = False
    upgrade: bool = False
    full: bool = False
    first_step: str | None = None
    bundle: Path | None = None
    apt_mirror: str | None = None
    env: Path | None = None
    smoke: SmokeOptions | None = field(default_factory=SmokeOptions)


def requirements_of(options: Options, engine: EngineSource) -> Requirements:
    """The resolver's input; of files their names and checksums."""
    choices = {each.name: getattr(options, each.name) for each in fields(Choices)}
    sources = options.nccl_tarball
    nccl_source = options.nccl_source
    if nccl_source == "auto":  # a file implies its source
        nccl_source = "local" if options.nccl_local else "source" if sources else "auto"
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
    )
