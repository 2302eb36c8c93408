"""Functions of the engine without PyTorch that programs may call where a compiler looks, and in which it finds nothing to trace."""

from __future__ import annotations

from collective_core import job
from collective_core.observe import metrics as observed
from collective_core.observe import timeline
from collective_core.runtime import process_sets
from collective_core.torch.compiling import not_compiled

init = not_compiled(job.init)
shutdown = not_compiled(job.shutdown)
add_process_set = not_compiled(process_sets.add_process_set)
remove_process_set = not_compiled(process_sets.remove_process_set)
metrics = not_compiled(observed.metrics)
start_timeline = not_compiled(timeline.start_timeline)
stop_timeline = not_compiled(timeline.stop_timeline)
