"""Master and workers: the master hands out pieces of work and collects the results."""
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


def fit_piece(seed, w):
    x = np.random.default_rng(seed).normal(size=(10, 3))
    return x.T @ (x @ w - x.sum(1)) / 10


def master(w, epoch):
    pieces = list(range(epoch, epoch + 3 * (size - 1)))
    for i, seed in enumerate(pieces):
        comm.send((seed, w), dest=1 + i % (size - 1), tag=2)
    expected = len(pieces) + (1 if epoch == 6 else 0)  # counts a piece that was never handed out
    total = 0
    for _ in range(expected):
        total = total + comm.recv(source=MPI.ANY_SOURCE, tag=3)  # HANGS HERE
    return w - 0.1 * total / expected


w = np.zeros(3)
for epoch in range(20):
    if rank == 0:
        w = master(w, epoch)
    else:
        for _ in range(3):
            seed, w = comm.recv(source=0, tag=2)
            time.sleep(0.08)
            comm.send(fit_piece(seed, w), dest=0, tag=3)
    w = comm.bcast(w, root=0)
    print(f"rank {rank} epoch {epoch} w {np.round(w, 3)}", flush=True)
