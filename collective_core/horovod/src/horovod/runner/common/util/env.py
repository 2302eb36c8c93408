"""What the launcher has said of this process."""

from __future__ import annotations

import os


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size from the variables of Horovod's launchers, Open MPI, or other MPIs; (0, 1) without a launcher.

    Raises RuntimeError where only one of the two is set.
    """
    for rank, size in (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        values = [os.environ[name] for name in (rank, size) if name in os.environ]
        if len(values) == 2:
            return int(values[0]), int(values[1])
        if values:
            raise RuntimeError(f"only one of {rank} and {size} is set")
    return 0, 1
