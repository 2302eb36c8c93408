"""Rank 1 comes late. The program catches the error, shuts down and ends in good order, on both ranks."""

import os
import time

import common
import numpy as np

import collective_core as cc

cc.init()
cc.barrier()
if cc.rank() == 1:
    time.sleep(float(os.environ["COLLECTIVE_TIMEOUT"]) + 2)
try:
    cc.allreduce(np.ones(10), name="loss")
except cc.CollectiveError as error:
    common.report(kind=error.kind)
cc.shutdown()
