"""``COLLECTIVE_BACKEND=mpi``: MPI carries the tensors, through mpi4py, on the buffers where they lie.

The engine agrees on every operation as always, then asks here for the transfer (runtime/external.py,
csrc/transport/external/external_transport.h), one at a time per process set. Every set has a communicator of its own. Calls do not wait: a
transfer is started and then tested until it is done, so that a rank that dies meanwhile is noticed. MPI must have been initialised for
several threads at once, which mpi4py asks for unless told otherwise: making a communicator waits for ranks whose transfers must go on
meanwhile.
"""

from __future__ import annotations

from typing import Any, Sequence

from collective_core import _native
from collective_core.errors import CollectiveError


class MpiTransport:
    """MPI as the engine sees it: :meth:`start` and :meth:`test`, called from any of its threads."""

    def __init__(self, launcher: Any) -> None:
        communicator = getattr(launcher, "communicator", None)
        if communicator is None:
            raise CollectiveError(
                "COLLECTIVE_BACKEND=mpi needs ranks that MPI has started, and these were not: start them with mpirun, "
                "pass init(comm=...), or leave COLLECTIVE_BACKEND away",
                "invalid",
            )
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CollectiveError(
                "COLLECTIVE_BACKEND=mpi calls MPI from several threads at once, for which it was not initialised (MPI_THREAD_MULTIPLE): "
                "leave mpi4py.rc.threads and thread_level as they are, or use an MPI that was built for it",
                "invalid",
            )
        self._mpi = MPI
        self._whole = communicator
        self._communicators: dict[int, Any] = {}
        self._under_way: dict[int, tuple[Any, list[Any]]] = {}  # request, and the datatypes that it needs
        #: Where the engine allocates its memory: pointers of several gigabytes need MPI's own buffer type.
        self._memory = getattr(MPI, "buffer", None) or MPI.memory
        types = (MPI.UINT8_T, MPI.INT8_T, MPI.UINT16_T, MPI.INT16_T, MPI.UINT32_T, MPI.INT32_T, MPI.UINT64_T, MPI.INT64_T)
        names = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
        self._types = {_native.DTYPES[name]: datatype for name, datatype in zip(names, types)}
        self._types.update({_native.DTYPES["float32"]: MPI.FLOAT, _native.DTYPES["float64"]: MPI.DOUBLE})
        self._reductions = {_native.SUM: MPI.SUM, _native.MIN: MPI.MIN, _native.MAX: MPI.MAX, _native.PRODUCT: MPI.PROD}

    def join(self, process_set: int, ranks: Sequence[int]) -> None:
        group = self._whole.Get_group().Incl(list(ranks))
        self._communicators[process_set] = self._whole.Create_group(group, process_set)
        group.Free()

    def leave(self, process_set: int) -> None:
        self._communicators.pop(process_set).Free()

    def start(self, transfer: Any, error: int, capacity: int) -> int:
        try:
            self._start(transfer.contents)
        except BaseException as failure:  # noqa: BLE001 - nothing may cross the C interface
            return _native.say(failure, error, capacity)
        return 0

    def test(self, process_set: int, error: int, capacity: int) -> int:
        try:
            request, datatypes = self._under_way[process_set]
            if not request.Test():
                return 0
            for datatype in datatypes:
                datatype.Free()
            del self._under_way[process_set]
        except BaseException as failure:  # noqa: BLE001 - nothing may cross the C interface
            return _native.say(failure, error, capacity)
        return 1

    def _start(self, transfer: _native.Transfer) -> None:
        communicator, datatypes = self._communicators[transfer.process_set], []
        if transfer.kind == _native.ALLREDUCE:
            datatype, count = self._types[transfer.dtype], transfer.count
            length = count * datatype.Get_size()
            target = [self._memory.fromaddress(transfer.output, length), count, datatype]
            source = [self._memory.fromaddress(transfer.input, length), count, datatype]
            same = transfer.input == transfer.output
            request = communicator.Iallreduce(self._mpi.IN_PLACE if same else source, target, self._reductions[transfer.reduce])
        elif transfer.kind == _native.BROADCAST:
            buffer = self._memory.fromaddress(transfer.input or transfer.output, transfer.count)
            request = communicator.Ibcast([buffer, transfer.count, self._mpi.BYTE], transfer.root)
        else:
            row = self._mpi.BYTE.Create_contiguous(transfer.row_bytes).Commit()
            datatypes.append(row)
            received = transfer.received[: communicator.size]
            if transfer.kind == _native.ALLGATHER:
                mine = received[communicator.rank]
                sent = [self._rows(transfer.input, mine, transfer.row_bytes), mine, row]
                request = communicator.Iallgatherv(sent, self._parts(transfer.output, received, transfer.row_bytes, row))
            else:
                parts = transfer.sent[: communicator.size]
                request = communicator.Ialltoallv(
                    self._parts(transfer.input, parts, transfer.row_bytes, row),
                    self._parts(transfer.output, received, transfer.row_bytes, row),
                )
        self._under_way[transfer.process_set] = request, datatypes

    def _rows(self, address: int | None, rows: int, row_bytes: int) -> Any:
        return self._memory.fromaddress(address or 0, rows * row_bytes)

    def _parts(self, address: int | None, rows: list[int], row_bytes: int, row: Any) -> list[Any]:
        """A buffer with a part for each rank, as mpi4py takes it."""
        begins = [sum(rows[:number]) for number in range(len(rows))]
        return [self._rows(address, sum(rows), row_bytes), (rows, begins), row]
