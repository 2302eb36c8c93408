"""Each rank its own framework: the argument of its number, such as "tensorflow", or "late tensorflow", imported after init()."""

import os
import sys

import numpy as np

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["COLLECTIVE_RANK"])
*late, framework = sys.argv[1 + rank].split()


def numpy():
    import collective_core

    collective_core.init()
    return collective_core.allreduce(np.full(3, rank, np.float32), name="one")


def distributed():
    import torch

    torch.distributed.init_process_group("collective")


def torch():
    import collective_core.torch as hvd
    import torch

    hvd.init()
    return hvd.allreduce(torch.full((3,), float(rank)), name="one").numpy()


def tensorflow():
    import collective_core.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    return hvd.allreduce(tf.fill([3], float(rank)), name="one").numpy()


if late:
    import collective_core

    collective_core.init()
try:
    print(f"rank {rank}: {globals()[framework]().tolist()}", flush=True)
except (RuntimeError, ValueError) as error:
    print(f"rank {rank}: {error}", flush=True)
    sys.exit(int("COLLECTIVE_RANK" in os.environ))
