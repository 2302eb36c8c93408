"""Two ranks that have used everything and are then killed."""

import os
import signal

import common
import numpy as np

import collective_core as cc

cc.init()
cc.allreduce(np.ones(1_000_000))
array = cc.empty(1_000_000)
array[:] = 1
cc.allreduce(array, out=array)
common.report(marked=bool(os.environ.get("TEST_JOB")))
os.kill(os.getpid(), signal.SIGKILL)
