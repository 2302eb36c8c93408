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


for number, count in enumerate((2, 2, 300_000)):
    if number:  # before, no thread has called yet, nor has the main one
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


def disagree(name):
    try:
        hvd.synchronize(hvd.allreduce_async(torch.ones(2), name=f"{name} of rank {rank}"))
        raise RuntimeError("no error")
    except hvd.HorovodInternalError as error:
        assert error.kind == "mismatch", error
        assert all(f"'{name} of rank {each}'" in str(error) for each in range(size)), error


# Threads that sleep for a while, though what they will bring is waited for on every rank.
names = ["slept on odd ranks", "slept on even ranks"]
both_have_called = threading.Barrier(2)


def sleep_between(name, delay):
    reduce(f"before {name}", 0.0, 2)
    both_have_called.wait()
    reduce(name, delay, 2)


threads = [threading.Thread(target=sleep_between, args=(name, 9.0 * (rank % 2 ^ i))) for i, name in enumerate(names)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for name in names:
    assert results[name] == size * 2, results

# Every rank waits, and its other threads have ended. Nothing warns of a stall.
hvd.shutdown()
os.environ["COLLECTIVE_STALL_WARNING"] = "0"
hvd.init()
for number in range(3):
    other = threading.Thread(target=reduce, args=(f"of another thread {number}", 0.0, 2))
    other.start()
    other.join()
disagree("ended")

# Or they have not run for a while.
hvd.shutdown()
os.environ["COLLECTIVE_STALL_WARNING"] = "0.1"
hvd.init()
idle, has_called = threading.Event(), threading.Event()
other = threading.Thread(target=lambda: (reduce("of an idle thread", 0.0, 2), has_called.set(), idle.wait()))
other.start()
has_called.wait()
disagree("idle")
idle.set()
other.join()

# Another thread computes: it is believed to bring nothing after a long time.
computes = True
has_called.clear()


def compute():
    reduce("of a thread that computes", 0.0, 2)
    has_called.set()
    while computes:
        sum(range(1000))


other = threading.Thread(target=compute)
other.start()
has_called.wait()
disagree("busy")
computes = False
other.join()
hvd.barrier()
common.report(done=True)
hvd.shutdown()
