"""Rank 1 is late for operations that have a place in an order (gpus_by_gloo.py). Three ranks. Reports whom this one has waited for most."""

import time

import collective_core.torch as hvd
import common
import gpus_by_gloo
import torch

gpus_by_gloo.use()
pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[pair])
hvd.allreduce(torch.ones(3), name="all")
if pair.included():
    hvd.allreduce(torch.ones(3), name="pair", process_set=pair)
for number in range(4):
    if hvd.rank() == 1:
        time.sleep(0.3)
    hvd.allreduce(torch.ones(3), name=str(number))
common.report(slowest=hvd.metrics()["slowest_rank"])
