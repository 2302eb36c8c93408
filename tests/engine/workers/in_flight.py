"""Operations that nobody waits for any more keep their memory until the engine is done with it. argv: the case."""
# ruff: noqa: PT017 - worker scripts run without pytest

import gc
import os
import signal
import sys
import threading
import time

import collective_core.torch as hvd
import common
import torch

LENGTH = 1_000_000
hvd.init()
rank, size = hvd.rank(), hvd.size()
case = sys.argv[1]


def allocations_stay_as_they_are():
    """Memory that was given back too early would be handed out again here, and the engine would write into it."""
    gc.collect()
    fresh = [torch.full((LENGTH,), 7.0) for _ in range(4)]
    hvd.barrier()  # behind what is still in the queue
    hvd.synchronize(hvd.allreduce_async(torch.ones(1)))
    assert all(bool((tensor == 7.0).all()) for tensor in fresh), "the engine wrote into memory that is not its own"


def wrong_member():
    """One member of a group is refused: nobody is told before the others are done with their memory."""
    good, bad, bools = torch.ones(LENGTH), torch.ones(3, dtype=torch.complex32), torch.ones(3, dtype=torch.bool)
    calls = {
        "allreduce": lambda: hvd.grouped_allreduce([bools, good], op=hvd.Average),
        "allreduce in place": lambda: hvd.synchronize(hvd.grouped_allreduce_async_([bad, good.clone()])),
        "adasum": lambda: hvd.grouped_allreduce([torch.ones(3, dtype=torch.int32), good], op=hvd.Adasum),
        "allgather": lambda: hvd.grouped_allgather([bad, good]),
        "allgather async": lambda: hvd.synchronize(hvd.grouped_allgather_async([bad, good])),
        "reducescatter": lambda: hvd.grouped_reducescatter([bools, good]),
        "reducescatter async": lambda: hvd.synchronize(hvd.grouped_reducescatter_async([bad, good])),
        "sparse": lambda: hvd.sparse_allreduce_async(torch.ones(LENGTH, dtype=torch.complex32).to_sparse(), "s", hvd.Sum)(),
    }
    for name, call in calls.items():
        if rank == 1:
            time.sleep(0.2)
        try:
            call()
            raise RuntimeError(f"{name} was accepted")
        except hvd.HorovodInternalError as error:
            assert error.kind == "invalid", (name, error)
        assert not handles._kept, f"{name} left something under way"
    allocations_stay_as_they_are()


def forgotten():
    """Handles that the program drops: the operations run on, and their memory goes when they have."""
    for _ in range(3):
        hvd.allreduce_async_(torch.ones(LENGTH), op=hvd.Sum)
    abandoned = [torch.ones(LENGTH) for _ in range(3)]
    handles_of = [hvd.allreduce_async_(tensor, op=hvd.Sum) for tensor in abandoned]
    for handle in handles_of:
        handles.abandon(handle)
    del abandoned
    if rank == 1:
        time.sleep(0.3)
    allocations_stay_as_they_are()
    assert len(handles._kept) == 3, "the first three can still be synchronized"


def interrupted():
    """Ctrl-C while waiting."""
    tensor = torch.ones(LENGTH)
    if rank == 0:
        handle = hvd.allreduce_async_(tensor, name="k", op=hvd.Sum)
        del tensor
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            hvd.synchronize(handle)
            raise RuntimeError("not interrupted")
        except KeyboardInterrupt:
            common.tell("rank 0 was interrupted")
    else:
        common.wait_to_be_told("rank 0 was interrupted")
        hvd.allreduce_(tensor, name="k", op=hvd.Sum)
    allocations_stay_as_they_are()


from collective_core.torch import handles  # noqa: E402 - to see what it keeps

{"wrong-member": wrong_member, "forgotten": forgotten, "interrupted": interrupted}[case]()
common.report(done=True)
hvd.shutdown()
