"""Process sets from mpi4py's communicators, made before and after init."""

import collective_core.torch as hvd
import common
import torch
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
halves = hvd.ProcessSet(world.Split(color=rank % 2, key=rank))
hvd.init(world, process_sets=[halves])
mine = [r for r in range(size) if r % 2 == rank % 2]
assert halves.ranks == mine, halves
assert halves.mpi_comm.Get_size() == len(mine)
assert hvd.global_process_set.mpi_comm == world
assert halves.process_set_id == 1 + rank % 2, halves
assert hvd.get_process_set_ids_and_ranks() == {0: list(range(size)), 1: list(range(0, size, 2)), 2: list(range(1, size, 2))}
assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum, process_set=halves).item() == sum(mine)
group = world.Get_group().Incl([0, size - 1])
ends = hvd.add_process_set(hvd.ProcessSet(world.Create(group)))  # a null communicator on the other ranks
if rank in (0, size - 1):
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ends).item() == 2.0
else:
    assert ends.process_set_id is None
common.report(done=True)
hvd.shutdown()
