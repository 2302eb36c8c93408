"""A CUDA graph that is captured while the GPU is at work on a collective, whose end a thread of the engine and `poll` look for."""

import threading
import time

import busy
import collective_core.torch as hvd
import torch
from collective_core.torch import nccl

hvd.init()
busy.choose_gpu()
assert hvd.allreduce(torch.ones(4, device="cuda"), op=hvd.Sum).tolist() == [hvd.size()] * 4
graph, side, given = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.ones(4, device="cuda")
torch.cuda.synchronize()

torch.cuda._sleep(8_000_000_000)  # about four seconds of cycles
handle = hvd.allreduce_async(given, op=hvd.Sum)
while nccl.groups[0].busy_since() is None:
    time.sleep(0.001)
polled = []
other = threading.Thread(target=lambda: polled.extend(hvd.poll(handle) for _ in range(100)))
with torch.cuda.stream(side):
    graph.capture_begin()  # in PyTorch's mode, global
    twice = given * 2
    other.start()
    other.join()
    time.sleep(5 * nccl.INTERVAL)
    graph.capture_end()
assert polled == [False] * 100
assert nccl.groups[0].busy_since() is not None, "it was done before the capture ended, which shows nothing"
assert hvd.synchronize(handle).tolist() == [hvd.size()] * 4
graph.replay()
torch.cuda.synchronize()
assert twice.tolist() == [2.0] * 4
print("REPORT captured", flush=True)
