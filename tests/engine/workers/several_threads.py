"""Two threads with blocking operations, which start in another order on every second rank."""

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
common.report(done=True)
hvd.shutdown()
