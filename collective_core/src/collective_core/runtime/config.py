"""The engine's environment variables, read once at ``init()``.

=============================  =======================================================================================
COLLECTIVE_TIMEOUT             seconds without progress after which a collective fails (1800); 0: never
COLLECTIVE_START_TIMEOUT       seconds for connecting all ranks (60)
COLLECTIVE_ADDRESS             numeric address of this host that the other hosts shall use
COLLECTIVE_NETWORK             CIDRs or interfaces, comma separated; each host uses its address in the first that fits
COLLECTIVE_RAILS               further CIDRs or interfaces: large tensors go over each host's address in each of them, too
COLLECTIVE_SOCKETS             TCP connections to each other rank and address over which large reductions go (1); rank 0's counts
COLLECTIVE_SINGLE_COPY         0: ranks of a host do not reach each other's memory, though the system allows it (1)
COLLECTIVE_ADOPT_TENSORS       1: tensors that are reduced in place again move to memory that the ranks of a host share (torch/memory.py)
COLLECTIVE_FUSION_MB           size in MB of the buckets in which DistributedOptimizer sums gradients (25)
COLLECTIVE_BACKEND             transport of tensors between ranks: engine, or mpi (engine)
COLLECTIVE_SEMANTICS           whose rules hold where the engine's differ from Horovod's: engine, or horovod (engine)
COLLECTIVE_NCCL                auto, on or off: whether CUDA tensors go through NCCL (auto; torch/gpu.py)
COLLECTIVE_AUTOTUNE            1: choose the size of the buckets while training (extensions/autotune.py)
COLLECTIVE_AUTOTUNE_CACHE      file of what was chosen (~/.cache/collective_core/autotune.json)
COLLECTIVE_STALL_WARNING       seconds of waiting after which a rank says on stderr for whom (10); 0: never
COLLECTIVE_TIMELINE            file into which rank 0 writes what all ranks did when (observe/timeline.py)
COLLECTIVE_METRICS_PORT        port plus local rank at which every rank answers Prometheus (observe/prometheus.py)
COLLECTIVE_METRICS_ADDRESS     numeric address at which it listens (127.0.0.1)
COLLECTIVE_FLIGHT_RECORDER     directory in which every rank keeps its last operations, for after a crash (observe/flight_recorder.py)
COLLECTIVE_RESTART_FROM        folder from whose last valid checkpoint the job goes on (torch/checkpoint.py)
COLLECTIVE_SERVERS             of the job's ranks the last so many are parameter servers (0; extensions/ps)
COLLECTIVE_SECRET_FILE         file with the job's secret, for launchers other than mpirun on several hosts (runtime/launchers.py)
COLLECTIVE_SECRET              the secret itself; visible to other processes of the user, so prefer the file
COLLECTIVE_PORT                port at which rank 0 meets the others under torchrun and Slurm
COLLECTIVE_RANK, _SIZE, _STORE for launchers of your own: this rank, their number, host:port of rank 0 or local:NAME
COLLECTIVE_ELASTIC, _WORKER    set by the launcher of an elastic job (elastic/worker.py)
COLLECTIVE_HOST_ID             for tests: ranks with different values behave as if on different hosts
COLLECTIVE_SIMD                for tests: default, avx2 or avx512, at most which instructions may be used
=============================  =======================================================================================

Horovod's variables are understood where they have a meaning (horovod_variables.py); ours win.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping, NamedTuple

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import horovod_variables

#: Long enough for a rank that compiles, evaluates or saves alone. Dead ranks are noticed at once, and waits are reported after
#: seconds: this is for the rest.
DEFAULT_TIMEOUT = 1800.0
#: Decades, for timeouts that shall never come.
NEVER = 9e8
#: Imports on a cold network file system take tens of seconds, but they are over when ranks connect.
DEFAULT_START_TIMEOUT = 60.0
#: PyTorch's own bucket size: large enough for full bandwidth, small enough to overlap with the backward pass.
DEFAULT_FUSION_MB = 25.0
#: Longer than a checkpoint usually takes, short enough for somebody who watches.
DEFAULT_STALL_WARNING = 10.0


#: The folder from whose last valid checkpoint a job goes on; set by its launcher (``--restart-from``).
RESTART_FROM = "COLLECTIVE_RESTART_FROM"
#: Whose rules hold; the package ``horovod`` (collective_core/horovod) sets it.
SEMANTICS = "COLLECTIVE_SEMANTICS"
#: How many of the ranks are parameter servers; set by the launcher (``--servers``).
SERVERS = "COLLECTIVE_SERVERS"
MAX_SERVERS = 1 << 16
#: More than any link has been seen to need.
MAX_SOCKETS = 64
#: Each rank of a host takes a port of its own from here on.
MAX_METRICS_PORT = 64000
#: Transports of tensors in host memory.
BACKENDS = ("engine", "mpi")
#: Whether CUDA tensors go through NCCL. auto: where every rank has a GPU of its own.
NCCL = ("auto", "on", "off")
#: How values of several hosts with several ranks each are added: first within each host, or strictly in rank order.
SUM_ORDERS = ("hosts", "ranks")


class Config(NamedTuple):
    timeout: float
    start_timeout: float
    sockets: int
    single_copy: bool
    adopt_tensors: bool
    fusion_bytes: int
    backend: str
    semantics: str
    nccl: str
    sum_order: str
    autotune: bool
    autotune_cache: str | None
    address: str | None
    networks: tuple[str, ...]
    rails: tuple[str, ...]
    host_id: str | None
    stall_warning: float
    timeline: str | None
    flight_recorder: str | None
    metrics_port: int | None
    metrics_address: str
    servers: int
    notes: tuple[str, ...]


def _number(environment: Mapping[str, str], name: str, default: float, least: float = 1e-9) -> float:
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1e9:
        raise CollectiveError(f"{name}={text!r} is not a positive number", "invalid")
    return value


def _switch(environment: Mapping[str, str], name: str, default: bool = False) -> bool:
    text = environment.get(name, "").strip().lower() or str(int(default))
    if text not in ("0", "1", "false", "true", "no", "yes", "off", "on"):
        raise CollectiveError(f"{name}={text!r} is neither 0 nor 1", "invalid")
    return text in ("1", "true", "yes", "on")


def _whole_number(environment: Mapping[str, str], name: str, most: int, least: int = 1) -> int:
    number = _number(environment, name, 1.0, least=least)
    if number != int(number) or number > most:
        raise CollectiveError(f"{name}={number:g} is not a whole number from {least} to {most}", "invalid")
    return int(number)


def from_environment() -> Config:
    """Raises :class:`CollectiveError` (kind ``invalid``) naming the variable that cannot be read."""
    ours, notes = horovod_variables.translate(os.environ)
    environment = {**ours, **{name: value for name, value in os.environ.items() if value.strip()}}

    def text(name: str) -> str | None:
        return environment.get(name, "").strip() or None

    def one_of(name: str, choices: tuple[str, ...]) -> str:
        chosen = (text(name) or choices[0]).lower()
        if chosen not in choices:
            raise CollectiveError(f"{name}={chosen!r} is not one of {', '.join(choices)}", "invalid")
        return chosen

    return Config(
        timeout=_number(environment, "COLLECTIVE_TIMEOUT", DEFAULT_TIMEOUT, least=0.0) or NEVER,
        start_timeout=_number(environment, "COLLECTIVE_START_TIMEOUT", DEFAULT_START_TIMEOUT),
        sockets=_whole_number(environment, "COLLECTIVE_SOCKETS", MAX_SOCKETS),
        single_copy=_switch(environment, "COLLECTIVE_SINGLE_COPY", default=True),
        adopt_tensors=_switch(environment, "COLLECTIVE_ADOPT_TENSORS"),
        fusion_bytes=int(_number(environment, "COLLECTIVE_FUSION_MB", DEFAULT_FUSION_MB) * (1 << 20)),
        backend=one_of("COLLECTIVE_BACKEND", BACKENDS),
        semantics=one_of(SEMANTICS, tuple(_native.SEMANTICS)),
        nccl=one_of("COLLECTIVE_NCCL", NCCL),
        sum_order=one_of("COLLECTIVE_SUM_ORDER", SUM_ORDERS),
        autotune=_switch(environment, "COLLECTIVE_AUTOTUNE"),
        autotune_cache=text("COLLECTIVE_AUTOTUNE_CACHE"),
        address=text("COLLECTIVE_ADDRESS"),
        networks=tuple(part.strip() for part in (text("COLLECTIVE_NETWORK") or "").split(",") if part.strip()),
        rails=tuple(part.strip() for part in (text("COLLECTIVE_RAILS") or "").split(",") if part.strip()),
        host_id=text("COLLECTIVE_HOST_ID"),
        stall_warning=_number(environment, "COLLECTIVE_STALL_WARNING", DEFAULT_STALL_WARNING, least=0.0),
        timeline=text("COLLECTIVE_TIMELINE"),
        flight_recorder=text("COLLECTIVE_FLIGHT_RECORDER"),
        metrics_port=_whole_number(environment, "COLLECTIVE_METRICS_PORT", MAX_METRICS_PORT) if text("COLLECTIVE_METRICS_PORT") else None,
        metrics_address=text("COLLECTIVE_METRICS_ADDRESS") or "127.0.0.1",
        servers=_whole_number(environment, SERVERS, MAX_SERVERS, least=0) if text(SERVERS) else 0,
        notes=tuple(notes),
    )


def restart_folder() -> Path | None:
    """Where the job is to go on from, as whoever started it said."""
    named = os.environ.get(RESTART_FROM, "").strip()
    return Path(named) if named else None
