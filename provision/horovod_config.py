"""The YAML file of ``horovodrun --config-file`` as variables of Horovod's, which the engine honours or says why it does not. Pure.

Source of sections and keys: Horovod 0.28, horovod/runner/common/util/config_parser.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from provision.errors import UsageError

_MB = 1 << 20
#: (section, key) → the variable that the key sets.
_VARIABLES = {
    ("params", "fusion_threshold_mb"): "HOROVOD_FUSION_THRESHOLD",
    ("params", "cycle_time_ms"): "HOROVOD_CYCLE_TIME",
    ("params", "cache_capacity"): "HOROVOD_CACHE_CAPACITY",
    ("params", "hierarchical_allreduce"): "HOROVOD_HIERARCHICAL_ALLREDUCE",
    ("params", "hierarchical_allgather"): "HOROVOD_HIERARCHICAL_ALLGATHER",
    ("params", "torus_allreduce"): "HOROVOD_TORUS_ALLREDUCE",
    ("autotune", "log_file"): "HOROVOD_AUTOTUNE_LOG",
    ("autotune", "warmup_samples"): "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    ("autotune", "steps_per_sample"): "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    ("autotune", "bayes_opt_max_samples"): "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    ("autotune", "gaussian_process_noise"): "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    ("timeline", "filename"): "HOROVOD_TIMELINE",
    ("timeline", "mark_cycles"): "HOROVOD_TIMELINE_MARK_CYCLES",
    ("stall_check", "enabled"): "HOROVOD_STALL_CHECK_DISABLE",
    ("stall_check", "warning_time_seconds"): "HOROVOD_STALL_CHECK_TIME_SECONDS",
    ("stall_check", "shutdown_time_seconds"): "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    ("library_options", "mpi_threads_disable"): "HOROVOD_MPI_THREADS_DISABLE",
    ("library_options", "num_nccl_streams"): "HOROVOD_NUM_NCCL_STREAMS",
    ("library_options", "thread_affinity"): "HOROVOD_THREAD_AFFINITY",
    ("library_options", "ccl_bgt_affinity"): "HOROVOD_CCL_BGT_AFFINITY",
    ("library_options", "gloo_timeout_seconds"): "HOROVOD_GLOO_TIMEOUT_SECONDS",
    ("logging", "level"): "HOROVOD_LOG_LEVEL",
    ("logging", "with_timestamp"): "HOROVOD_LOG_HIDE_TIME",
}
_TEXTS = (("autotune", "log_file"), ("timeline", "filename"), ("logging", "level"))
_SWITCHES = (
    *(("params", "hierarchical_allreduce"), ("params", "hierarchical_allgather"), ("params", "torus_allreduce")),
    *(("timeline", "mark_cycles"), ("stall_check", "enabled"), ("library_options", "mpi_threads_disable"), ("logging", "with_timestamp")),
)
#: Whose variable says the contrary.
_TURNED = (("stall_check", "enabled"), ("logging", "with_timestamp"))
#: The engine's own names of these, which win over Horovod's. Source: collective_core/horovod_environment.py.
_OURS = {
    "HOROVOD_FUSION_THRESHOLD": "COLLECTIVE_FUSION_MB",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "COLLECTIVE_START_TIMEOUT",
    "HOROVOD_STALL_CHECK_DISABLE": "COLLECTIVE_STALL_WARNING",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "COLLECTIVE_STALL_WARNING",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "COLLECTIVE_TIMEOUT",
    "HOROVOD_TIMELINE": "COLLECTIVE_TIMELINE",
}
_LAUNCHERS = {"gloo": "own", "mpi": "mpi"}


@dataclass(frozen=True)
class Config:
    """``launcher``: of `launch.LAUNCHERS`, None where the file leaves it open. ``variables``: for every rank.

    ``unknown``: a sentence for each section and key that does nothing, as with Horovod, whose next version may know it.
    """

    launcher: str | None = None
    autotune: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def read(path: Path) -> Config:
    """Raises UsageError naming the file and the value that cannot be meant."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=f"--config-file {path}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"this is no YAML: {getattr(error, 'problem', None) or error}", where=f"{path}{line}") from error
    if not isinstance(document, dict):
        raise UsageError("a mapping of sections is expected, e.g. `params:`", where=str(path))
    launcher = document.get("controller")
    if launcher is not None and str(launcher).lower() not in _LAUNCHERS:
        raise UsageError(f"controller: {launcher}: it is gloo or mpi", where=str(path))
    variables: dict[str, str] = {}
    unknown: list[str] = []
    for section, keys in document.items():
        if section == "controller" or (section == "autotune" and not isinstance(keys, dict)):
            continue
        if section not in {known for known, _ in _VARIABLES}:
            unknown.append(f"{path}: {section}: no such section, it has no effect; there are {', '.join(_sections())}")
            continue
        if not isinstance(keys, dict):
            raise UsageError(f"{section}: keys and values are expected", where=str(path))
        for key, value in keys.items():
            if (section, key) == ("autotune", "enabled"):
                continue
            if (section, key) not in _VARIABLES:
                known = ", ".join(name for of, name in _VARIABLES if of == section)
                unknown.append(f"{path}: {section}: {key}: no such key, it has no effect; there are {known}")
            elif value is not None:
                variables.update([variable((section, key), value, f"{path}: {section}: {key}")])
    autotune = document.get("autotune") or {}
    return Config(
        _LAUNCHERS[str(launcher).lower()] if launcher is not None else None,
        bool(autotune.get("enabled")) if isinstance(autotune, dict) else bool(autotune),
        variables,
        tuple(unknown),
    )


def unset(asked_for: Mapping[str, str], shell: Mapping[str, str]) -> dict[str, str]:
    """What keeps a shell's variables of ours from winning over Horovod's that were asked for: empty ones, which count as none."""
    return {ours: "" for theirs, ours in _OURS.items() if theirs in asked_for and ours in shell}


def _sections() -> list[str]:
    return ["controller", *dict.fromkeys(section for section, _ in _VARIABLES)]


def is_text(key: tuple[str, str]) -> bool:
    """Whether what belongs to a key of the file is any text."""
    return key in _TEXTS


def variable(key: tuple[str, str], value: Any, where: str) -> tuple[str, str]:
    """Horovod's variable for a key of the file, and its value. Raises UsageError, saying ``where``, for what cannot be meant."""
    return _VARIABLES[key], _value(key, value, where)


def _value(key: tuple[str, str], value: Any, where: str) -> str:
    if key in _TEXTS:
        return str(value)
    if key in _SWITCHES:
        if not isinstance(value, bool):
            raise UsageError(f"{value!r} is neither true nor false", where=where)
        return str(int(not value if key in _TURNED else value))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UsageError(f"{value!r} is no number from 0", where=where)
    return str(int(value * _MB) if key == ("params", "fusion_threshold_mb") else value)
