"""The catalogue: facts about the outside world, one YAML file per subject, each fact with its source and date.

A function per file: ``catalog.nccl().repository.builds``. A file is read and validated on first use. `use` puts a newer `feed` in place of
ours and merges the user's own files over that (`overlay`): the command line does that once, at its start.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that need no catalogue do not import its models
    from provision.catalog import models
    from provision.catalog.overlay import Overlay

_HINT = "correct the file, or install provision again"
_overlay: Overlay | None = None


def use(files: Overlay | None) -> None:
    """Use these files, with ours, from now on, in this process; None: ours alone."""
    global _overlay
    if files != _overlay:
        _overlay = files
        load.cache_clear()


def overlay_in_use() -> Overlay | None:
    """The user's files that are merged over ours."""
    return _overlay


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


@cache
def load(name: str) -> Any:
    """The catalogue file ``name`` as its model.

    Raises:
        UsageError: the file is not YAML or does not match its model; lists all mistakes with their lines.
    """
    from provision.base import validation
    from provision.catalog.models import FILES

    if _overlay is not None and (_overlay.feed or name in _overlay.files):
        return _overlay.merged(name)
    return validation.parse(FILES[name], content(name), f"provision/catalog/{name}.yaml", "yaml", _HINT)


def check() -> None:
    """Read every file, so that a mistake in one that is needed late is reported before anything is changed.

    Raises:
        UsageError: as from `load`.
    """
    from provision.catalog.models import FILES

    for name in FILES:
        load(name)


def reach() -> models.Reach:
    """How far the catalogue's knowledge reaches."""
    from provision.base.versions import key
    from provision.catalog.models import Reach

    known = nccl()
    wheels = (version for builds in known.wheels.builds.values() for version in builds)
    repository = (revision.partition("-")[0] for revision in known.repository.builds)
    dates = {"pytorch": pytorch().date, "cuda": cuda().toolkits.date, "nccl": max(known.date, known.wheels.date, known.repository.date)}
    if _overlay is not None:
        looked = {name: file.head.date for name, file in _overlay.files.items()}
        feed = _overlay.feed.created.date() if _overlay.feed else datetime.date.min
        dates = {name: max(date, feed, looked.get(name, date)) for name, date in dates.items()}
    return Reach(
        pytorch=max(pytorch().releases, key=key),
        cuda=max(cuda().toolkits.drivers, key=key),
        nccl=max((*wheels, *repository), key=key),
        date=min(dates.values()).isoformat(),
        overlay=(_overlay.digest or None) if _overlay is not None else None,
    )


def troubles(version: str, entries: Iterable[models.Trouble]) -> list[str]:
    """The entries of a list of known problems that cover ``version``, each with its source."""
    return [str(entry) for entry in entries if entry.covers(version)]


connection: Callable[[], models.Connection] = partial(load, "connection")  # messages of ssh and sudo, with hints
cuda: Callable[[], models.CudaVersions] = partial(load, "cuda")  # CUDA releases, their drivers and GPUs
cuda_images: Callable[[], models.CudaImages] = partial(load, "cuda_images")  # tags and digests of NVIDIA's images
cuda_repositories: Callable[[], models.CudaRepositories] = partial(load, "cuda_repositories")  # NVIDIA's package repositories
hardware: Callable[[], models.Hardware] = partial(load, "hardware")  # other vendors' accelerators, Jetson, GPUDirect RDMA
driver: Callable[[], models.Driver] = partial(load, "driver")  # NVIDIA's driver: branches, GPUs, packages
gpu_health: Callable[[], models.GpuHealth] = partial(load, "gpu_health")  # Xids, limits, bandwidths, tools
hwloc: Callable[[], models.Hwloc] = partial(load, "hwloc")
images: Callable[[], models.Images] = partial(load, "images")  # contents of images besides the plan
mnist: Callable[[], models.DataSets] = partial(load, "mnist")  # data sets of the smoke job
nccl: Callable[[], models.Nccl] = partial(load, "nccl")
openmpi: Callable[[], models.Openmpi] = partial(load, "openmpi")
os: Callable[[], models.OperatingSystems] = partial(load, "os")  # distributions and architectures
python_packages: Callable[[], models.PythonPackages] = partial(load, "python_packages")  # wheels of the virtual environment
pytorch: Callable[[], models.Pytorch] = partial(load, "pytorch")
system_packages: Callable[[], models.SystemPackages] = partial(load, "system_packages")  # packages of the distribution
