"""Master and workers with few pieces of work: some workers are idle for long."""
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
WORK, STOP = 1, 2

if rank == 0:
    durations = [0.2] * (6 * (size - 1)) + [40.0] + [0.2] * 4
    todo, busy, total = list(enumerate(durations)), 0, 0.0
    for worker in range(1, size):
        comm.send(todo.pop(0), dest=worker, tag=WORK)
        busy += 1
    while busy:
        status = MPI.Status()
        total += comm.recv(source=MPI.ANY_SOURCE, status=status)
        print(f"total {total:.3f}, {len(todo)} pieces left", flush=True)
        if todo:
            comm.send(todo.pop(0), dest=status.Get_source(), tag=WORK)
        else:
            busy -= 1
    for worker in range(1, size):
        comm.send(None, dest=worker, tag=STOP)
else:
    done = 0
    while True:
        status = MPI.Status()
        piece = comm.recv(source=0, status=status)
        if status.Get_tag() == STOP:
            break
        time.sleep(piece[1])
        done += 1
        comm.send(float(np.sin(piece[0])), dest=0)
        print(f"rank {rank} piece {piece[0]} done", flush=True)
    print(f"rank {rank} has done {done}", flush=True)
