"""What `restore` needs in memory beside the parts: reported by every rank at the moment when it needs most. Arguments: the folder and
the rank that may not open what others hold in memory, or -1."""

import re
import sys
import warnings
from pathlib import Path

import collective_core.torch as hvd
import common
import torch
from collective_core.torch import host_copy

hvd.init()
rank = hvd.rank()
if int(sys.argv[2]) == rank:
    path_of = host_copy.path_of
    host_copy.path_of = lambda number, pid=None: path_of(number) if pid is None else "/nowhere"


def proportional():
    """Bytes of this process's memory but for libraries; of pages that several processes have, its share."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kilobytes) << 10 for kilobytes in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE))


class Model(torch.nn.Linear):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        hvd.barrier()
        self.needed = proportional() - self.before
        hvd.barrier()


side = 4096
model = Model(side, side, bias=False)
checkpoints = hvd.Checkpoints(sys.argv[1], model=model)
torch.nn.init.constant_(model.weight, 3.0)
checkpoints.save(1)
checkpoints.wait()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for value in (0.0, 1.0):  # the first time, the interpreter's own memory grows
        torch.nn.init.constant_(model.weight, value)
        model.before = proportional()
        assert checkpoints.restore() == {"step": 1}
        assert model.weight.min().item() == model.weight.max().item() == 3.0
left = proportional() - model.before
common.report(needed=model.needed, left=left, content=side * side * 4, warned=[str(entry.message) for entry in caught])
