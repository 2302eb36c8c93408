"""The plan: exact versions, sources and reasons for every host, as data. Both renderers (playbook, Dockerfile) only read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1

Source = Literal["wheel", "distribution", "index", "folder", "host", "bundled", "remove", "leave"]


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost, and why."""

    candidate: str
    reason: str


@dataclass(frozen=True)
class Component:
    """One thing on one host.

    Attributes:
        version: exact, as its package manager writes it; empty when nothing is installed.
        package: what is asked for, e.g. ``torch==2.13.0+cpu`` or ``openmpi-bin``.
        source: where it comes from; ``host`` means that it is there already.
        index: an extra package index it comes from, or None for the host's own.
        sha256: of the file, where we make or know it.
        why: the reasons, in sentences.
    """

    version: str
    package: str
    source: Source
    why: tuple[str, ...]
    rejected: tuple[Rejected, ...] = ()
    index: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Network:
    """The address at which the other hosts reach this one for MPI, and the interface that carries it."""

    interface: str
    address: str
    cidr: str
    why: str


@dataclass(frozen=True)
class HostPlan:
    """Everything that one host gets. ``None`` stands for "not on this host"."""

    name: str
    hostname: str
    prefix: str
    slots: int
    family: str
    login: str
    ssh_port: int
    ssh_host_keys: tuple[str, ...]
    network: Network
    packages: tuple[str, ...]
    python: Component
    openmpi: Component
    cmake: Component
    engine: Component
    mpi4py: Component
    numpy: Component
    torch: Component | None = None
    nccl: Component | None = None
    hwloc: Component | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostPlan:
        """A host's plan back from JSON, as its manifest holds it. Raises KeyError or TypeError when it is not one."""

        def component(entry: Mapping[str, Any] | None) -> Component | None:
            if entry is None:
                return None
            rejected = tuple(Rejected(**lost) for lost in entry["rejected"])
            return Component(**{**entry, "why": tuple(entry["why"]), "rejected": rejected})

        values = dict(data)
        for name in ("python", "openmpi", "cmake", "engine", "mpi4py", "numpy", "torch", "nccl", "hwloc"):
            values[name] = component(values[name])
        values["network"] = Network(**values["network"])
        values["packages"], values["ssh_host_keys"] = tuple(values["packages"]), tuple(values["ssh_host_keys"])
        return cls(**values)

    @property
    def mpirun(self) -> str:
        """The mpirun of this plan: in the prefix, or the distribution's."""
        return "/usr/bin/mpirun" if self.openmpi.source == "distribution" else f"{self.prefix}/venv/bin/mpirun"


@dataclass(frozen=True)
class Conflict:
    """Why no plan fits: the host that blocks, the constraint, and the cheapest ways out."""

    host: str
    constraint: str
    ways_out: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The whole inventory's plan. With ``conflicts`` nothing may be installed; ``notes`` are worth reading but block nothing."""

    hosts: dict[str, HostPlan] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: ``{"schema": 1, "hosts": {NAME: {...}}, "conflicts": [...], "notes": [...]}``."""
        return {"schema": SCHEMA, **asdict(self)}
