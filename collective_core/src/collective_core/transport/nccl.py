"""NVIDIA's library of collectives, opened at run time: which one, its version, and the calls that the engine makes.

The copy that PyTorch has loaded comes first, because two in one process would not share memory registrations and may be of different
CUDA versions. Then the wheel next to this package, then the system's. ``COLLECTIVE_NCCL`` names a file, or says ``on`` or ``off``.

Numbers of types and reductions: NVIDIA's nccl.h, the same since NCCL 2.10 (2021).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Sequence

from collective_core.errors import CollectiveError

ID_BYTES = 128
#: Element types by the engine's names. NCCL has no integers of 16 bits and no booleans.
TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
SUM, PRODUCT, MAX, MIN = range(4)

#: What the functions that move data take, in nccl.h's order; the communicator and the stream come after it.
ARGUMENTS = {
    "ncclAllReduce": ("source", "target", "count", "dtype", "reduction"),
    "ncclReduceScatter": ("source", "target", "count", "dtype", "reduction"),
    "ncclReduce": ("source", "target", "count", "dtype", "reduction", "peer"),
    "ncclBroadcast": ("source", "target", "count", "dtype", "peer"),
    "ncclAllGather": ("source", "target", "count", "dtype"),
    "ncclSend": ("source", "count", "dtype", "peer"),
    "ncclRecv": ("target", "count", "dtype", "peer"),
}
_C_TYPES = {"source": c_void_p, "target": c_void_p, "count": c_size_t, "dtype": c_int, "reduction": c_int, "peer": c_int}


@dataclass(frozen=True)
class Call:
    """A call of one of these functions."""

    function: str
    count: int  # elements; of a ReduceScatter and an AllGather those of one rank
    dtype: int  # of TYPES
    source: int = 0  # bytes from the beginning of the memory that is sent from
    target: int = 0  # bytes from the beginning of the memory that is received into
    reduction: int = SUM
    peer: int = 0  # the root, or who is at the other end


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


class Library:
    """An opened libnccl. Calls raise :class:`CollectiveError` with NCCL's own sentence."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._calls = ctypes.CDLL(path)
        self._calls.ncclGetErrorString.restype = c_char_p
        self._calls.ncclCommInitRank.argtypes = [POINTER(c_void_p), c_int, _Id, c_int]
        self._calls.ncclCommDestroy.argtypes = [c_void_p]
        self._calls.ncclCommAbort.argtypes = [c_void_p]
        for function, names in ARGUMENTS.items():
            getattr(self._calls, function).argtypes = [*(_C_TYPES[name] for name in names), c_void_p, c_void_p]
        number = c_int()
        self._check("ncclGetVersion", self._calls.ncclGetVersion(byref(number)))
        #: 22005 for 2.20.5; before 2.9, 2804 for 2.8.4.
        self.version = number.value

    def _check(self, call: str, result: int) -> None:
        if result:
            text = self._calls.ncclGetErrorString(result).decode()
            raise CollectiveError(f"{call} of {self.path}: {text}", "internal")

    def unique_id(self) -> bytes:
        """What the ranks of a communicator know it by. The rank that asks is where the others will meet."""
        made = _Id()
        self._check("ncclGetUniqueId", self._calls.ncclGetUniqueId(byref(made)))
        return bytes(made)

    def communicator(self, size: int, unique_id: bytes, rank: int) -> int:
        """Joins a communicator on the current GPU; waits for all its ranks."""
        made = c_void_p()
        self._check("ncclCommInitRank", self._calls.ncclCommInitRank(byref(made), size, _Id.from_buffer_copy(unique_id), rank))
        return made.value or 0

    def destroy(self, communicator: int) -> None:
        self._check("ncclCommDestroy", self._calls.ncclCommDestroy(communicator))

    def abort(self, communicator: int) -> None:
        """Ends what it has under way on the GPU, which may wait for a rank that is gone, and the communicator."""
        self._check("ncclCommAbort", self._calls.ncclCommAbort(communicator))

    def put(self, calls: Sequence[Call], source: int, target: int, communicator: int, stream: int) -> None:
        """Puts the calls on the stream, as one (a group). ``source`` and ``target``: addresses of this GPU's memory."""
        self._check("ncclGroupStart", self._calls.ncclGroupStart())
        try:
            for call in calls:
                values = {**vars(call), "source": source + call.source, "target": target + call.target}
                arguments = (values[name] for name in ARGUMENTS[call.function])
                self._check(call.function, getattr(self._calls, call.function)(*arguments, communicator, stream))
        except BaseException:
            self._calls.ncclGroupEnd()  # or the thread's next calls would belong to it; it says the same as the call that failed
            raise
        self._check("ncclGroupEnd", self._calls.ncclGroupEnd())


def candidates() -> Iterator[str]:
    """Where a library may be, the best place first."""
    with open("/proc/self/maps") as mapped:
        loaded = {line.split(maxsplit=5)[5].strip() for line in mapped if "libnccl.so" in line}
    yield from sorted(loaded)
    wheel = importlib.util.find_spec("nvidia")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        library = Path(folder, "nccl", "lib", "libnccl.so.2")
        if library.exists():
            yield str(library)
    yield "libnccl.so.2"


YES, NO = ("on", "1"), ("off", "0")

_found: Library | None = None
_looked_for: str | None = None


def is_wanted() -> bool:
    """Whether CUDA tensors are to go through it: only where ``COLLECTIVE_NCCL`` says so, until it has been proven on GPUs."""
    return os.environ.get("COLLECTIVE_NCCL", "").strip().lower() not in ("", *NO)


def library() -> Library | None:
    """The library, or None if there is none or ``COLLECTIVE_NCCL=off``. Raises :class:`CollectiveError` for a file that is none."""
    global _found, _looked_for
    wish = os.environ.get("COLLECTIVE_NCCL", "").strip()
    if _looked_for != wish:
        _found, _looked_for = _look(wish), wish
    return _found


def _look(wish: str) -> Library | None:
    if wish.lower() in NO:
        return None
    wish = "" if wish.lower() in YES else wish
    for path in [wish] if wish else candidates():
        try:
            return Library(path)
        except (OSError, AttributeError, CollectiveError) as error:
            if wish:
                raise CollectiveError(f"COLLECTIVE_NCCL={wish} cannot be used: {error}", "invalid") from error
    return None
