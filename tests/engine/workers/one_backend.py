"""COLLECTIVE_BACKEND=mpi on rank 1 only."""

import os

import common

import collective_core as cc

if common.RANK == 1:
    os.environ["COLLECTIVE_BACKEND"] = "mpi"
try:
    cc.init()
    common.report(error=None)
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks))
