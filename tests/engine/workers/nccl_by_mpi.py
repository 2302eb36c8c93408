"""A stand-in for NCCL, for machines without a GPU: the same calls, made by MPI, at once, on addresses of host memory."""

from __future__ import annotations

import ctypes

import numpy as np
from collective_core.transport import nccl
from mpi4py import MPI

TYPES = {number: np.dtype(name) for name, number in nccl.TYPES.items() if name != "bfloat16"}
REDUCTIONS = {nccl.SUM: MPI.SUM, nccl.PRODUCT: MPI.PROD, nccl.MIN: MPI.MIN, nccl.MAX: MPI.MAX}


def memory(address, call, parts=1):
    """The elements of a call, or as many for each of several ranks."""
    count, dtype = call.count * parts, TYPES[call.dtype]
    return np.frombuffer((ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address), dtype=dtype)


class Library:
    """As nccl.Library. `sets`: the ranks of the job that make a communicator of so many ranks."""

    version = 1

    def __init__(self, sets):
        self.sets = sets
        self.communicators = {}
        self.made = []  # names of functions, in order

    def unique_id(self):
        return bytes(nccl.ID_BYTES)

    def communicator(self, size, _unique_id, rank):
        group = MPI.COMM_WORLD.Get_group().Incl(self.sets[size])
        self.communicators[size] = MPI.COMM_WORLD.Create_group(group, size)
        assert self.communicators[size].rank == rank
        return size

    def abort(self, communicator):
        del self.communicators[communicator]

    destroy = abort

    def put(self, calls, source, target, communicator, _stream):
        world, under_way = self.communicators[communicator], []
        for call in calls:
            self.made.append(call.function)
            under_way += self._make(call, source + call.source, target + call.target, world)
        MPI.Request.Waitall(under_way)

    def _make(self, call, source, target, world):
        """Receives and sends go on until the end of the group."""
        is_root = world.rank == call.peer
        if call.function == "ncclSend":
            return [world.Isend(memory(source, call), call.peer)]
        if call.function == "ncclRecv":
            return [world.Irecv(memory(target, call), call.peer)]
        if call.function == "ncclAllGather":
            world.Allgather(memory(source, call), memory(target, call, world.size))
        elif call.function == "ncclBroadcast":
            if is_root:
                memory(target, call)[:] = memory(source, call)
            world.Bcast(memory(target, call), call.peer)
        elif call.function == "ncclAllReduce":
            world.Allreduce(memory(source, call).copy(), memory(target, call), REDUCTIONS[call.reduction])
        elif call.function == "ncclReduceScatter":
            sent = memory(source, call, world.size)
            world.Reduce_scatter_block(sent, memory(target, call), REDUCTIONS[call.reduction])
        else:
            assert call.function == "ncclReduce"
            world.Reduce(memory(source, call), memory(target, call) if is_root else None, REDUCTIONS[call.reduction], call.peer)
        return []
