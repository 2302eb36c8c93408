"""Rank 1 never connects to the others: it dies first (argv: ``dies``), its network refuses (``fails``), or it stands still (``stops``)."""

import os
import signal
import subprocess
import sys

import common

import collective_core as cc
from collective_core import _native


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_):
    # Longer than the others take to give up.
    subprocess.Popen(
        ["sh", "-c", f"sleep 12; kill -KILL {os.getpid()}"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(*_):
    raise cc.CollectiveError("no connection to rank 0 (pid 1, host a): no route to host", "timeout", (0,))


connect = _native.connect


def connect_soon(rank, peers, secret, timeout, _start_timeout, *more):
    connect(rank, peers, secret, timeout, 3.0, *more)


_native.connect = connect_soon
if os.environ["COLLECTIVE_RANK"] == "1":
    _native.connect = {"dies": die, "fails": fail, "stops": stop}[sys.argv[1]]
try:
    cc.init()
except cc.CollectiveError as error:
    common.report(rank=int(os.environ["COLLECTIVE_RANK"]), error=str(error), kind=error.kind, ranks=error.ranks)
