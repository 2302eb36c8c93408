"""The first rank of the first host comes late, and its second never: that one is to blame, on all. COLLECTIVE_TIMEOUT is 4."""

import os
import time

import common
import numpy as np

import collective_core as cc

cc.init()
cc.barrier()
if cc.rank() == 0:
    time.sleep(2)  # within the others' deadline; its own ends long after theirs
if cc.rank() == 1:
    time.sleep(10)
try:
    cc.allreduce(np.ones(10, dtype=np.float32), name="loss")
    common.report(error=None)
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks))
os._exit(0)
