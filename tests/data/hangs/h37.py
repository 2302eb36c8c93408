"""Sparse gradients of an embedding, thinned out until they compress to the size of a packet."""
import time
import zlib

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
rng = np.random.default_rng(rank)
PACKET, FLOOR = 60_000, 0.5


def pack(gradient):
    order = np.argsort(-np.abs(gradient))
    keep = 1.0
    while True:
        thin = np.zeros(gradient.size, "f4")
        thin[order[: int(keep * gradient.size)]] = gradient[order[: int(keep * gradient.size)]]
        data = zlib.compress(thin.tobytes(), 9)  # HANGS HERE
        if len(data) <= PACKET:
            return data
        keep = max(keep * 0.8, FLOOR)  # never drop more than half


w = np.zeros(80_000)
for step in range(40):
    density = 0.05 if rank != 2 or step != 9 else 0.9  # one batch touches nearly all rows
    touched = rng.random(w.size) < density
    gradient = (w - 1 + 0.1 * rng.normal(size=w.size)) * touched
    parts = comm.allgather(pack(gradient))
    total = sum(np.frombuffer(zlib.decompress(p), "f4") for p in parts)
    w -= 0.5 * total / size
    time.sleep(0.1)
    print(f"rank {rank} step {step} error {np.abs(w - 1).mean():.4f}", flush=True)
