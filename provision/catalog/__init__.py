"""The catalogue: facts about the outside world, one YAML file per subject, each fact with its source and date.

It is a value, which the command line makes once and passes down: a `Catalog` has a function per file, ``catalog.nccl().repository.builds``.
A file is read and validated on first use.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # commands that need no catalogue do not import its models
    from provision.catalog import models
    from provision.catalog.overlay import Overlay

_HINT = "correct the file, or install provision again"


def now() -> datetime.datetime:
    """The time by which the age of knowledge is counted."""
    return datetime.datetime.now(tz=datetime.timezone.utc)


def content(name: str) -> bytes:
    """The bytes of our file ``name`` (without ``.yaml``)."""
    return resources.files(__name__).joinpath(f"{name}.yaml").read_bytes()


def date_of_ours() -> str:
    """The newest date in our files, read without their models, as every command with a feed needs it."""
    from provision.catalog.models import FILES

    return str(max(date for name in FILES for date in re.findall(r'date"?: "?(\d{4}-\d\d-\d\d)', content(name).decode())))


def ours(name: str) -> tuple[Any, str]:
    """The content of our file ``name`` as plain data, and how messages call it."""
    from provision.base import validation

    where = f"provision/catalog/{name}.yaml"
    return validation.read(validation.decoded(content(name), where, _HINT), where, "yaml", _HINT), where


@cache  # they do not change while this runs
def _of_ours(name: str) -> Any:
    from provision.base import validation
    from provision.catalog.models import FILES

    return validation.parse(FILES[name], content(name), f"provision/catalog/{name}.yaml", "yaml", _HINT)


def troubles(version: str, entries: Iterable[models.Trouble]) -> list[str]:
    """The entries of a list of known problems that cover ``version``, each with its source."""
    return [str(entry) for entry in entries if entry.covers(version)]


@dataclass(frozen=True)
class Reach:
    """How far a catalogue reaches: the newest releases that it knows, and until when all three were looked for.

    ``overlay``: the digest of the user's files that are merged over ours.
    """

    pytorch: str
    cuda: str
    nccl: str
    date: str
    overlay: str | None = None

    def __str__(self) -> str:
        own = f", with your own files ({self.overlay[:12]})" if self.overlay else ""
        return f"PyTorch ≤ {self.pytorch}, CUDA ≤ {self.cuda}, NCCL ≤ {self.nccl}, as of {self.date}{own}"


class Catalog:
    """Our files with the user's over them. Nothing changes it; two are equal only if they are the same.

    Attributes:
        overlay: the user's files, and the feed that takes the place of ours; None: ours alone.
    """

    connection: Callable[[], models.Connection]  # messages of ssh and sudo, with hints
    cuda: Callable[[], models.CudaVersions]  # CUDA releases, their drivers and GPUs
    cuda_images: Callable[[], models.CudaImages]  # tags and digests of NVIDIA's images
    cuda_repositories: Callable[[], models.CudaRepositories]  # NVIDIA's package repositories
    hardware: Callable[[], models.Hardware]  # other vendors' accelerators, Jetson, GPUDirect RDMA
    driver: Callable[[], models.Driver]  # NVIDIA's driver: branches, GPUs, packages
    gpu_health: Callable[[], models.GpuHealth]  # Xids, limits, bandwidths, tools
    hwloc: Callable[[], models.Hwloc]
    images: Callable[[], models.Images]  # contents of images besides the plan
    mnist: Callable[[], models.DataSets]  # data sets of the smoke job
    nccl: Callable[[], models.Nccl]
    openmpi: Callable[[], models.Openmpi]
    os: Callable[[], models.OperatingSystems]  # distributions and architectures
    python_packages: Callable[[], models.PythonPackages]  # wheels of the virtual environment
    pytorch: Callable[[], models.Pytorch]
    system_packages: Callable[[], models.SystemPackages]  # packages of the distribution

    def __init__(self, overlay: Overlay | None = None) -> None:
        self.overlay = overlay
        self.load = cache(self._read)
        for name in Catalog.__annotations__:
            setattr(self, name, partial(self.load, name))

    def _read(self, name: str) -> Any:
        """The file ``name`` as its model. Raises UsageError where it is not YAML or does not match, with all mistakes and their lines."""
        if self.overlay is not None and (self.overlay.feed or name in self.overlay.files):
            return self.overlay.merged(name)
        return _of_ours(name)

    def check(self) -> None:
        """Read every file, so that a mistake in one that is needed late is reported before anything is changed. Raises as `load`."""
        for name in Catalog.__annotations__:
            self.load(name)

    def known_bad(self, component: Literal["nccl", "openmpi", "pytorch"], version: str) -> list[str]:
        """The problems for which a release is not chosen, each with its source."""
        known = {"nccl": self.nccl().known_bad, "openmpi": self.openmpi().known_bad, "pytorch": self.pytorch().known_bad}
        return troubles(version, known[component])

    def production_branches(self) -> list[str]:
        """The branches of NVIDIA's driver for production that it still supports, the one whose support ends last at the end."""
        known = self.cuda().driver_branches
        supported = (each for each, kind in self.driver().branches.of.items() if kind != "feature" and not known.ended(each))
        return sorted(supported, key=lambda branch: (known.of.get(branch, ""), int(branch)))

    def reach(self) -> Reach:
        """How far the catalogue's knowledge reaches."""
        from provision.base.versions import key

        known, pytorch, cuda, overlay = self.nccl(), self.pytorch(), self.cuda(), self.overlay
        wheels = (version for builds in known.wheels.builds.values() for version in builds)
        repository = (revision.partition("-")[0] for revision in known.repository.builds)
        dates = {"pytorch": pytorch.date, "cuda": cuda.toolkits.date, "nccl": max(known.date, known.wheels.date, known.repository.date)}
        if overlay is not None:
            looked = {name: file.head.date for name, file in overlay.files.items()}
            feed = overlay.feed.created.date() if overlay.feed else datetime.date.min
            dates = {name: max(date, feed, looked.get(name, date)) for name, date in dates.items()}
        return Reach(
            pytorch=max(pytorch.releases, key=key),
            cuda=max(cuda.toolkits.of, key=key),
            nccl=max((*wheels, *repository), key=key),
            date=min(dates.values()).isoformat(),
            overlay=(overlay.digest or None) if overlay is not None else None,
        )


OURS = Catalog()
