"""A rank that dies, or whose GPU hangs, while those of others already wait for it (gpus_by_gloo.py). argv: ``dies`` or ``hangs``."""

import os
import signal
import sys
import time

import collective_core.torch as hvd
import common
import gpus_by_gloo
import torch
from collective_core.torch import nccl

case = sys.argv[1]
platform = gpus_by_gloo.use()
hvd.init()
rank = hvd.rank()
tensor = torch.ones(1 << 20)
assert (hvd.allreduce(tensor, op=hvd.Sum) == hvd.size()).all()
state = hvd.elastic.TorchState(tensor=tensor)
state.commit()
group = nccl.groups[0]


class Never:
    """Of a GPU that has stopped."""

    def is_completed(self):
        return False

    def wait(self):
        while not group.broken:
            time.sleep(0.01)
        raise RuntimeError(group.broken)


if rank == 1:
    group.backend.allreduce = lambda *_: Never()  # its part has been agreed on, and never comes
handle = hvd.allreduce_async_(tensor, name="in flight", op=hvd.Sum)
if rank == 1:
    while group.busy_since() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    assert not hvd.poll(handle)
    if case == "dies":
        common.report(kinds=[])
        os.kill(os.getpid(), signal.SIGKILL)

begin, kinds, blamed = time.monotonic(), [], []
for attempt in (lambda: hvd.synchronize(handle), state.commit, lambda: hvd.allreduce(torch.ones(3), name="after")):
    try:
        attempt()
        kinds.append("none")
    except hvd.HorovodInternalError as error:
        kinds.append(error.kind)
        blamed += error.ranks
assert state._commits == 1, "what a failure has left was committed"
assert group.broken
common.report(kinds=kinds, blamed=blamed, seconds=time.monotonic() - begin)
if case == "hangs":
    assert hvd.poll(handle), "what waits for the end of a failed operation waits for ever"
    time.sleep(10)  # the other rank is to see that its own GPU does not go on, and not that this one is gone
os._exit(0)
