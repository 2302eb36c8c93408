"""Horovod's environment variables: those that its launchers set for a rank, and those of users. Pure.

Which ones of the users' mean something here, and a sentence for each of those that do not.
"""

from __future__ import annotations

from typing import Mapping, Sequence

HOSTNAME, LOCAL_SIZE = "HOROVOD_HOSTNAME", "HOROVOD_LOCAL_SIZE"
#: In the order of :func:`rank_variables`. Source: Horovod 0.28, horovod/runner/gloo_run.py.
RANK_VARIABLES = (
    HOSTNAME,
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", LOCAL_SIZE),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)
#: Variables that are honoured, and the one of ours that they stand for. Ours wins where both are set.
HONOURED = {
    "HOROVOD_AUTOTUNE": "COLLECTIVE_AUTOTUNE",
    "HOROVOD_CPU_OPERATIONS": "COLLECTIVE_BACKEND",
    "HOROVOD_FUSION_THRESHOLD": "COLLECTIVE_FUSION_MB",
    "HOROVOD_GLOO_IFACE": "COLLECTIVE_NETWORK",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "COLLECTIVE_START_TIMEOUT",
    "HOROVOD_LOG_LEVEL": "COLLECTIVE_STALL_WARNING",
    "HOROVOD_STALL_CHECK_DISABLE": "COLLECTIVE_STALL_WARNING",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "COLLECTIVE_STALL_WARNING",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "COLLECTIVE_TIMEOUT",
    "HOROVOD_TIMELINE": "COLLECTIVE_TIMELINE",
}
#: Variables that ask for what is so anyway, or that the launchers set or read.
ALWAYS = (
    *("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_LOG_HIDE_TIME", "HOROVOD_LOG_TIMESTAMP"),
    *RANK_VARIABLES,
    *("HOROVOD_START_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT"),
)
#: What ``HOROVOD_LOG_LEVEL`` may say, and when it asks for no warnings: neither of ranks that are waited for nor of variables.
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
WITHOUT_WARNINGS = LOG_LEVELS[4:]
#: Why the others do nothing, by the beginning of their names.
WITHOUT_MEANING = {
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum is not cut into chunks of MPI",
    "HOROVOD_AUTOTUNE_": "autotune makes its own plan, and prints what it measured",
    "HOROVOD_CACHE_CAPACITY": "there is no cache of responses",
    "HOROVOD_CONTROLLER": "the ranks find each other through their launcher",
    "HOROVOD_CYCLE_TIME": "operations start at once, without a cycle",
    "HOROVOD_DISABLE_GROUP_FUSION": "groups are not fused",
    "HOROVOD_ELASTIC": "the launcher of an elastic job says what its ranks need",
    "HOROVOD_ENABLE_XLA_OPS": "it concerns TensorFlow",
    "HOROVOD_HIERARCHICAL": "collectives are hierarchical whenever a host has several ranks",
    "HOROVOD_MPI_THREADS_DISABLE": "MPI's threads are used with COLLECTIVE_BACKEND=mpi only",
    "HOROVOD_NUM_NCCL_STREAMS": "it concerns Horovod's own use of NCCL",
    "HOROVOD_THREAD_AFFINITY": "no thread of the engine is bound to a core",
    "HOROVOD_TIMELINE_MARK_CYCLES": "there are no cycles to mark",
    "HOROVOD_TORUS_ALLREDUCE": "NCCL chooses the way of a sum itself",
}


def rank_variables(rank: int, hosts: Sequence[str]) -> dict[str, str]:
    """A rank's place among the others. ``hosts``: every rank's, as the launcher calls it.

    Cross: among the ranks that have the same number on their hosts.
    """
    local = hosts[:rank].count(hosts[rank])
    same = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local]
    values = (hosts[rank], rank, len(hosts), local, hosts.count(hosts[rank]), same.index(hosts[rank]), len(same))
    return {name: str(value) for name, value in zip(RANK_VARIABLES, values)}


def translate(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Our variables that Horovod's stand for, and a sentence for each of Horovod's that does nothing."""
    ours: dict[str, str] = {}
    notes: list[str] = []
    for name in sorted(environment):
        value = environment[name].strip()
        if not name.startswith("HOROVOD_") or name in ALWAYS or not value:
            continue
        if name not in HONOURED:
            reason = next((text for start, text in WITHOUT_MEANING.items() if name.startswith(start)), "it is not known here")
            notes.append(f"{name} has no effect: {reason}")
        elif name == "HOROVOD_FUSION_THRESHOLD":
            # Bytes there, where 0 switches fusion off; here the smallest bucket holds one parameter.
            ours[HONOURED[name]] = str(max(float(value), 1.0) / (1 << 20)) if _is_number(value) else value
        elif name == "HOROVOD_CPU_OPERATIONS":
            if value.lower() == "mpi":
                ours[HONOURED[name]] = "mpi"
            else:
                notes.append(f"{name}={value} has no effect: tensors in host memory go through the engine's own collectives, or MPI")
        elif name == "HOROVOD_LOG_LEVEL":
            if value.lower() not in LOG_LEVELS:
                notes.append(f"{name}={value} has no effect: the levels are {', '.join(LOG_LEVELS)}")
        elif name == "HOROVOD_STALL_CHECK_DISABLE":
            if value != "0":
                ours[HONOURED[name]] = "0"
        elif name == "HOROVOD_TIMELINE" and value == "DYNAMIC":
            continue  # start_timeline always works
        else:
            ours.setdefault(HONOURED[name], value)
    if environment.get("HOROVOD_LOG_LEVEL", "").strip().lower() in WITHOUT_WARNINGS:
        ours["COLLECTIVE_STALL_WARNING"] = "0"
        notes.clear()
    return ours, notes


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
