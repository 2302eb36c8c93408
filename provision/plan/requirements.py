"""Requirements: the user's choices besides the hosts, for all hosts and for single hosts of the inventory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import typer
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema

from provision.base.panels import ADVANCED, OF_UP, FoldedPanel
from provision.catalog import OURS, Catalog

DEFAULT_PREFIX = "/opt/provision"
HOME_PREFIX = "provision"  # in the login user's home, if root is unavailable

NcclSource = Literal["auto", "wheel", "repository", "local_repository", "source"]
OpenMpiSource = Literal["auto", "wheel", "distribution", "source"]


WHAT = FoldedPanel("What is installed", OF_UP, home="up")


def option(panel: str | None, spelled: str, help: str, **checks: Any) -> object:
    """The option of a field, for ``Annotated``: ``spelled`` has its names and the placeholder of its value, as in `launch.option_table`."""
    names = [word for word in spelled.split() if word.startswith("-")]
    placeholder = " ".join(word for word in spelled.split() if word not in names) or None
    return typer.Option(*names, metavar=placeholder, help=help, rich_help_panel=panel, show_default=False, **checks)


# fmt: off
@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Choices:
    """Choices on the command line that the resolver uses unchanged; an annotated field is an option of its own.

    Attributes:
        torch: False leaves PyTorch out: Open MPI and the engine's NumPy side only.
        torch_version: an exact release, or None for the newest that fits.
        torch_index: an index for PyTorch instead of the project's own.
        nccl_source: the only source that NCCL may come from, or ``auto``.
        nccl_version, openmpi_version: an exact version, e.g. ``2.21.5``.
        python_downloads: whether uv may download a Python on hosts; not for bundles.
        packaged_pythons: only Pythons of the distribution's packages, for images; one that the inventory names stays.
        catalog: what is known of the world.
    """

    torch: bool = True
    torch_version: str | None = None
    torch_index: str | None = None
    nccl_source: NcclSource = "auto"
    nccl_version: str | None = None
    openmpi: OpenMpiSource = "auto"
    openmpi_version: str | None = None
    allow_downgrade: Annotated[bool, option(ADVANCED, "--allow-downgrade", "Replace a newer NCCL package or driver of a host by the older "
                                            "one of the plan; without it, `up` asks for NCCL, and refuses for a driver.")] = False
    allow_bad: Annotated[bool, option(ADVANCED, "--allow-bad", "Accept a requested version even if it is known to be bad; later runs "
                                      "keep it.")] = False
    driver: Annotated[str | None, option(WHAT, "--driver auto|BRANCH", "Also install NVIDIA's driver, e.g. 580, on hosts with GPUs, which "
                                         "are rebooted one after the other; without it drivers stay.")] = None
    python_downloads: bool = True
    packaged_pythons: bool = False
    catalog: SkipJsonSchema[Catalog] = OURS
# fmt: on


@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Requirements(Choices):
    """The resolver's input besides the facts.

    Attributes:
        wheels: names of the files in the user's wheel folder.
        wheels_kept: (name, SHA-256) of wheels of PyTorch from earlier runs, which are used again unless another is named.
        nccl_local: name of the user's ``nccl-local-repo-*.deb``, which contains version, system and CUDA.
        nccl_local_sha256: of that file.
        nccl_tarball: name of the user's tarball of NCCL's sources.
        nccl_tarball_version, nccl_tarball_sha256: the release in the sources, and the file's checksum.
        openmpi_tarball: name of the user's Open MPI tarball, which contains the version.
        openmpi_tarball_sha256: of that file.
        nccl_strict: no NCCL that was built for a newer CUDA than the driver's, although the driver runs it.
        cpu: use no GPU: the CPU builds, even on hosts with GPUs.
        horovod_names: also install Horovod's module names for the engine.
        kept: components whose version an earlier run chose: they are kept even if that version is known bad by now.
        engine_version, engine_sha256: of the engine's source archive.
        engine_wheels: names of wheels of these sources, those to prefer first.
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
    nccl_strict: bool = False
    cpu: bool = False
    horovod_names: bool = False
    kept: tuple[str, ...] = ()
    engine_version: str = ""
    engine_sha256: str | None = None
    engine_wheels: tuple[str, ...] = ()

    def allows_bad(self, component: str) -> bool:
        """Whether the requested version of a component may be known bad."""
        return self.allow_bad or component in self.kept

    def are_kept(self, fields: Collection[str]) -> bool:
        """Whether an earlier run chose one of the components that these fields are named after."""
        return any(field.partition("_")[0] in self.kept for field in fields)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the user's wheels, those of earlier runs included."""
        return (*self.wheels, *(name for name, _sha256 in self.wheels_kept))


@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class HostRequirements:
    """Requirements of one host: its variables in the inventory, and ``builds``: (package, CUDA) that earlier runs chose, to be kept."""

    slots: int | None = None
    prefix: str = DEFAULT_PREFIX
    interface: str | None = None
    builds: tuple[tuple[str, str | None], ...] = ()
