"""What the user asked for besides the hosts, and what the resolver is asked for with it."""

from __future__ import annotations

from dataclasses import field, fields
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from provision.base import downloads, tarball
from provision.base.engine_source import EngineSource
from provision.plan.requirements import Choices, NcclSource, Requirements

DataSource = Literal["auto", "mnist", "digits"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SmokeOptions:
    """Ranks, epochs and data of the training job; None takes the inventory's slots and the data set's own numbers.

    ``cache`` and ``source`` say where `mnist.obtain` looks and for which data set; a bundle brings its own. ``oversubscribe``: more
    ranks than slots are meant.
    """

    np: int | None = None
    epochs: int | None = None
    data: Path | None = None
    cache: Path | None = None
    source: DataSource = "auto"
    oversubscribe: bool = False


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Options(Choices):
    """What the user asked for on the command line, besides the hosts.

    ``upgrade`` leaves provision.lock out of account, ``full`` runs every step also where the survey shows nothing to do, and
    ``first_step`` leaves out the steps before it. ``cpu`` and ``horovod_names``: None keeps to what the hosts have.
    ``bundle``: a file from which everything comes instead of from a network.
    """

    index_url: str | None = None
    wheels: Path | None = None
    nccl_local: Path | None = None
    nccl_tarball: tarball.Sources | None = None
    openmpi_tarball: Path | None = None
    cpu: bool | None = None
    horovod_names: bool | None = None
    check: bool = False
    upgrade: bool = False
    full: bool = False
    first_step: str | None = None
    bundle: Path | None = None
    apt_mirror: str | None = None
    smoke: SmokeOptions | None = field(default_factory=SmokeOptions)


def requirements_of(options: Options, engine: EngineSource) -> Requirements:
    """What the resolver is asked for, as the user wrote it; of files their names and checksums."""
    choices = {each.name: getattr(options, each.name) for each in fields(Choices)}
    sources = options.nccl_tarball
    return Requirements(
        **{**choices, "nccl_source": _nccl_source(options)},
        wheels=tuple(sorted(path.name for path in options.wheels.glob("*.whl"))) if options.wheels else (),
        nccl_local=options.nccl_local.name if options.nccl_local else None,
        nccl_local_sha256=downloads.digest(options.nccl_local) if options.nccl_local else None,
        nccl_tarball=sources.path.name if sources else None,
        nccl_tarball_version=sources.version if sources else None,
        nccl_tarball_sha256=sources.sha256 if sources else None,
        openmpi_tarball=options.openmpi_tarball.name if options.openmpi_tarball else None,
        openmpi_tarball_sha256=downloads.digest(options.openmpi_tarball) if options.openmpi_tarball else None,
        cpu=bool(options.cpu),
        horovod_names=bool(options.horovod_names),
        engine_version=engine.version,
        engine_sha256=engine.sha256,
    )


def _nccl_source(options: Options) -> NcclSource:
    """Who gives a file wants it."""
    if options.nccl_source != "auto":
        return options.nccl_source
    return "local" if options.nccl_local else "source" if options.nccl_tarball else "auto"
