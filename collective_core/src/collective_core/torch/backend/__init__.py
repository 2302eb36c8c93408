"""The backend ``collective`` of torch.distributed: the engine under DDP, FSDP, DTensor and whatever else speaks it.

    torch.distributed.init_process_group("collective")

A group of torch.distributed is a process set of the engine. Its members meet through the store that PyTorch gives them (store.py); the
default group of a process that has not called ``hvd.init()`` joins the job.
"""

from collective_core.torch.backend.group import CollectiveGroup
from collective_core_autoload import register

__all__ = ["CollectiveGroup"]

register()  # PyTorch before 2.5 does not look for backends itself
