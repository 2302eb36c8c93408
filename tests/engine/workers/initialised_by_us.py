"""MPI is left to whoever needs it, as scripts for Horovod do. argv: whether mpi4py.MPI is imported before init, and who initialises it."""

import sys

import mpi4py

when, who = sys.argv[1:3]
mpi4py.rc.initialize = False
if when == "imported":
    from mpi4py import MPI
if who == "script":
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)

import common  # noqa: E402
import numpy as np  # noqa: E402

import collective_core as cc  # noqa: E402
from collective_core import job  # noqa: E402

cc.init(comm=[0, 1] if when == "list" else None)
assert cc.allreduce(np.ones(1), op=cc.Sum)[0] == cc.size() == 2
common.report(finalizes=job._launcher._finalize)
cc.shutdown()
if who == "script":
    MPI.Finalize()
