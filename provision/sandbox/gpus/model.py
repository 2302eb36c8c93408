"""Profiles of GPUs and their faults (``profiles.yaml``, ``faults.yaml``), and what a user asks for: ``h100:8``, ``xid79@node2``."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from provision.base import validation
from provision.base.errors import UsageError
from provision.base.validation import Model, did_you_mean
from provision.base.versions import key
from provision.catalog import OURS
from provision.catalog.models import File, Sourced

FOLDER = Path(__file__).parent
FabricName = Literal["ib", "roce"]
_DRIVER = re.compile(r"\d{1,4}(\.\d{1,5}){0,3}")
_REQUEST = re.compile(r"([\w.-]+)(?::(\d{1,3}))?")
#: What faults need besides features of a profile, in words.
_NEEDS = {
    "several": "several GPUs",
    "nvlink": "NVLinks",
    "fabric": "an NVLink fabric",
    "hosts": "three hosts or more",
    "rdma": "RDMA cards (--fabric)",
    "switches": "NVSwitches on the PCI bus",
}
_FAULT = re.compile(r"([\w.-]+)@([\w.-]+)(?::(\d{1,3}))?")


class NvLinks(Model):
    """``links`` of each GPU at ``mbps`` megabytes a second."""

    links: int
    mbps: int
    version: int


class Switches(Model):
    """NVSwitches on the host's PCI bus, and their PCI device id."""

    count: int
    pci: str


class Profile(Model):
    """A kind of GPU as hosts show it. What is not given it does not have. Units: MiB, watts (default, least, most), MHz (graphics,
    memory), megabytes a second, °C (shut down, slow down).

    Attributes:
        max: GPUs of one host.
        driver: the branch, or for AMD the version, that hosts have unless another is requested.
        features: what faults can need.
        mesh: NVLinks from each GPU to each other one, where they are not all connected alike.
    """

    name: str
    pci: str
    max: int
    clocks: tuple[int, int]
    pcie: int
    features: frozenset[str]
    vendor: Literal["nvidia", "amd"] = "nvidia"
    capability: str = ""
    gfx: str = ""
    units: int = 0
    pci_class: str = Field("0302", alias="class")
    memory_mb: int = 0
    power: tuple[int, int, int] | None = None
    temperatures: tuple[int, int] | None = None
    fan: int | None = None
    driver: str = "580"
    open: bool = True
    nvlink: NvLinks | None = None
    switches: Switches | None = None
    mesh: tuple[str, ...] = ()
    weak: str | None = None
    source: str | None = None


class FabricCard(Model):
    """A network card for RDMA and its one port, as in /sys/class/infiniband."""

    device: str
    vendor: str
    rate: str
    link_layer: str


class Profiles(File, Sourced):
    profiles: dict[str, Profile]
    fabric: dict[FabricName, FabricCard]
    answers: dict[str, dict[str, int | str]]


class Fault(Model):
    """A fault: what it changes of one GPU, of all, or of the host (``host.py``), what the kernel logs, and which findings the doctor
    has of it. ``amd``: hosts with AMD's GPUs can have it, too."""

    what: str
    finds: Annotated[tuple[str, ...], Field(min_length=1)]
    needs: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()
    gpu: dict[str, int | str] = Field(default_factory=dict)
    all: dict[str, int | str] = Field(default_factory=dict)
    host: dict[str, int | str] = Field(default_factory=dict)
    log: tuple[str, ...] = ()
    amd: bool = False


class Faults(File, Sourced):
    faults: dict[str, Fault]


@functools.cache
def profiles() -> Profiles:
    return validation.load(Profiles, FOLDER / "profiles.yaml")


@functools.cache
def faults() -> Mapping[str, Fault]:
    return validation.load(Faults, FOLDER / "faults.yaml").faults


@dataclass(frozen=True)
class Gpus:
    """The GPUs of each host of a sandbox.

    Attributes:
        profile: its name, such as ``h100``.
        count: of each host.
        driver: its version, such as 580.65.06.
        fabric: ``ib``, ``roce``, or empty without RDMA.
    """

    profile: str
    count: int
    driver: str
    fabric: str = ""

    @classmethod
    def requested(cls, text: str, driver: str = "", fabric: str = "") -> Gpus:
        """``h100:8`` (``h100``: as many as a host has), a driver's branch or version, a fabric.

        Raises:
            UsageError: an unknown profile or fabric, more GPUs than such a host has, a driver that does not run them.
        """
        known = profiles().profiles
        found = _REQUEST.fullmatch(text.lower())
        if found is None or found[1] not in known:
            close = did_you_mean(found[1] if found else text, known)
            raise UsageError(
                f"invalid --gpus: expected PROFILE:COUNT, such as h100:8, not `{text}`{close}", hint=f"profiles: {', '.join(known)}"
            )
        name, profile = found[1], known[found[1]]
        count = int(found[2]) if found[2] else profile.max
        if not 1 <= count <= profile.max:
            raise UsageError(f"invalid --gpus: expected 1 to {profile.max} GPUs of {name} in a host, not {count}")
        if fabric and fabric not in get_args(FabricName):
            raise UsageError(f"invalid --fabric: expected ib or roce, not `{fabric}`{did_you_mean(fabric, get_args(FabricName))}")
        return cls(name, count, version_of(driver or profile.driver, profile), fabric)

    @property
    def kind(self) -> Profile:
        return profiles().profiles[self.profile]

    @property
    def features(self) -> frozenset[str]:
        """What faults can need of a host with these GPUs."""
        kind, several = self.kind, self.count > 1
        also = {
            "several": several, "switches": several and kind.switches, "rdma": self.fabric, "pcie": kind.pcie, "power": kind.power,
            "open-only": kind.capability and key(kind.capability) >= key(OURS.driver().modules.open_only_from),
        }  # fmt: skip
        alone = set[str]() if several or "imex" in kind.features else {"nvlink", "fabric"}
        return (kind.features - alone) | {name for name, has in also.items() if has}

    def __str__(self) -> str:
        return f"{self.count} × {self.kind.name}, driver {self.driver}" + (f", {self.fabric}" if self.fabric else "")


def version_of(driver: str, profile: Profile) -> str:
    """The version that a branch stands for: the newest of it that the catalogue knows. Raises UsageError for a driver that is unknown, or
    that does not run such a GPU."""
    if not _DRIVER.fullmatch(driver) or (profile.vendor == "amd" and "." not in driver):
        like = "a branch or version, such as 580 or 580.65.06" if profile.vendor == "nvidia" else f"a version, such as {profile.driver}"
        raise UsageError(f"invalid --driver: expected {like}, not `{driver}`")
    if profile.vendor == "amd":
        return driver
    known = sorted(OURS.cuda().toolkits.of.values(), key=key)
    version = driver if "." in driver else next((each for each in reversed(known) if each.split(".")[0] == driver), "")
    if not version:
        branches = ", ".join(dict.fromkeys(each.split(".")[0] for each in known[-9:]))
        raise UsageError(f"invalid --driver: unknown branch {driver}", hint=f"branches: {branches}; or a whole version")
    if misfit := OURS.driver().gpus.misfit(version, [profile.capability]):
        raise UsageError(f"invalid --driver: {version} does not run {profile.name}: {misfit}")
    return version


@dataclass(frozen=True)
class HostFault:
    """A fault on a host; ``gpu``: the index of the GPU that has it, where it is one GPU's."""

    name: str
    host: str
    gpu: int = 0

    @classmethod
    def requested(cls, text: str, hosts: Sequence[str], gpus: Gpus) -> HostFault:
        """``xid79@node2``, or ``xid79@node2:3`` for its GPU 3.

        Raises:
            UsageError: an unknown fault, host or GPU, or a fault that such hosts cannot have.
        """
        found, known = _FAULT.fullmatch(text), faults()
        if found is None:
            raise UsageError(f"invalid fault: expected FAULT@HOST or FAULT@HOST:GPU, such as xid79@node2, not `{text}`")
        name, host, gpu = found[1], found[2], int(found[3] or 0)
        if name not in known:
            raise UsageError(f"invalid fault: unknown is `{name}`{did_you_mean(name, known)}", hint="`provision sandbox fault` lists them")
        if host not in hosts:
            raise UsageError(f"invalid fault: unknown host `{host}`{did_you_mean(host, hosts)}", hint=f"hosts: {', '.join(hosts)}")
        if gpu >= gpus.count:
            raise UsageError(f"invalid fault: {host} has no GPU {gpu}, only 0 to {gpus.count - 1}")
        if why := refusal(known[name], gpus, len(hosts)):
            raise UsageError(f"invalid fault: {gpus.count} × {gpus.profile} cannot have {name}: {why}")
        return cls(name, host, gpu)

    def __str__(self) -> str:
        return f"{self.name}@{self.host}" + (f":{self.gpu}" if self.gpu else "")


def refusal(fault: Fault, gpus: Gpus, hosts: int) -> str | None:
    """Why such hosts cannot have a fault, as half a sentence; None where they can."""
    features: Collection[str] = gpus.features | ({"hosts"} if hosts > 2 else set())
    if missing := [each for each in fault.needs if each not in features]:
        among = ", which GPUs have among several" if missing[0] in gpus.kind.features else ""
        return f"it needs {_NEEDS.get(missing[0], missing[0])}{among}"
    if found := [each for each in fault.not_with if each in features]:
        return f"it does not happen with {found[0]}"
    return "it is a fault of NVIDIA's GPUs" if gpus.kind.vendor != "nvidia" and not fault.amd else None
