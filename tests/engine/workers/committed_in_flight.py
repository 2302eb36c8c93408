"""commit() waits for what is under way, saves nothing of a failure, and works again after a new init(). argv: a folder that ranks share."""
# ruff: noqa: PT017 - worker scripts run without pytest

import sys
import time
from pathlib import Path

import collective_core.torch as hvd
import common
import gpus_by_gloo
import torch
from collective_core.runtime import membership, process_sets
from collective_core.torch import gpu, handles, nccl

from collective_core import _native

nccl.platform = gpus_by_gloo.GlooOnCpu()
nccl.platform.holds_all = False
hvd.init()
rank, size = hvd.rank(), hvd.size()
begins = Path(sys.argv[1]) / "begins"


class Part:
    """Notes, when it is saved, whether the operation was done."""

    handle, was_done = 0, []

    def state_dict(self):
        if self.handle:
            self.was_done.append(hvd.poll(self.handle))
        return {}

    def load_state_dict(self, state):
        pass


state = hvd.elastic.TorchState(part=Part())
if rank == 0:
    begins.touch()
else:
    while not begins.exists():
        time.sleep(0.01)
    time.sleep(0.5)  # rank 0 is in its commit
tensor = torch.full((100_000,), rank + 1.0)
state.part.handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
state.commit()
assert Part.was_done == [True]
assert hvd.synchronize(state.part.handle)[0] == size * (size + 1) / 2

commits, state.part.handle = state._commits, 0
hvd.allreduce_async_(torch.ones(rank + 1), name="of other shapes")
try:
    state.commit()
    raise RuntimeError("an operation that has failed was committed")
except hvd.HorovodInternalError as error:
    assert error.kind == "mismatch", error
assert state._commits == commits


# What a GPU does after its operation counts as done: a failure is noted first, and the event at its end comes then.
class End:
    def query(self):
        membership.note_failure(hvd.CollectiveError("rank 1 is gone", "peer_lost", (1,)))
        return False


hvd.barrier()
nccl.groups[0] = nccl.Group(process_sets.members_of(None), torch.device("cpu"))
nccl.groups[0]._under_way.append((time.monotonic(), End()))
try:
    state.commit()
    raise RuntimeError("what a failure has left on a GPU was committed")
except hvd.HorovodInternalError as error:
    assert error.kind == "peer_lost", error
assert state._commits == commits

tensor = torch.zeros(1)
left = hvd.allreduce_async_(tensor, name="of the last ranks") if rank == 0 else 0
submitted = max(handles._kept, default=0)

# Other ranks, or the same ones anew, have not failed.
hvd.shutdown()
hvd.init()
assert membership.failure() is None

# What was under way with the last ones can be forgotten, also by the engine.
gpu.forget_all()
assert not handles._under_way
if rank == 0:
    try:
        _native.is_done(submitted)
        raise RuntimeError("the engine still has it")
    except hvd.HorovodInternalError as error:
        assert error.kind == "invalid", error
state.commit()
assert state._commits == commits + 1
common.report(done=True)
