"""A rank that dies (`killed`), raises an exception (`raises`), stands still (`stalls`) or ends early (`ends`) while others train.

Or a server that answers when the worker has given up (`late`).

Arguments: servers, how, the rank, and a folder in which a file `go` lets one go on that stands still.
"""

import os
import signal
import sys
import time
from pathlib import Path

os.environ["COLLECTIVE_SERVERS"] = sys.argv[1]

import collective_core.torch as hvd
import common
import torch
from collective_core.errors import CollectiveError
from collective_core.extensions.ps import group
from collective_core.extensions.ps.store import Store

how, failing, STEPS = sys.argv[2], int(sys.argv[3]), 6
hvd.init()
torch.set_num_threads(1)


def wait_to_go():
    while not Path(sys.argv[4], "go").exists():
        time.sleep(0.05)


def fail_at(step):
    if hvd.rank() == failing and step == 3:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stalls":
            wait_to_go()
            sys.exit()
        raise ZeroDivisionError("made by a test")


update = Store.update


def update_or_fail(self, name, contributions):
    update(self, name, contributions)
    if how == "late":
        wait_to_go()
    if how == "stalls" and self.updates == 3:  # from now on nobody can be late for another reason
        group.current().timeout = 3.0
    fail_at(self.updates)


Store.update = update_or_fail
try:
    if hvd.ps.is_server():
        hvd.ps.serve()
        common.report(ended=True)
    else:
        array = hvd.ps.Array("array", torch.zeros(10_000), torch.optim.SGD, lr=1.0)
        if how == "late":
            other = hvd.ps.Array("other", torch.full((10_000,), 2.0), torch.optim.SGD, lr=1.0)
            group.current().messages.timeout = 0.5
            array.push(torch.ones(10_000))
            common.expect(array.pull, CollectiveError, "was not taken within 0.5 s")
            Path(sys.argv[4], "go").touch()
            common.report(value=other.pull().unique().tolist())
        for step in range(STEPS if how != "ends" or hvd.rank() != failing else 3):
            fail_at(step if how != "ends" else -1)
            array.push(torch.full((10_000,), 1.0 + hvd.rank()))
            value = array.pull()
        common.report(value=value.unique().tolist())
except CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=error.ranks)
    if how == "late":
        os._exit(0)  # an ordinary end waits for the other rank, which may still come
    if how == "stalls":
        Path(sys.argv[4], "go").touch()
