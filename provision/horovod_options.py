"""horovodrun's options that stand for a key of its configuration file, as hidden options of `provision run`: they set the same variables.

Source of the names: Horovod 0.28.1, horovod/runner/launch.py.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
import yaml

from provision import horovod_config

#: Option → its key in the file. An option with ``/no-…`` behind it is a switch.
KEYS = {
    "--cycle-time-ms": ("params", "cycle_time_ms"),
    "--cache-capacity": ("params", "cache_capacity"),
    "--hierarchical-allreduce/--no-hierarchical-allreduce": ("params", "hierarchical_allreduce"),
    "--hierarchical-allgather/--no-hierarchical-allgather": ("params", "hierarchical_allgather"),
    "--torus-allreduce/--no-torus-allreduce": ("params", "torus_allreduce"),
    "--autotune-log-file": ("autotune", "log_file"),
    "--autotune-warmup-samples": ("autotune", "warmup_samples"),
    "--autotune-steps-per-sample": ("autotune", "steps_per_sample"),
    "--autotune-bayes-opt-max-samples": ("autotune", "bayes_opt_max_samples"),
    "--autotune-gaussian-process-noise": ("autotune", "gaussian_process_noise"),
    "--timeline-mark-cycles/--no-timeline-mark-cycles": ("timeline", "mark_cycles"),
    "--stall-check/--no-stall-check": ("stall_check", "enabled"),
    "--stall-check-warning-time-seconds": ("stall_check", "warning_time_seconds"),
    "--stall-check-shutdown-time-seconds": ("stall_check", "shutdown_time_seconds"),
    "--mpi-threads-disable/--no-mpi-threads-disable": ("library_options", "mpi_threads_disable"),
    "--num-nccl-streams": ("library_options", "num_nccl_streams"),
    "--thread-affinity": ("library_options", "thread_affinity"),
    "--gloo-timeout-seconds": ("library_options", "gloo_timeout_seconds"),
    "--log-level": ("logging", "level"),
    "--log-with-timestamp/--log-without-timestamp": ("logging", "with_timestamp"),
    "--no-log-hide-timestamp/--log-hide-timestamp": ("logging", "with_timestamp"),
}


def _name(option: str) -> str:
    return option.partition("/")[0].strip("-").replace("-", "_")


def _parameter(option: str) -> inspect.Parameter:
    kind: Any = bool | None if "/" in option else str | None
    annotation = Annotated[kind, typer.Option(option, hidden=True)]
    return inspect.Parameter(_name(option), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def variables(**given: Any) -> dict[str, str]:
    """Horovod's variables that the options of `KEYS` set; its signature has a parameter for each. Raises UsageError."""
    options = {_name(option): option for option in KEYS}
    found: dict[str, str] = {}
    for name, value in given.items():
        if value is not None:
            option, key = options[name], KEYS[options[name]]
            typed = yaml.safe_load(value) if isinstance(value, str) and not horovod_config.is_text(key) else value
            found.update([horovod_config.variable(key, typed, option.partition("/")[0])])
    return found


variables.__signature__ = inspect.Signature([_parameter(option) for option in KEYS])  # type: ignore[attr-defined]
