"""What is saved in the background: a slow disk, a disk that fails, and the end of the process. Argument: the folder."""

import errno
import os
import sys
import threading
from pathlib import Path

import collective_core.torch as hvd
import common
import torch

hvd.init()
folder = Path(sys.argv[1])
model = torch.nn.Linear(3, 1)
checkpoints = hvd.Checkpoints(folder, keep=9, model=model)
disk_is_ready = threading.Event()
fsync, replace = os.fsync, os.replace


def slow_fsync(number):
    assert disk_is_ready.wait(60)
    fsync(number)


def failing_replace(source, target):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def steps_on_disk():
    return hvd.broadcast_object(sorted(int(path.name[5:17]) for path in folder.glob("step-*")))


def set_weights(value):
    torch.nn.init.constant_(model.weight, value)


def said_by(call):
    try:
        call()
    except hvd.CollectiveError as error:
        return f"{error.kind} {error.ranks}: {error}"
    return "nothing"


os.fsync = slow_fsync
set_weights(1.0)
checkpoints.save(1)
set_weights(2.0)  # while it is written
assert steps_on_disk() == []
disk_is_ready.set()
checkpoints.wait()
assert steps_on_disk() == [1]
assert checkpoints.restore() == {"step": 1}
assert model.weight[0, 0].item() == 1.0, "what was copied counts, not what the weights were when it was written"

disk_is_ready.clear()
checkpoints.save(2)
threading.Timer(0.2, disk_is_ready.set).start()
checkpoints.save(3)  # waits for the one before
assert steps_on_disk()[:2] == [1, 2]
assert hvd.Checkpoints(folder, model=model).restore() == {"step": 3}, "it waits for what another object saves"

os.replace = failing_replace
said = []
for call in (
    checkpoints.wait,
    lambda: checkpoints.save(5),
    hvd.Checkpoints(folder, model=model).restore,
):
    checkpoints.save(4)
    said.append(said_by(call))
    assert said_by(checkpoints.wait) == "nothing", "it is said once"
assert steps_on_disk() == [1, 2, 3]
assert not list(folder.glob(".*"))
checkpoints.save(6)
said.append(said_by(hvd.shutdown))

hvd.init()
os.replace = replace
disk_is_ready.clear()
hvd.Checkpoints(folder, keep=9, model=model).save(7)
threading.Timer(0.3, disk_is_ready.set).start()
common.report(said=said)  # and ends: with 7 on the disk
