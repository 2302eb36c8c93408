"""A child that is forked from a rank ends normally, with its atexit handlers, and the rank goes on. argv: `servers` or `groups`."""

import os
import sys
import time

if sys.argv[1] == "servers":
    os.environ["COLLECTIVE_SERVERS"] = "1"

import collective_core.torch as hvd
import common
import torch
import torch.distributed as dist
from collective_core.errors import CollectiveError

#: Seconds for the end of a child, which takes a few where PyTorch was imported; the rank's own end would wait for minutes.
PATIENCE = 60.0


def end_a_child(use=None):
    """The exit code of a child that does this and ends."""
    pid = os.fork()
    if pid == 0:
        if use is not None:
            common.expect(use, CollectiveError, "was forked from a rank")
        sys.exit(7)
    end = time.monotonic() + PATIENCE
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return "it did not end"
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


if sys.argv[1] == "groups":
    dist.init_process_group("collective")
    common.report(code=end_a_child())
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()
else:
    hvd.init()
    if hvd.ps.is_server():
        hvd.ps.serve()
    else:
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.ps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, staleness=0)
        optimizer.step()
        common.report(code=end_a_child(optimizer.step))
        optimizer.step()
        hvd.ps.close()
