"""Rank 0 is told that rank 1 is gone before it has met it: as by the launcher, of a process that was stopped meanwhile."""

import os
import threading

import common
import numpy as np

import collective_core as cc
from collective_core import _native

if common.RANK == 0:
    _native.give_up(1)
cc.init()
if cc.rank() == 0:
    try:
        cc.allreduce(np.ones(3))
    except cc.CollectiveError as error:
        common.report(kind=error.kind, ranks=list(error.ranks), text=str(error))
else:  # it is silent until the other one has made up its mind
    while True:
        try:
            _native.check_peers(0)
            threading.Event().wait(0.05)
        except cc.CollectiveError:
            break

os._exit(0)  # nobody is left with whom to end together
