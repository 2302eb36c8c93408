"""Every worker sends its gradient to rank 0, which answers with the new weights."""
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
rng = np.random.default_rng(rank)
target = np.arange(5.0)
w = np.zeros(5)

for step in range(48):
    x = rng.normal(size=(12, 5))
    gradient = x.T @ (x @ (w - target)) / len(x)
    if rank == 0:
        buffer = np.empty(5)
        for peer in range(1, size):
            comm.Recv(buffer, source=peer, tag=step % 16 + step // 16)  # HANGS HERE
            gradient += buffer
        w -= 0.1 * gradient / size
    else:
        comm.Send(gradient, dest=0, tag=step % 16)
    comm.Bcast(w, root=0)
    time.sleep(0.2)
    print(f"rank {rank} step {step} error {np.abs(w - target).max():.4f}", flush=True)
