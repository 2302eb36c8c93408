"""Barrier and join."""

from __future__ import annotations

from typing import Any

from collective_core import arrays
from collective_core.runtime.process_sets import ProcessSet
from collective_core.torch import gpu
from collective_core.torch.compiling import not_compiled


@not_compiled
def barrier(process_set: ProcessSet | None = None) -> None:
    """Returns when every rank of the process set has called it."""
    gpu.begin_copied(everything=True)
    arrays.barrier(process_set=process_set)


@not_compiled
def join(device: Any = -1) -> int:  # noqa: ARG001 - Horovod's parameter: the GPU of this rank
    """For a rank that has run out of data: takes part in what the others still do until all have joined.

    Works with every collective; averages are over the ranks that have not joined. Returns the rank that joined last, whose
    model has seen all data.
    """
    gpu.begin_copied(everything=True)  # what was asked for before counts
    return arrays.join()
