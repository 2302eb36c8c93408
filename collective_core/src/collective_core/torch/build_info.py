"""What Horovod's programs ask about how it was built."""

from __future__ import annotations

import torch

from collective_core.runtime.process_sets import ProcessSet
from collective_core.torch import gpu
from collective_core.transport import mpi, nccl


def mpi_enabled() -> bool:
    """Whether MPI carries the tensors (COLLECTIVE_BACKEND=mpi). Otherwise it is used for the start only."""
    return mpi.is_chosen()


def mpi_built() -> bool:
    """Whether the ranks can meet through MPI: mpi4py is installed."""
    import importlib.util

    return importlib.util.find_spec("mpi4py") is not None


def mpi_threads_supported() -> bool:
    """Whether collectives and the program's own mpi4py calls may run in different threads."""
    if not mpi.is_chosen():
        return True  # the engine makes no MPI calls
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _no() -> bool:
    """Not part of this engine."""
    return False


def nccl_built() -> int:
    """The version of NCCL that can be loaded here, as 22005 for 2.20.5; 0 if there is none or COLLECTIVE_NCCL=off."""
    library = nccl.library()
    return library.version if library else 0


def nccl_enabled(process_set: ProcessSet | None = None) -> bool:
    """Whether CUDA tensors of this process set (the job's) go through NCCL: every member has a GPU and the same NCCL."""
    return gpu.is_used(process_set)


def cuda_built() -> bool:
    """Whether CUDA tensors can be sent: PyTorch was built for CUDA."""
    return torch.version.cuda is not None


gloo_built = gloo_enabled = rocm_built = ddl_built = ccl_built = _no
