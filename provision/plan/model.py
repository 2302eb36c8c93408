"""The plan: exact versions, sources and reasons for every host, as data. Both renderers (playbook, Dockerfile) only read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

SCHEMA = 1

# wheel: the Python package index · repository: the vendor's apt or dnf repository · local_repository: a package that the user has, which
# brings such a repository along · distribution: its own packages · source: built from a tarball · index, folder, host: see `Component`.
Source = Literal[
    "wheel", "repository", "local_repository", "distribution", "source", "index", "folder", "host", "bundled", "remove", "leave"
]

# The engine's options, by which later runs know what was asked for: Horovod's module names are installed for it, too; no CUDA is used.
HOROVOD_NAMES = "horovod-names"
CPU_ONLY = "cpu-only"

# The fields of HostPlan that are components, in the order in which they are shown.
COMPONENTS = ("hwloc", "python", "openmpi", "cmake", "nccl", "torch", "numpy", "mpi4py", "cloudpickle", "engine")


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost, and why: the cause, which several may share, and its detail, in which they may differ."""

    candidate: str
    cause: str
    detail: str = ""

    @property
    def reason(self) -> str:
        """The whole of it, as people read it."""
        return f"{self.cause} ({self.detail})" if self.detail else self.cause

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rejected:
        """One back from JSON, which holds the whole reason. Raises KeyError or TypeError when it is not one."""
        return cls(data["candidate"], data["reason"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"candidate": self.candidate, "reason": self.reason}


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Builder:
    """A host that can build something from its sources, where not every host can.

    Attributes:
        toolkit: the folder of the CUDA toolkit that it builds with; None where none is needed.
        why: why that one.
    """

    host: str
    toolkit: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Component:
    """One thing on one host.

    Attributes:
        version: exact, as its package manager writes it; empty when nothing is installed.
        package: what is asked for, e.g. ``torch==2.13.0+cpu`` or ``openmpi-bin``; for ``local_repository`` and for a tarball that the user
            gave, the file's name.
        source: where it comes from; ``host`` means that it is there already.
        index: an extra package index it comes from, or None for the host's own.
        url: of the tarball that it is built from; None where the user gave the file.
        file: the name of the wheel of the user's that it comes from, for ``folder``.
        sha256: of the file, where we make or know it.
        cuda: the CUDA that the build is for, e.g. ``12.4``; of Open MPI from source the lowest of the hosts' drivers.
        packages: exact strings for the package manager, e.g. ``libnccl2=2.21.5-1+cuda12.4``; they are held afterwards.
        repository: what the package manager must be told of before.
        options: for ``source``, the words of its configure besides the prefix, e.g. ``--with-cuda``; of NCCL those of make.
        builders: for ``source``, a few hosts that have what a build needs, the best first; empty where all have it.
        why: the reasons, in sentences.
    """

    version: str
    package: str
    source: Source
    why: tuple[str, ...]
    rejected: tuple[Rejected, ...] = ()
    index: str | None = None
    sha256: str | None = None
    cuda: str | None = None
    url: str | None = None
    packages: tuple[str, ...] = ()
    repository: Repository | None = None
    options: tuple[str, ...] = ()
    builders: tuple[Builder, ...] = ()
    file: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Component:
        """A component back from JSON. Raises KeyError or TypeError when it is not one."""
        values = dict(data)
        values["why"], values["rejected"] = tuple(values["why"]), tuple(map(Rejected.from_dict, values["rejected"]))
        for name in ("packages", "options"):
            values[name] = tuple(values.get(name) or ())
        values["builders"] = tuple(Builder(**one) for one in values.get("builders") or ())
        values["repository"] = Repository(**values["repository"]) if values.get("repository") else None
        return cls(**values)


@dataclass(frozen=True)
class Network:
    """The address at which the other hosts reach this one for MPI, and the interface that carries it."""

    interface: str
    address: str
    cidr: str
    why: str


@dataclass(frozen=True)
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
    python: Component
    openmpi: Component
    cmake: Component
    engine: Component
    mpi4py: Component
    numpy: Component
    cloudpickle: Component
    torch: Component | None = None
    nccl: Component | None = None
    hwloc: Component | None = None
    interpreter: str = ""
    root: bool = True

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostPlan:
        """A host's plan back from JSON, as its manifest holds it. Raises KeyError or TypeError when it is not one."""

        values = dict(data)
        for name in COMPONENTS:
            values[name] = Component.from_dict(values[name]) if values[name] is not None else None
        values["network"] = Network(**values["network"])
        values["packages"], values["ssh_host_keys"] = tuple(values["packages"]), tuple(values["ssh_host_keys"])
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the login of an index."""
        made: dict[str, Any] = _plain(self, {})
        return made

    @property
    def openmpi_home(self) -> str:
        """Where this plan's Open MPI is: ``bin``, ``lib`` and ``etc`` are below."""
        return {"distribution": "/usr", "source": f"{self.prefix}/openmpi"}.get(self.openmpi.source, f"{self.prefix}/venv")

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


@dataclass(frozen=True)
class Remedy:
    """What would help against a conflict, as a sentence, and whether it is an option of the command line or a change of the hosts."""

    text: str
    about: Literal["options", "hosts"]


@dataclass(frozen=True)
class Conflict:
    """Why no plan fits: the host that blocks, the constraint, and the cheapest remedies."""

    host: str
    constraint: str
    remedies: tuple[Remedy, ...]

    @property
    def ways_out(self) -> tuple[str, ...]:
        """The remedies as sentences."""
        return tuple(remedy.text for remedy in self.remedies)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"host": self.host, "constraint": self.constraint, "ways_out": list(self.ways_out)}


@dataclass(frozen=True)
class Plan:
    """The whole inventory's plan. With ``conflicts`` nothing may be installed; ``notes`` are worth reading but block nothing."""

    hosts: dict[str, HostPlan] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
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
            "conflicts": [conflict.as_dict() for conflict in self.conflicts],
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
        rest = {"conflicts": [conflict.as_dict() for conflict in self.conflicts], "notes": list(self.notes)}
        yield "},\n" + json.dumps(rest)[1:] + "\n"


def without_credentials(url: str) -> str:
    """``https://user:token@host/simple`` → ``https://host/simple``."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def _plain(value: Any, seen: dict[int, Any], *, logins: bool = False) -> Any:
    """Dataclasses and tuples as mappings and lists. ``seen`` keeps what was made for an object, so that shared ones are made once."""
    if isinstance(value, str) or value is None:
        return value
    if id(value) in seen:
        return seen[id(value)]
    made: Any = value
    if isinstance(value, Rejected):
        made = value.as_dict()
    elif is_dataclass(value):
        made = {each.name: _plain(getattr(value, each.name), seen, logins=logins) for each in fields(value)}
        if isinstance(value, Component) and value.index and not logins:
            made["index"] = without_credentials(value.index)
    elif isinstance(value, tuple):
        made = [_plain(each, seen, logins=logins) for each in value]
    if made is not value:
        seen[id(value)] = made
    return made
