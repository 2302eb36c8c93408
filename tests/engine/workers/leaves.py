"""Rank 0 leaves with the exit code of the command line, while the others wait for it in an allreduce."""

import sys

import numpy as np

import collective_core as cc

cc.init()
if cc.rank() == 0:
    sys.exit(int(sys.argv[1]))
cc.allreduce(np.ones(4), name="x")
