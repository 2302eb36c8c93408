"""A stand-in for GPUs, for machines without: CPU tensors count as a GPU's, and Gloo moves them in the place of NCCL.

``use()`` puts it in the place of ``nccl.platform``, before the first tensor. There are no streams: what is behind an event is done.
"""

import contextlib
from datetime import timedelta

import common
import torch
import torch.distributed as dist
from collective_core.torch import nccl


class Done:
    def query(self):
        return True

    is_completed = query

    def wait(self):
        pass

    synchronize = wait


class End:
    """Of works of Gloo: whether they are done is seen, a failure is raised by whoever looks."""

    def __init__(self, works):
        self.works = works

    def query(self):
        if not all(work.is_completed() for work in self.works):
            return False
        self.wait()
        return True

    def wait(self):
        for work in self.works:
            work.wait()

    synchronize = wait


class GlooOnCpu(nccl.Cuda):
    def __init__(self, problem="", gpu=f"GPU {common.RANK}"):
        self.problem = problem
        self.gpu = gpu
        self.holds_all = True  # False: CPU tensors are CPU tensors again
        self.seen = []  # names of the calls of backends

    def holds(self, _tensor):
        return self.holds_all

    def unsupported_reason(self):
        return self.problem

    def version(self):
        return (2, 30, 0)

    def identity(self, _device):
        return self.gpu

    def backend(self, store, rank, size):
        return Backend(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)), self.seen)

    def event(self, _device):
        return Done()

    def is_done(self, event):
        return event.query()

    def wait(self, event, device):
        assert device.type == "cpu"
        event.wait()

    def stream(self, _stream, _after=None):
        return contextlib.nullcontext()

    def new_stream(self, _device):
        return None

    def end_of(self, works, _device):
        return End(works)

    def keep(self, tensor):
        pass

    def synchronize(self, device=None):
        pass

    def host_memory(self, like):
        return torch.empty(like.shape, dtype=like.dtype)


class Backend:
    """ProcessGroupGloo, with a note of what was called."""

    def __init__(self, group, seen):
        self._group, self._seen = group, seen

    def __getattr__(self, name):
        self._seen.append(name)
        return getattr(self._group, name)

    def _reduce_scatter_base(self, *arguments):
        """Gloo's does not say when it is done."""
        self._seen.append("_reduce_scatter_base")
        self._group._reduce_scatter_base(*arguments).wait()
        return Done()


def use(**options):
    nccl.platform = GlooOnCpu(**options)
    return nccl.platform
