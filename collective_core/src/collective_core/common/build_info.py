"""Answers to what Horovod's programs ask about how it was built, whichever framework they use."""

from __future__ import annotations

from collective_core.runtime import external


def mpi_enabled() -> bool:
    """Whether MPI carries the tensors (COLLECTIVE_BACKEND=mpi). Otherwise it is used for the start only."""
    return external.is_chosen()


def mpi_built() -> bool:
    """Whether the ranks can meet through MPI: mpi4py is installed."""
    import importlib.util

    return importlib.util.find_spec("mpi4py") is not None


def mpi_threads_supported() -> bool:
    """Whether collectives and the program's own mpi4py calls may run in different threads."""
    if not external.is_chosen():
        return True  # the engine makes no MPI calls
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _no() -> bool:
    """Not part of this engine."""
    return False


gloo_built = gloo_enabled = rocm_built = ddl_built = ccl_built = _no
