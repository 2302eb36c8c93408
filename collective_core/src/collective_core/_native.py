"""The C++ core through ctypes: loading, structures, and faults turned into exceptions.

The library knows nothing of Python and is not tied to a version of it. ctypes releases the interpreter lock during calls.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import time
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence, TypeVar

from collective_core.errors import KINDS, CollectiveError, InvalidUseError

ABI = 19  # of csrc/api/c_api.h

OPERATIONS = ("allreduce", "allgather", "broadcast", "barrier", "alltoall", "reducescatter", "join")
ALLREDUCE, ALLGATHER, BROADCAST, BARRIER, ALLTOALL, REDUCESCATTER, JOIN = range(len(OPERATIONS))
SUM, AVERAGE, MIN, MAX, PRODUCT = range(5)

#: How an operation is submitted: to be run by the engine's thread; in the caller's, where that may be; or as the caller's only one
#: until it is done.
QUEUED, BLOCKING, ALONE, AMONG_OTHERS = range(4)

#: Where a tensor lies: a GPU's is copied to host memory, unless it is given as the GPU's own, for a transport like NCCL.
HOST_MEMORY, GPU, GPU_MEMORY = range(3)

#: Whose rules hold where the engine's differ from Horovod's on purpose, with the numbers of csrc/base/types.h.
SEMANTICS = {"engine": 0, "horovod": 1}

#: Element types by the names that NumPy and PyTorch share, with the numbers of csrc/base/types.h.
DTYPES = {
    name: number
    for number, name in enumerate(
        (
            *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
            *("float16", "bfloat16", "float32", "float64", "bool"),
        )
    )
}

#: Complex types, which travel as pairs of the real one: a last dimension of 2.
PAIRS = {"complex64": "float32", "complex128": "float64"}

#: What an operation calls the type of a tensor that cannot be sent; which has an ``unsupported_reason``.
STAND_IN = "uint8"

#: The fault of csrc/base/errors.h that is none of the engine's own.
INTERRUPTED = 7
#: Seconds after which a waiting call looks for signals such as Ctrl-C.
SIGNAL_INTERVAL = 0.2
#: Ranks that one error can name.
MAX_RANKS = 1024


class Peer(ctypes.Structure):
    """struct cc_peer."""

    _fields_ = [
        ("rank", c_int32),
        ("global_rank", c_int32),
        ("port", c_int32),
        ("reserved", c_int32),
        ("pid", c_int64),
        ("host_id", c_char_p),
        ("host_name", c_char_p),
        ("address", c_char_p),
        ("rails", c_char_p),
        ("socket_name", c_char_p),
    ]


class Operation(ctypes.Structure):
    """struct cc_operation."""

    _fields_ = [
        ("kind", c_int32),
        ("dtype", c_int32),
        ("reduce", c_int32),
        ("root", c_int32),
        ("ndim", c_int32),
        ("process_set", c_int32),
        ("dims", POINTER(c_int64)),
        ("count", c_uint64),
        ("input", c_void_p),
        ("output", c_void_p),
        ("prescale", c_double),
        ("postscale", c_double),
        ("name", c_char_p),
        ("splits", POINTER(c_int64)),
        ("unsupported_reason", c_char_p),
        ("device", c_int32),
        ("tag", c_int32),
        ("fused", c_uint32),
        ("inner", c_uint32),
        ("ordered", c_uint32),
    ]


class Prepared(ctypes.Structure):
    """struct cc_prepared."""

    _fields_ = [
        ("object", c_void_p),
        ("arguments", POINTER(ctypes.py_object)),
        ("arguments_count", c_int32),
        ("reserved", c_int32),
        ("operation", POINTER(Operation)),
        ("counter", ctypes.py_object),
        ("exchange", c_void_p),
    ]


class Front(ctypes.Structure):
    """struct cc_front."""

    _fields_ = [("in_full", ctypes.py_object), ("changed", ctypes.py_object), ("failed", ctypes.py_object)]
    _fields_ += [("name", c_char_p), ("documentation", c_char_p)]


class Transfer(ctypes.Structure):
    """struct cc_transfer."""

    _fields_ = [
        ("process_set", c_int32),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("reduce", c_int32),
        ("root", c_int32),
        ("contributors", c_int32),
        ("tag", c_int32),
        ("reserved", c_int32),
        ("input", c_void_p),
        ("output", c_void_p),
        ("count", c_uint64),
        ("row_bytes", c_uint64),
        ("sent", POINTER(c_int64)),
        ("received", POINTER(c_int64)),
        ("order", c_uint64),
    ]


class KindCounters(ctypes.Structure):
    """struct cc_kind_counters."""

    _fields_ = [
        ("process_set", c_int32),
        ("kind", c_int32),
        *((name, c_uint64) for name in ("operations", "failed", "bytes", "queue_ns", "peers_ns", "hosts_ns", "transfer_ns")),
    ]


class WaitedFor(ctypes.Structure):
    """struct cc_waited_for."""

    _fields_ = [("rank", c_int32), ("reserved", c_int32), ("peers_ns", c_uint64)]


class Use(ctypes.Structure):
    """struct cc_use."""

    _fields_ = [(name, c_uint64) for name in ("waited_ns", "arena_bytes", "arena_most", "arena_all")]


START = ctypes.CFUNCTYPE(c_int32, POINTER(Transfer), c_void_p, c_uint64)
TEST = ctypes.CFUNCTYPE(c_int32, c_int32, c_void_p, c_uint64)


class PeerInfo(NamedTuple):
    """Facts about a rank that the others need before they connect."""

    rank: int
    pid: int
    host_id: str
    host_name: str
    address: str
    port: int
    socket_name: str
    rails: str = ""  # further addresses, each after a comma


_library: ctypes.CDLL | None = None
_given_up: set[int] = set()  # ranks of the job, for process sets that are still to come
_transports: dict[int, tuple[Any, Any]] = {}  # by device; the engine has only their addresses


def library() -> ctypes.CDLL:
    """The opened library. Raises :class:`CollectiveError` if it is missing or of another version than this package."""
    global _library
    if _library is None:
        path = Path(__file__).with_name("libcollective_core.so")
        try:
            opened = ctypes.CDLL(str(path))
        except OSError as error:
            raise CollectiveError(f"cannot load the engine's library {path}: {error}; reinstall collective-core") from error
        _declare(opened)
        if opened.cc_abi_version() != ABI:
            raise CollectiveError(f"{path} has interface {opened.cc_abi_version()}, this package needs {ABI}; reinstall collective-core")
        names = ("PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch")
        opened.cc_watch_signals(*(ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p) for name in names))
        _library = opened
    return _library


def _declare(lib: ctypes.CDLL) -> None:
    lib.cc_version.restype = lib.cc_kernels.restype = lib.cc_last_error.restype = c_char_p
    lib.cc_last_error_ranks.argtypes = [POINTER(c_int32), c_int32]
    lib.cc_interfaces.argtypes = [c_char_p, c_uint64]
    lib.cc_open.argtypes = [c_char_p, c_char_p, POINTER(c_int32), c_char_p, c_uint64]
    lib.cc_connect.argtypes = [c_int32, c_int32, c_int32, POINTER(Peer), c_char_p, c_uint64, *[c_double] * 3, *[c_int32] * 4]
    lib.cc_watch_signals.argtypes = [c_void_p] * 4
    lib.cc_watch_signals.restype = lib.cc_take_raised.restype = None
    lib.cc_take_raised.argtypes = [POINTER(c_void_p)]
    lib.cc_record.argtypes = [c_char_p]
    lib.cc_events.argtypes = [c_uint64, c_void_p, c_int32, POINTER(c_int32), POINTER(c_uint64), POINTER(c_uint64)]
    lib.cc_await_events.argtypes = [c_uint64, c_double, POINTER(c_int32)]
    lib.cc_end_timeline.argtypes = [c_double, POINTER(c_int32), POINTER(c_int32)]
    lib.cc_use_external_transport.argtypes = [c_int32, START, TEST]
    lib.cc_close.argtypes = [c_int32]
    lib.cc_run.argtypes = [POINTER(Operation)]
    lib.cc_submit.argtypes = [POINTER(Operation), c_int32, POINTER(c_int64)]
    lib.cc_is_done.argtypes = [c_int64, POINTER(c_int32)]
    lib.cc_wait.argtypes = [c_int64, c_double, POINTER(c_int32)]
    lib.cc_gathered.argtypes = [c_int64, POINTER(c_void_p), POINTER(c_uint64), POINTER(c_int64), c_int32]
    lib.cc_release.argtypes = [c_int64]
    lib.cc_check_peers.argtypes = lib.cc_give_up.argtypes = [c_int32]
    lib.cc_has_cross_memory.argtypes = [c_int32, POINTER(c_int32)]
    lib.cc_copy.argtypes = [c_void_p, c_void_p, c_uint64]
    lib.cc_copy.restype = None
    lib.cc_traffic.argtypes = [c_int32, POINTER(c_uint64)]
    lib.cc_counters.argtypes = [POINTER(KindCounters), c_int32, POINTER(c_int32)]
    lib.cc_late_ranks.argtypes = [POINTER(WaitedFor), c_int32, POINTER(c_int32)]
    lib.cc_resources.argtypes = [POINTER(Use)]
    lib.cc_allocate.argtypes = [c_uint64, c_int32, POINTER(c_void_p)]
    lib.cc_free.argtypes = [c_void_p]
    lib.cc_core_quota.argtypes = [c_int64, c_char_p]
    lib.cc_core_quota.restype = c_double
    lib.cc_reduce.argtypes = [c_int32, c_int32, c_int32, c_double, c_double, c_void_p, POINTER(c_void_p), c_int32, c_uint64]
    lib.cc_hmac_sha256.argtypes = [c_char_p, c_uint64, c_char_p, c_uint64, c_char_p]
    lib.cc_hmac_sha256.restype = None


def _raise_interruption() -> None:
    """Raises what the handler of a signal has raised, KeyboardInterrupt for instance, while the engine waited."""
    raised = (c_void_p * 3)()
    library().cc_take_raised(raised)
    restore = ctypes.PYFUNCTYPE(None, c_void_p, c_void_p, c_void_p)(("PyErr_Restore", ctypes.pythonapi))
    try:
        restore(*raised)
    except BaseException as error:
        error.__dict__["ended_engine"] = True
        raise


def in_handler() -> bool:
    """Whether a handler of a signal runs while this thread waits in the engine; it cannot itself wait for an operation."""
    return bool(library().cc_in_handler())


def refuse_in_handler() -> None:
    """What a handler gets that would have to wait where :func:`in_handler`."""
    text = "a signal handler cannot wait for a collective while the program is inside another one: let it set a flag"
    raise InvalidUseError(text, "invalid")


def has_ended_engine(error: BaseException) -> bool:
    """Whether this came out of a wait that the handler of a signal has ended: then the operation is over, too, and the engine."""
    return "ended_engine" in getattr(error, "__dict__", {})


def check(fault: int) -> None:
    """Raises :class:`CollectiveError` with the library's sentence unless ``fault`` is 0; after a signal what its handler has raised."""
    if fault == INTERRUPTED:
        _raise_interruption()
    if fault:
        lib = library()
        ranks = (c_int32 * MAX_RANKS)()
        count = min(lib.cc_last_error_ranks(ranks, MAX_RANKS), MAX_RANKS)
        text = lib.cc_last_error().decode("utf-8", "replace")
        kind = KINDS.get(fault, "internal")
        error = (InvalidUseError if kind == "invalid" else CollectiveError)(text, kind, ranks[:count])
        error.has_one_name = bool(lib.cc_last_error_has_one_name())
        raise error


def interfaces() -> list[tuple[str, str, int]]:
    """(name, address, prefix length) of the interfaces of this host that are up."""
    text = ctypes.create_string_buffer(1 << 16)
    check(library().cc_interfaces(text, len(text)))
    rows = (line.split() for line in text.value.decode().splitlines())
    return [(name, address, int(prefix)) for name, address, prefix in rows]


def open_listeners(address: str | None, rails: str = "") -> tuple[int, str]:
    """Listens on ``address`` (none: only inside the host) and ``rails``, as a peer's. Returns port and the local socket's name."""
    port = c_int32()
    name = ctypes.create_string_buffer(108)
    check(library().cc_open(address.encode() if address else None, rails.encode(), byref(port), name, len(name)))
    return port.value, name.value.decode()


def connect(
    rank: int,
    peers: Sequence[PeerInfo],
    secret: bytes,
    timeout: float,
    start_timeout: float,
    process_set: int = 0,
    stall_warning: float = 0.0,
    sockets: int = 1,
    single_copy: bool = True,
    semantics: int = 0,
    by_host: bool = False,
) -> None:
    """Connects to all peers of a process set, in which this one is number ``rank``; the table must be the same on all. Times in seconds.

    ``semantics``: a number of :data:`SEMANTICS`, and ``by_host``, whether sums are formed host by host: the same on all ranks.
    """
    table = (Peer * len(peers))()
    for number, (row, peer) in enumerate(zip(table, peers)):
        row.rank, row.global_rank, row.port, row.pid = number, peer.rank, peer.port, peer.pid
        row.host_id, row.host_name = peer.host_id.encode(), peer.host_name.encode()
        row.address, row.rails, row.socket_name = peer.address.encode(), peer.rails.encode(), peer.socket_name.encode()
    times = timeout, start_timeout, stall_warning
    check(library().cc_connect(process_set, rank, len(peers), table, secret, len(secret), *times, sockets, single_copy, semantics, by_host))
    for gone in tuple(_given_up):  # while this process set was not one yet
        give_up(gone)


def record_to(path: str | None) -> None:
    """Where the engine records its operations: a file, or memory. Before :func:`connect`."""
    check(library().cc_record(path.encode() if path else None))


def use_transport(
    start: Callable[[Any, int, int], int] | None, test: Callable[[int, int, int], int] | None, device: int = HOST_MEMORY
) -> None:
    """The transport of tensors of this device from now on (csrc/api/c_api.h); None: the engine itself."""
    chosen = (START(start), TEST(test)) if start is not None and test is not None else (START(), TEST())
    check(library().cc_use_external_transport(device, *chosen))
    _transports[device] = chosen


def say(failure: object, error: int, capacity: int) -> int:
    """How a transport tells the engine of a failure: its sentence is written to the address ``error``. Returns what it then returns."""
    text = (str(failure) or type(failure).__name__).encode()[: capacity - 1] + b"\0"
    ctypes.memmove(error, text, len(text))
    return -1


def check_peers(process_set: int) -> None:
    """Between operations: raises if a rank has died or told of a failure."""
    check(library().cc_check_peers(process_set))


def give_up(rank: int) -> None:
    """What waits for this rank of the job ends, in all process sets: the launcher says that it is gone. From any thread."""
    _given_up.add(rank)
    check(library().cc_give_up(rank))


def forget_given_up() -> None:
    """Other processes have the ranks from now on. Before their first :func:`connect`."""
    _given_up.clear()


def uses_cross_memory_attach(process_set: int = 0) -> bool:
    """Whether the ranks of this host read and write each other's memory, without a copy between."""
    given = c_int32()
    check(library().cc_has_cross_memory(process_set, byref(given)))
    return bool(given.value)


def copy(target: int, source: int, length: int) -> None:
    """Copies so many bytes between two addresses past the caches: for what is not read again soon. They must not overlap."""
    library().cc_copy(target, source, length)


def close(process_set: int = 0) -> None:
    """Leaves a process set; leaving set 0 leaves all."""
    check(library().cc_close(process_set))


def operation(
    kind: int,
    name: str,
    dtype: str,
    shape: Sequence[int],
    count: int,
    source: int = 0,
    target: int = 0,
    reduce: int = SUM,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    splits: Sequence[int] | None = None,
    unsupported_reason: str = "",
    device: int = 0,
    fused: int = 0,
    inner: bool = False,
) -> Operation:
    """A cc_operation. ``source`` and ``target`` are addresses whose memory the caller keeps alive until it is done.

    ``splits``: rows for each rank of the process set. ``unsupported_reason``: why this rank cannot run it; then every rank raises it.
    ``fused``: a checksum of the tensors that the caller has put into this one, compared like the shape. ``inner``: it is no operation of
    the program's, and goes on without ranks that have joined under Horovod's semantics, too.
    """
    if dtype in PAIRS:  # `fused` tells them from tensors of such pairs
        dtype, shape, count, fused = PAIRS[dtype], (*shape, 2), 2 * count, fused ^ 0xC
    dims = (c_int64 * max(len(shape), 1))(*shape)
    op = Operation(kind, DTYPES[dtype], reduce, root, len(shape), process_set, dims, count, source or None, target or None)
    op.prescale, op.postscale, op.name, op.device, op.fused = prescale, postscale, name.encode(), device, fused
    op.inner = inner
    op.unsupported_reason = unsupported_reason.encode() or None
    if splits is not None:
        op.splits = (c_int64 * len(splits))(*splits)
    return op


def run(op: Operation) -> None:
    """Runs a collective and returns when it is done."""
    check(library().cc_run(byref(op)))


def nothing_prepared(*_: Any) -> int | None:
    """What ``run_prepared`` is before anything was prepared."""
    return None


#: ``run_prepared(what, *arguments)`` runs what :func:`prepare` was given for it with equal arguments, and returns the fault's number, for
#: :func:`check`; None if there is nothing such. A built-in function: a call through ctypes would cost as much as a small operation.
run_prepared: Callable[..., int | None] = nothing_prepared

#: Of csrc/api/c_api.h's cc_python, in its order.
_INTERPRETER = (
    *("Py_IncRef", "Py_DecRef", "PyObject_RichCompareBool", "PyErr_Clear", "PyIter_Next", "PyLong_AsUnsignedLongLong", "PyLong_FromLong"),
    *("PyEval_SaveThread", "PyEval_RestoreThread", "PyObject_Size", "PyTuple_Pack", "PyObject_Vectorcall"),
)


def prepare(what: Any, arguments: Sequence[Any] | None, op: Operation, counter: Iterator[int] | None = None, exchange: int = 0) -> None:
    """Keeps an operation in place for :data:`run_prepared`, until :func:`forget_prepared`, which must come before ``what`` is no more.

    ``arguments``: None for those of the call of a :func:`front` that has come here. ``counter``: its next number ends the name of the
    operation. ``exchange``: address of the ``DLPackExchangeAPI`` of ``what``, by which a call sees whether it still has the memory, type,
    shape and strides that it has now; 0 where they cannot change.
    """
    _use_python()
    request = Prepared(object=id(what), operation=ctypes.pointer(op), exchange=exchange or None)
    if arguments is not None:
        request.arguments, request.arguments_count = (ctypes.py_object * max(len(arguments), 1))(*arguments), len(arguments)
    if counter is not None:
        request.counter = counter
    check(ctypes.PYFUNCTYPE(c_int32, POINTER(Prepared))(("cc_prepare", library()))(byref(request)))


def _use_python() -> None:
    global run_prepared
    if run_prepared is nothing_prepared:
        api = ctypes.pythonapi
        addresses = [ctypes.cast(getattr(api, name), c_void_p).value if hasattr(api, name) else None for name in _INTERPRETER]
        table = (c_void_p * (len(addresses) + 1))(*addresses, id(None))
        run_prepared = _function(ctypes.PYFUNCTYPE(c_void_p, c_void_p)(("cc_use_python", library()))(table))


def _function(definition: int, module: str | None = None) -> Callable[..., Any]:
    make = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_void_p, ctypes.py_object)(("PyCFunction_NewEx", ctypes.pythonapi))
    made: Callable[..., Any] = make(definition, None, module)
    return made


def front(in_full: Callable[..., Any], changed: Callable[[tuple[Any]], Any], failed: Callable[[int, Any], Any]) -> Callable[..., Any]:
    """A built-in function like ``in_full``, which it calls where it has no prepared call of its first argument; one in a process.

    A prepared call ends with ``changed((object,))``, after a fault with ``failed(number, object)``, which raises. Needs Python 3.9.
    """
    _use_python()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in inspect.signature(in_full).parameters.values()]
    documentation = f"{in_full.__name__}{inspect.Signature(plain)}\n--\n\n{in_full.__doc__}"
    asked = Front(in_full, changed, failed, in_full.__name__.encode(), documentation.encode())
    return _function(ctypes.PYFUNCTYPE(c_void_p, POINTER(Front))(("cc_use_front", library()))(byref(asked)), in_full.__module__)


def forget_prepared(key: int | None = None) -> None:
    """Lets go of what was prepared for the object whose ``id`` is ``key``, or of everything."""
    if run_prepared is not nothing_prepared:
        ctypes.PYFUNCTYPE(None, c_void_p)(("cc_forget", library()))(key)


def submit(op: Operation, way: int = QUEUED) -> int:
    """Starts a collective in one of the ways of csrc/api/c_api.h. Returns its handle."""
    handle = c_int64()
    check(library().cc_submit(byref(op), way, byref(handle)))
    return handle.value


def is_done(handle: int) -> bool:
    done = c_int32()
    check(library().cc_is_done(handle, byref(done)))
    return bool(done.value)


def wait(handle: int, seconds: float = math.inf) -> bool:
    """Waits until the operation is done, at most so long, and raises its error, if any; says whether it is. Ctrl-C works meanwhile."""
    done, end = c_int32(), time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        check(library().cc_wait(handle, max(0.0, min(left, SIGNAL_INTERVAL)), byref(done)))
        if done.value or left <= 0:
            return bool(done.value)


def gathered(handle: int, size: int) -> tuple[int, int, list[int]]:
    """Address and bytes of the result of a finished allgather or alltoall, valid until :func:`release`, and the rows of each rank."""
    data, length, rows = c_void_p(), c_uint64(), (c_int64 * size)()
    check(library().cc_gathered(handle, byref(data), byref(length), rows, size))
    return data.value or 0, length.value, list(rows)


def release(handle: int) -> None:
    library().cc_release(handle)


def traffic(process_set: int = 0) -> list[int]:
    """Exchanges of headers with other hosts since this rank joined, and the rounds, messages and bytes that they took it."""
    counts = (c_uint64 * 4)()
    check(library().cc_traffic(process_set, counts))
    return list(counts)


def events(first: int, buffer: Any, capacity: int) -> tuple[int, int, int]:
    """Copies finished events from number ``first`` on into ``buffer``, which has place for ``capacity``.

    Returns how many; the number to go on with (those before it that were not copied are lost); nanoseconds that callers have waited.
    """
    count, following, nanoseconds = c_int32(), c_uint64(), c_uint64()
    check(library().cc_events(first, buffer, capacity, byref(count), byref(following), byref(nanoseconds)))
    return count.value, following.value, nanoseconds.value


def waited() -> float:
    """Seconds for which callers of this process have waited for collectives so far."""
    return events(0, None, 0)[2] / 1e9


def begin_timeline() -> None:
    """From now on this rank tells the others that it records a timeline."""
    check(library().cc_begin_timeline())


def await_events(first: int, seconds: float) -> bool:
    """Waits until many events are new from number ``first`` on, at most so long. Returns whether the timeline is still on."""
    on = c_int32()
    check(library().cc_await_events(first, seconds, byref(on)))
    return bool(on.value)


def end_timeline(seconds: float) -> bool | None:
    """Ends the recording once all that was submitted is done, and says whether at a time all ranks have recorded.

    None: it was not done within so many seconds, and the timeline is still on. Ctrl-C works meanwhile.
    """
    ended, of_all, end = c_int32(), c_int32(), time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        check(library().cc_end_timeline(max(0.0, min(left, SIGNAL_INTERVAL)), byref(ended), byref(of_all)))
        if ended.value:
            return bool(of_all.value)
        if left <= 0:
            return None


#: When a block's pages come: with the first touch; at once, large ones where the system has them; likewise, and the next block of its
#: length gets them.
TOUCHED_PAGES, LARGE_PAGES, KEPT_PAGES = range(3)


def allocate(length: int, pages: int) -> int:
    """Address of a new block of ``length`` bytes in the memory that the ranks of this host share; for :func:`free`."""
    address = c_void_p()
    check(library().cc_allocate(length, pages, byref(address)))
    return address.value or 0


def free(address: int) -> None:
    library().cc_free(address)


Row = TypeVar("Row", KindCounters, WaitedFor)


def _rows(function: Callable[..., int], row: type[Row]) -> list[Row]:
    """All rows of a table that may grow while it is read."""
    table, count = (row * 0)(), c_int32()
    check(function(table, 0, byref(count)))
    while count.value > len(table):
        table = (row * count.value)()
        check(function(table, len(table), byref(count)))
    return list(table[: count.value])


def counters() -> list[KindCounters]:
    """What this process's operations have been, by process set and kind (csrc/api/c_api.h)."""
    return _rows(library().cc_counters, KindCounters)


def late_ranks() -> list[WaitedFor]:
    """The ranks of this host for which this process has waited, and how long."""
    return _rows(library().cc_late_ranks, WaitedFor)


def resources() -> Use:
    """What this process has spent and holds."""
    use = Use()
    check(library().cc_resources(byref(use)))
    return use
