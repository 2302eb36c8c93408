"""What is known of the world, as data: one YAML file per subject, each fact with its source and date. Code asks here, never hard-codes.

A function per file, named like it: ``catalog.nccl().repository.builds``. A file is read and checked when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the models are compiled only for commands that ask
    from provision.catalog import models


def content(name: str) -> bytes:
    """What the catalogue file ``name`` (without ``.yaml``) holds."""
    return resources.files(__name__).joinpath(f"{name}.yaml").read_bytes()


@cache
def load(name: str) -> Any:
    """The catalogue file ``name`` as its model.

    Raises:
        UsageError: the file is no YAML or does not hold to its model; all its mistakes, with their lines.
    """
    from provision.base import validation
    from provision.catalog.models import FILES

    hint = "correct the file, or install provision again"
    return validation.parse(FILES[name], content(name), f"provision/catalog/{name}.yaml", "yaml", hint)


def check() -> None:
    """Read every file once, so that a mistake in one that is needed late, or only after a failure, is said before anything is changed.

    Raises:
        UsageError: as from `load`.
    """
    from provision.catalog.models import FILES

    for name in FILES:
        load(name)


def troubles(version: str, entries: Iterable[models.Trouble]) -> list[str]:
    """What a list of known troubles knows against ``version``, each with its source, in the list's order."""
    return [str(entry) for entry in entries if entry.covers(version)]


def cmake() -> models.Cmake:
    """CMake: what needs it, and what is installed."""
    found: models.Cmake = load("cmake")
    return found


def connection() -> models.Connection:
    """What ssh and sudo say, and what to do about it."""
    found: models.Connection = load("connection")
    return found


def cuda() -> models.CudaVersions:
    """CUDA, its drivers and the GPUs that it runs on."""
    found: models.CudaVersions = load("cuda")
    return found


def cuda_images() -> models.CudaImages:
    """NVIDIA's images: tags and digests."""
    found: models.CudaImages = load("cuda_images")
    return found


def cuda_repositories() -> models.CudaRepositories:
    """NVIDIA's package repositories."""
    found: models.CudaRepositories = load("cuda_repositories")
    return found


def hwloc() -> models.Hwloc:
    """hwloc: what Open MPI brings, what distributions have, what is known bad."""
    found: models.Hwloc = load("hwloc")
    return found


def images() -> models.Images:
    """What images are made of besides the plan."""
    found: models.Images = load("images")
    return found


def mnist() -> models.DataSets:
    """The data of the smoke job."""
    found: models.DataSets = load("mnist")
    return found


def nccl() -> models.Nccl:
    """NCCL: which build is where, and which are known bad."""
    found: models.Nccl = load("nccl")
    return found


def openmpi() -> models.Openmpi:
    """Open MPI: what is where, and what is known bad."""
    found: models.Openmpi = load("openmpi")
    return found


def os() -> models.OperatingSystems:
    """Distributions and architectures."""
    found: models.OperatingSystems = load("os")
    return found


def python_packages() -> models.PythonPackages:
    """What goes into the hosts' virtual environment."""
    found: models.PythonPackages = load("python_packages")
    return found


def pytorch() -> models.Pytorch:
    """PyTorch's own builds."""
    found: models.Pytorch = load("pytorch")
    return found


def system_packages() -> models.SystemPackages:
    """What the hosts' package manager must bring."""
    found: models.SystemPackages = load("system_packages")
    return found
