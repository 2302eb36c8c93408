"""The catalogue: facts about the outside world, one YAML file per subject, each fact with its source and date.

A function per file: ``catalog.nccl().repository.builds``. A file is read and validated on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that need no catalogue do not import its models
    from provision.catalog import models


def content(name: str) -> bytes:
    """The bytes of the catalogue file ``name`` (without ``.yaml``)."""
    return resources.files(__name__).joinpath(f"{name}.yaml").read_bytes()


@cache
def load(name: str) -> Any:
    """The catalogue file ``name`` as its model.

    Raises:
        UsageError: the file is not YAML or does not match its model; lists all mistakes with their lines.
    """
    from provision.base import validation
    from provision.catalog.models import FILES

    hint = "correct the file, or install provision again"
    return validation.parse(FILES[name], content(name), f"provision/catalog/{name}.yaml", "yaml", hint)


def check() -> None:
    """Read every file, so that a mistake in one that is needed late is reported before anything is changed.

    Raises:
        UsageError: as from `load`.
    """
    from provision.catalog.models import FILES

    for name in FILES:
        load(name)


def troubles(version: str, entries: Iterable[models.Trouble]) -> list[str]:
    """The entries of a list of known problems that cover ``version``, each with its source."""
    return [str(entry) for entry in entries if entry.covers(version)]


connection: Callable[[], models.Connection] = partial(load, "connection")  # messages of ssh and sudo, with hints
cuda: Callable[[], models.CudaVersions] = partial(load, "cuda")  # CUDA releases, their drivers and GPUs
cuda_images: Callable[[], models.CudaImages] = partial(load, "cuda_images")  # tags and digests of NVIDIA's images
cuda_repositories: Callable[[], models.CudaRepositories] = partial(load, "cuda_repositories")  # NVIDIA's package repositories
hardware: Callable[[], models.Hardware] = partial(load, "hardware")  # other vendors' accelerators, Jetson, GPUDirect RDMA
hwloc: Callable[[], models.Hwloc] = partial(load, "hwloc")
images: Callable[[], models.Images] = partial(load, "images")  # contents of images besides the plan
mnist: Callable[[], models.DataSets] = partial(load, "mnist")  # data sets of the smoke job
nccl: Callable[[], models.Nccl] = partial(load, "nccl")
openmpi: Callable[[], models.Openmpi] = partial(load, "openmpi")
os: Callable[[], models.OperatingSystems] = partial(load, "os")  # distributions and architectures
python_packages: Callable[[], models.PythonPackages] = partial(load, "python_packages")  # wheels of the virtual environment
pytorch: Callable[[], models.Pytorch] = partial(load, "pytorch")
system_packages: Callable[[], models.SystemPackages] = partial(load, "system_packages")  # packages of the distribution
