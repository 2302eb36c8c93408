"""Under a timeline, rank 1 ends with sys.exit while the others compute. argv: the file of the timeline."""

import sys
import time

import common

import collective_core as cc
from collective_core import context, timeline

context.EXIT_PATIENCE = 1.0  # not ten
cc.init()
timeline.start_timeline(sys.argv[1])
cc.barrier()
common.report(started=True)
if cc.rank() == 1:
    sys.exit(3)
time.sleep(600)
