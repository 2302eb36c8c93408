"""The catalogue: facts about the outside world, one YAML file per subject, each fact with its source and date.

A function per file: ``catalog.nccl().repository.builds``. A file is read and validated on first use. `use` merges the user's own files over
ours (`overlay`): the command line does that once, at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that need no catalogue do not import its models
    from provision.catalog import models
    from provision.catalog.overlay import Overlay

_overlay: Overlay | None = None


def use(files: Overlay | None) -> None:
    """Merge these files over ours from now on, in this process; None: ours alone."""
    global _overlay
    if files != _overlay:
        _overlay = files
        load.cache_clear()


def overlay_in_use() -> Overlay | None:
    """The user's files that are merged over ours."""
    return _overlay


def content(name: str) -> bytes:
    """The bytes of our file ``name`` (without ``.yaml``)."""
    return resources.files(__name__).joinpath(f"{name}.yaml").read_bytes()


@cache
def load(name: str) -> Any:
    """The catalogue file ``name`` as its model.

    Raises:
        UsageError: the file is not YAML or does not match its model; lists all mistakes with their lines.
    """
    from provision.base import validation
    from provision.catalog.models import FILES

    if _overlay is not None and name in _overlay.files:
        return _overlay.merged(name)
    hint, where = "correct the file, or install provision again", f"provision/catalog/{name}.yaml"
    return validation.parse(FILES[name], content(name), where, "yaml", hint)


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
    for name, file in _overlay.files.items() if _overlay is not None else ():
        if name in dates:
            dates[name] = max(dates[name], file.head.date)
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
