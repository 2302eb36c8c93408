"""Models of the status of an inventory's hosts, and of what a host answers.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from provision.base.validation import Answer
from provision.survey.model import Drift, Installed

State = Literal["installed", "drifted", "busy", "GPU error", "not installed", "unknown", "unreachable"]
STATES: tuple[State, ...] = ("unreachable", "unknown", "not installed", "GPU error", "drifted", "busy", "installed")  # worst first
MAX_DIFFERENCES = 200  # of one host
_COMMANDS: dict[State, str] = {"drifted": "up {}", "not installed": "up {}", "GPU error": "doctor {} --gpu"}

_Text = Annotated[str, Field(max_length=4096)]
_Name = Annotated[str, Field(max_length=200)]
_Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
_Measured = Annotated[float, Field(ge=-1e3, le=1e9, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
_Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class Size(Answer):
    """Memory, or the file system of the installation."""

    total: _Bytes
    available: _Bytes


class Gpu(Answer):
    """A GPU as nvidia-smi numbers it; None is what it does not measure. Degrees Celsius, watts."""

    index: _Count
    uuid: _Name
    name: _Name
    utilization: _Percent | None = None
    memory_used: _Bytes | None = None
    memory_total: _Bytes | None = None
    temperature: _Measured | None = None
    power: _Measured | None = None


class Holder(Answer):
    """Who holds the host's lock: an installation or a removal."""

    owner: _Name
    since: _Name


class RanksOfJob(Answer):
    """The ranks of a job on one host. ``age``: of the oldest."""

    run: _Name
    ranks: Annotated[int, Field(ge=1, le=1_000_000)]
    age: _Seconds
    program: _Name


class Activity(Answer):
    """The section `activity` of the survey script."""

    uptime: _Seconds
    load: _Measured
    cores: _Count
    memory: Size
    disk: Size
    locked: Holder | None = None
    jobs: Annotated[tuple[RanksOfJob, ...], Field(max_length=50)] = ()


class GpuLoad(Answer):
    """The section `gpu_load`. ``error``: of nvidia-smi, where it failed."""

    gpus: Annotated[tuple[Gpu, ...], Field(max_length=64)] = ()
    error: _Text | None = None


class HostAnswer(Answer):
    """What the survey script says for the status. ``installed`` and ``drift`` are asked for now and then only."""

    activity: Activity | None = None
    gpu_load: GpuLoad | None = None
    installed: Installed | None = None
    drift: Annotated[tuple[Drift, ...], Field(max_length=5000)] | None = None
    errors: Annotated[dict[str, _Text], Field(max_length=100)] = Field(default_factory=dict)


class HostStatus(Answer):
    """One host.

    Attributes:
        problem: why it cannot be used, or what could not be read.
        remedy: what helps: a command to type, or a sentence.
        drift: how it differs from what the last run installed and from provision.lock.
        checked: when it was compared with them, in seconds since 1970; None where it never was.
    """

    host: str
    state: State
    problem: str | None = None
    remedy: str | None = None
    drift: tuple[Drift, ...] = ()
    checked: float | None = None
    uptime: float | None = None
    load: float | None = None
    cores: int | None = None
    memory: Size | None = None
    disk: Size | None = None
    locked: Holder | None = None
    gpus: tuple[Gpu, ...] = ()

    @property
    def utilization(self) -> float | None:
        """The mean of its GPUs."""
        known = [gpu.utilization for gpu in self.gpus if gpu.utilization is not None]
        return sum(known) / len(known) if known else None

    @property
    def gpu_memory(self) -> tuple[int, int] | None:
        """Used and total memory of its GPUs."""
        known = [(gpu.memory_used, gpu.memory_total) for gpu in self.gpus if gpu.memory_used is not None and gpu.memory_total is not None]
        return (sum(used for used, _ in known), sum(total for _, total in known)) if known else None


class Job(Answer):
    """A job that runs. ``hosts``: host → number of its ranks there; ``began``, ``stalled_since``: seconds since 1970, the latter None where
    the job goes on, or another machine watches it; ``stragglers``: the ranks for which the others wait now, and why."""

    run: str
    program: str
    ranks: int
    hosts: dict[str, int]
    began: float
    stalled_since: float | None = None
    stragglers: tuple[str, ...] = ()


class LastRun(Answer):
    """The newest run on this inventory. ``began``: seconds since 1970; ``folder``: everything about it."""

    run: str
    command: str
    verdict: str
    began: float | None
    folder: str


class Status(Answer):
    """The status of all hosts of an inventory: what `provision status --json` prints. ``when``: seconds since 1970."""

    model_config = ConfigDict(populate_by_name=True)

    schema_: Literal[1] = Field(1, alias="schema")
    when: float
    seconds: float
    inventory: str
    hosts: tuple[HostStatus, ...]
    jobs: tuple[Job, ...] = ()
    last_run: LastRun | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every host is as it was installed, and the lock could be read."""
        return self.problem is None and all(host.state == "installed" for host in self.hosts)

    @property
    def worst_first(self) -> list[HostStatus]:
        return sorted(self.hosts, key=lambda host: STATES.index(host.state))

    def ranks_on(self, host: str) -> int:
        """Of all jobs."""
        return sum(job.hosts.get(host, 0) for job in self.jobs)


def command(state: State, inventory: str, hosts: Sequence[str]) -> str | None:
    """The command that helps hosts in this state, of all hosts if none is named; None where none does."""
    of_state = _COMMANDS.get(state)
    limit = f" --limit {','.join(hosts)}" if hosts else ""
    return f"provision {of_state.format(shlex.quote(inventory))}{limit}" if of_state else None
