"""Under a timeline, rank 1 ends with sys.exit while the others compute, or is killed while rank 0 ends. argv: its file, and `killed`."""

import os
import signal
import sys
import time

import common
from collective_core.observe import timeline

import collective_core as cc
from collective_core import job

job.EXIT_PATIENCE = 60.0 if sys.argv[2:] == ["killed"] else 1.0  # seconds, not five minutes
cc.init()
timeline.start_timeline(sys.argv[1])
cc.barrier()
common.report(started=True)
if sys.argv[2:] == ["killed"]:
    if cc.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    finish = job._launcher.finish
    job._launcher.finish = lambda patience: (common.report(ends_mpi_with_the_others=patience > 0), finish(patience))
    sys.exit(0)
if cc.rank() == 1:
    sys.exit(3)
time.sleep(600)
