"""Some ranks do not come; the others must raise after COLLECTIVE_TIMEOUT. argv: the ranks that stay away."""

import os
import sys
import time

import common
import numpy as np

import collective_core as cc

absent = {int(text) for text in sys.argv[1:]}
cc.init()
cc.barrier()
started = time.monotonic()
if cc.rank() in absent:
    time.sleep(float(os.environ["COLLECTIVE_TIMEOUT"]) + 4)
try:
    cc.allreduce(np.ones(10, dtype=np.float32), name="loss")
    common.report(error=None)
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks), waited=time.monotonic() - started, pid=os.getpid())
os._exit(0)
