"""The transport outside of the engine that carries the tensors, where the job has chosen one: MPI (extensions/mpi.py)."""

from __future__ import annotations

from typing import Any, Sequence

from collective_core import _native
from collective_core.lazy import extension

_current: Any | None = None
#: What operations were using when the engine ended.
_kept: list[Any] = []


def choose(backend: str, launcher: Any) -> None:
    """Makes MPI carry what follows, or the engine itself. Raises :class:`CollectiveError` (kind ``invalid``) where MPI cannot."""
    global _current
    if backend == "mpi":
        _current = extension("mpi").MpiTransport(launcher)
        _native.use_transport(_current.start, _current.test)
    elif _current is not None:
        _native.use_transport(None, None)
        _current = None


def join(process_set: int, ranks: Sequence[int]) -> None:
    """Before a process set connects, by its members: makes its communicator, if MPI carries."""
    if _current is not None:
        _current.join(process_set, ranks)


def leave(process_set: int) -> None:
    """After a process set was closed, by its members."""
    if _current is not None:
        _current.leave(process_set)


def is_chosen() -> bool:
    """Whether MPI carries the tensors."""
    return _current is not None


def keep(memory: Any) -> None:
    """After a failure that ended the engine, by the operation that failed: MPI may still read and write its tensors, for good."""
    if _current is not None:
        _kept.append(memory)
