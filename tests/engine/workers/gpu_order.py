"""Process sets that share a GPU, and whose operations every rank launches as it can (gpus_by_gloo.py). Three ranks.

Rank 0 is slow to launch those of the set {0, 1}, rank 1 those of all ranks, and rank 2 is slow to connect to rank 1: without an order that
the ranks agree on each has another one: argv `without` shows it. Reports the order in which this rank has launched, by the values that its
operations have sent.
"""

import sys
import time

import collective_core.torch as hvd
import common
import gpus_by_gloo
import torch
from collective_core.torch import nccl

TRIAL, FEW, ALL, PAIR = 1, 1000, 2000, 3000  # values that are sent; TRIAL: by a group that has just been connected
SLOW = {0: range(FEW, ALL), 1: range(ALL, PAIR), 2: [TRIAL]}[common.RANK]
launched = []


class Slow(gpus_by_gloo.Backend):
    def allreduce(self, tensors, *options):
        value = int(tensors[0].flatten()[0])
        if value in SLOW:
            time.sleep(0.3)
        launched.append(value)
        return self._group.allreduce(tensors, *options)


gpus_by_gloo.Backend = Slow
if "without" in sys.argv:
    nccl.Order.is_next = lambda *_: True
gpus_by_gloo.use()
few, pair = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
hvd.init(process_sets=[few, pair])
rank = hvd.rank()


def start(value, process_set):
    return hvd.allreduce_async(torch.full((3,), float(value)), name=str(value), op=hvd.Sum, process_set=process_set)


def ask(value, process_set):
    assert (hvd.synchronize(start(value, process_set)) == value * process_set.size()).all()


ask(ALL, hvd.global_process_set)
launched.clear()
# While only the global set has a group, so that nothing but the registered sets tells that there will be another.
handle = start(ALL + 9, hvd.global_process_set)
if rank > 0:
    ask(PAIR, pair)  # its group is connected meanwhile, and tried
hvd.synchronize(handle)
first = launched.copy()
if rank < 2:
    ask(FEW, few)
launched.clear()
for number in range(1, 4):
    # Also in an order of the program's that differs from rank to rank.
    sets = [(ALL + number, hvd.global_process_set), *([(FEW + number, few)] if rank < 2 else [])]
    handles = [start(*each) for each in (reversed(sets) if rank == 0 else sets)]
    for handle in handles:
        hvd.synchronize(handle)
hvd.barrier()
common.report(launched=first + launched)
