"""Two threads with blocking operations, which start in another order on every second rank; then ranks that want different things."""
# ruff: noqa: PT017 - worker scripts run without pytest

import os
import threading
import time

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
results = {}


def reduce(name, delay, count):
    time.sleep(delay)
    try:
        results[name] = hvd.allreduce(torch.ones(count), name=name, op=hvd.Sum).sum().item()
    except hvd.HorovodInternalError as error:
        results[name] = str(error)


for number, count in enumerate((2, 300_000)):
    hvd.barrier()
    names = [f"first {number}", f"second {number}"]
    late = rank % 2
    threads = [threading.Thread(target=reduce, args=(name, 0.3 * (late ^ i), count)) for i, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert results[name] == size * count, results

# Every rank waits, but no rank knows that of its other threads.
hvd.shutdown()
os.environ["COLLECTIVE_STALL_WARNING"] = "0.1"
hvd.init()
other = threading.Thread(target=reduce, args=("of another thread", 0.0, 2))
other.start()
other.join()
try:
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name=f"of rank {rank}"))
    raise RuntimeError("no error")
except hvd.HorovodInternalError as error:
    assert error.kind == "mismatch", error
    assert all(f"'of rank {each}'" in str(error) for each in range(size)), error
hvd.barrier()
common.report(done=True)
hvd.shutdown()
