"""The facts of one host that provision reads, as the survey prints them or a person writes them, with a default for each unknown value.
Other facts are kept and not checked.

A host's answer is not trusted: texts that get into commands, names of files or settings of other hosts have a strict form here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from provision.base.validation import Form, did_you_mean
from provision.base.versions import VERSION, key
from provision.catalog import OURS, Catalog
from provision.catalog.models import GFX
from provision.plan.manifest import UNREADABLE, Manifest
from provision.plan.model import HostPlan

OFFERS = ("candidates", "candidates_elsewhere")
_Subject = Annotated[str, Field(max_length=4096)]


def _like(good: Callable[[Any], bool], what: str) -> AfterValidator:
    def check(value: object) -> object:
        if not good(value):
            raise PydanticCustomError("form", "must be {what}", {"what": what})
        return value

    return AfterValidator(check)


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_interface(value)
    except ValueError:
        return False
    return True


def _is_version(value: str) -> bool:
    return bool(re.fullmatch(VERSION, value))


Version = Annotated[str, Form(VERSION, 'a version in quotes, such as "3.11.2"')]
# Words get into names of files, here and on hosts, and into other hosts' settings; os-release and uname have nothing else.
Word = Annotated[str, Form(r"\w[\w.+~:-]*", "a word of letters, digits and . _ + ~ : -")]
WordOrNothing = Annotated[str, Form(r"(\w[\w.+~:-]*)?", "a word of letters, digits and . _ + ~ : -")]
# A release name of several words, such as "blue onyx", is not the codename of a repository.
Codename = Annotated[Word | None, BeforeValidator(lambda value: None if isinstance(value, str) and " " in value else value)]
Login = Annotated[str, Form(r"[^\W-][\w.@$\\+-]*", "a login name")]  # it stands in other hosts' ssh configuration
Hostname = Annotated[str, Form(r"(\w[\w.:-]*)?", "a host name")]
Cuda = Annotated[str, Form(r"\d+\.\d+", 'a version, such as "12.2"')]  # `12` alone would be read as 12.0
Capability = Annotated[str, BeforeValidator(lambda read: str(read) if isinstance(read, float) else read), Form(r"\d+\.\d+", 'like "8.0"')]
PciId = Annotated[str, Form(r"[0-9a-f]{4}", 'a PCI device id, such as "2330"')]
GfxTarget = Annotated[str, Form(GFX, 'a target of AMD, such as "gfx942"')]
Address = Annotated[str, _like(_is_address, 'an address, such as "10.0.0.1/24"')]
Port = Annotated[int, _like(lambda value: 0 < value < 65536, "a port, a number from 1 to 65535")]
Number = int | Annotated[float, Field(allow_inf_nan=False)]
Limit = int | Literal["unlimited"]


# For mappings: null is an unknown value.
Known = BeforeValidator(lambda read: {name: each for name, each in read.items() if each is not None} if isinstance(read, dict) else read)


class Section(BaseModel):
    """A part of the facts. A null is an unknown value, and becomes the default."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_unknown(cls, stated: Any) -> Any:
        if not isinstance(stated, dict):
            return stated
        return {key: value for key, value in stated.items() if value is not None or key not in cls.model_fields}


def _catalog(info: ValidationInfo) -> Catalog:
    """What facts are completed by: the context of their validation."""
    return info.context if isinstance(info.context, Catalog) else OURS


class System(Section):
    """The distribution; ``family`` is debian, rhel or other, whose packages are not managed; ``kernel``: the release of the running one;
    ``nix_ld``: NixOS has a loader for programs from elsewhere."""

    id: Word
    version: WordOrNothing
    codename: Codename = None
    name: str | None = None
    id_like: list[str] = []
    family: WordOrNothing = ""
    libc: Version | None = None
    kernel: str | None = None
    nix_ld: bool = False

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> System:
        known, alike = _catalog(info).os(), {self.id, *self.id_like}
        entry = known.distribution(self.id)
        guess = "debian" if alike & {"debian", "ubuntu"} else "rhel" if alike & {"rhel", "fedora", "centos"} else "other"
        family = self.family or (entry.family if entry else guess)
        if entry and self.version and not _is_version(self.version):  # versions of unknown distributions are not compared
            raise ValueError('`version` must be a version, such as "22.04"')
        managed = known.others.managed_libc.get(family, "0")
        if (entry and self.version and key(self.version) < key(entry.oldest)) or (self.libc and key(self.libc) < key(managed)):
            family = "other"
        return self.model_copy(update={"family": family, "codename": self.codename or (entry and entry.codenames.get(self.version))})

    def no_wheels(self, catalog: Catalog) -> str | None:
        """Why wheels do not run there, as a sentence; None where they do."""
        return catalog.os().others.fault(self.id, self.libc, nix_ld=self.nix_ld) if self.family == "other" else None


class Processors(Section):
    """``cores``: what this login may use."""

    model: str | None = None
    cores: int | None = None
    flags: list[str] = []


class Memory(Section):
    """What the host, or a control group, has."""

    total_mb: Number | None = None


class FileSystem(Section):
    """The file system that a place is on, or would be."""

    path: str | None = None
    free_mb: Number | None = None
    total_mb: Number | None = None
    free_inodes: int | None = None
    filesystem: str | None = None
    read_only: bool = False
    noexec: bool = False
    writable: bool | None = None


class Disk(Section):
    """``prefix``: where everything is installed; ``shm``: shared memory."""

    prefix: FileSystem = FileSystem()
    home: FileSystem = FileSystem()
    tmp: FileSystem = FileSystem()
    shm: FileSystem = FileSystem()


class User(Section):
    """The login user. ``sudo``: root, nopasswd, password, none, unwanted or unmanaged; ``can_become``: it can become root."""

    name: Login | None = None
    home: str | None = None
    sudo: str | None = None
    sudo_says: str | None = None
    sudo_installed: bool | None = None
    can_become: bool = True

    @model_validator(mode="before")
    @classmethod
    def _escalation(cls, stated: Any) -> Any:
        if isinstance(stated, dict) and stated.get("can_become") is None:
            return {**stated, "can_become": stated.get("sudo") != "none"}
        return stated


class Limits(Section):
    """Of one resource of the login."""

    soft: Limit | None = None
    hard: Limit | None = None


class Environment(Section):
    """Of a command over ssh; ``variables``: those of MPI, NCCL and the engine."""

    variables: dict[str, str] = {}


class Security(Section):
    """Firewalls; Secure Boot, which loads signed kernel modules only, and whether the firmware knows the key that DKMS signs with."""

    firewalld: bool | None = None
    ufw: bool | None = None
    secure_boot: bool | None = None
    dkms_key_enrolled: bool | None = None


class Clock(Section):
    """``epoch``: seconds since 1970, when the survey ended."""

    epoch: Number | None = None


class Interpreter(Section):
    """A Python other than the one that the survey ran on."""

    path: str | None = None
    version: Version | None = None


class Python(Section):
    """The Python that the survey ran on; ``asked_for``: the one that the inventory names; ``environment``: ``conda`` or ``venv`` if it
    belongs to one."""

    executable: str | None = None
    version: Version | None = None
    environment: str | None = None
    others: list[Interpreter] = []
    asked_for: Interpreter | None = None


class Pip(Section):
    """Wheels in the local folders that the host's pip is set up for."""

    torch_wheels: list[str] = []


class PackageLock(Section):
    """The process that holds the package manager's lock; without ``pid`` it cannot be seen."""

    pid: int | None = None
    command: str | None = None


class PackageManager(Section):
    """``name``: apt, dnf, yum or none."""

    name: str | None = None
    lock: PackageLock | None = None


class Driver(Section):
    """NVIDIA's driver; ``cuda``: the newest that it runs natively."""

    version: Annotated[str, Form(r"\d+(\.\d+)*", 'a version, such as "535.104.05"')] | None = None
    cuda: Cuda | None = None
    kernel_module: str | None = None
    open: bool | None = None

    @model_validator(mode="after")
    def _known(self) -> Driver:
        if self.version is None and self.cuda is None:
            raise ValueError('it needs a `version`, such as "535.104.05", or a `cuda`, such as "12.2"')
        return self


class Gpu(Section):
    """One GPU as the driver lists it; the words are nvidia-smi's, absent where the driver or the GPU does not have the feature.

    ``simulated``: that of a sandbox, where nothing can run on it, as what answers for it says.
    """

    name: str | None = None
    compute_capability: Capability | None = None
    mig: str | None = None
    mig_instances: int = 0
    virtualization: str | None = None
    license: str | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    fabric_cluster: str | None = None
    simulated: bool = False


class Nvidia(Section):
    """Signs of NVIDIA's hardware and software besides the driver, such as what nvidia-smi complained about.

    ``pci_devices``: addresses of GPUs, ``pci_ids``: their device ids without duplicates, ``pci_switches``: number of NVSwitches;
    ``pci_subsystems``: vendor and device of their subsystems; ``runfile``: the driver is from NVIDIA's installer, not from packages;
    ``module_on_disk``: the version of a kernel module that is not loaded, ``open_on_disk``: whether it is the open one; ``fabric_manager``:
    whether it runs, None if that is unknown.
    """

    smi: str | None = None
    smi_error: str | None = None
    pci_devices: list[str] = []
    pci_ids: list[PciId] = []
    pci_subsystems: list[str] = []
    pci_switches: int = 0
    runfile: bool = False
    module_on_disk: Version | None = None
    open_on_disk: bool | None = None
    device_nodes: list[str] = []
    nouveau: bool = False
    peer_memory: bool = False
    fabric_manager: bool | None = None
    imex: bool | None = None
    imex_channels: bool | None = None


class AmdGpu(Section):
    """A GPU of AMD, or a partition of one: what code for it is compiled for (None for an invalid number), and its place on the PCI bus."""

    target: GfxTarget | None = None
    address: str | None = None
    simulated: bool = False


class Amd(Section):
    """AMD's kernel driver.

    Attributes:
        driver: its version; None for the kernel's own, which has none.
        gpus: what it lists for computing.
        usable: whether the login user may open /dev/kfd.
        rocm: the ROCm in /opt/rocm, which PyTorch's wheels do not use.
    """

    driver: Version | None = None
    gpus: Annotated[list[AmdGpu], Field(max_length=256)] = []
    usable: bool = True
    rocm: Version | None = None


class PciDevice(Section):
    """A display controller or processing accelerator that is not NVIDIA's."""

    address: str | None = None
    vendor: PciId
    device: PciId
    pci_class: PciId
    memory_mb: int | None = None


class Accelerators(Section):
    """``nodes``: device files through which accelerators of other vendors are used."""

    devices: list[PciDevice] = []
    nodes: list[str] = []


class Tegra(Section):
    """A Jetson board; ``release``: of Jetson Linux."""

    release: Version | None = None


class Program(Section):
    """A program on the search path."""

    path: str | None = None
    version: str | None = None


class Toolkit(Section):
    """A CUDA toolkit; ``path``: its folder, with ``bin/nvcc`` if it has a compiler; ``version``: its CUDA; ``found``: how it was found. In
    hand-written facts it is the usual one with a compiler."""

    path: str = "/usr/local/cuda"
    version: Version | None = None
    nvcc: bool = True
    found: str = "its facts name it"


class CudaToolkits(Section):
    """``nvcc``: the one on the search path."""

    toolkits: list[Toolkit] = []
    nvcc: Program | None = None


class NcclLibrary(Section):
    """A libnccl.so, and what it says of itself."""

    path: str | None = None
    version: str | None = None
    cuda: str | None = None
    error: str | None = None


class Nccl(Section):
    """Installed NCCL libraries."""

    libraries: list[NcclLibrary] = []


class MpiRun(Section):
    """An mpirun; ``flavour``: openmpi, mpich, intel, prrte or unknown."""

    path: str = ""
    flavour: str | None = None
    version: str | None = None
    error: str | None = None
    on_path: bool = False


class Mpi(Section):
    """``first`` and ``orted``: the ones on the search path."""

    found: list[MpiRun] = []
    first: str | None = None
    orted: str | None = None


class HwlocLibrary(Section):
    """A libhwloc.so; ``file``: what its links lead to."""

    path: str | None = None
    file: str | None = None


class Hwloc(Section):
    """Installed hwloc libraries."""

    libraries: list[HwlocLibrary] = []


class Linker(Section):
    """The dynamic linker's cache: library → paths, in its order."""

    cache: dict[str, list[str]] = {}


class Interface(Section):
    """A network interface; ``speed`` in Mbit/s; ``device``: whether it is hardware, or a virtual machine's."""

    name: str
    addresses: list[Address] = []
    mtu: int | None = None
    up: bool = True
    loopback: bool = False
    virtual: bool = False
    kind: str | None = None
    speed: Number | None = None
    device: bool = False

    @property
    def mbps(self) -> int:
        """Its speed; one that does not say it, as a virtual machine's, counts as 10 Gb/s, and a wireless one as none."""
        return int(self.speed or 10_000 * (self.kind != "wireless"))

    @property
    def ipv4(self) -> list[str]:
        """Its IPv4 addresses with their prefix lengths."""
        return [cidr for cidr in self.addresses if ":" not in cidr]


class SshConnection(Section):
    """How the other hosts reach this one: as the survey has, or in the faster network of `survey/links.py`."""

    # It gets into commands on other hosts. sshd says UNKNOWN, or a path, of a connection that is none of IP.
    server_address: Annotated[Address | None, BeforeValidator(lambda said: said if _is_address(said) else None)] = None
    server_port: Annotated[Port | None, BeforeValidator(lambda port: port or None)] = None  # 0 for a connection that is none of IP
    interface: str | None = None


class NetworkFacts(Section):
    """The host's networks; ``asked_for``: the interface that the inventory names; ``instead_of``: the one that carried the survey, where
    another was chosen; ``unreached``: networks (CIDR) in which hosts did not reach each other."""

    interfaces: list[Interface] = []
    default_route_interface: str | None = None
    ssh_connection: SshConnection = SshConnection()
    asked_for: str | None = None
    instead_of: str | None = None
    unreached: list[str] = []

    @property
    def picked(self) -> Interface | None:
        """The interface that MPI would use (`resolve/network.py`): the requested one, that of the connection, that of the default route."""
        wanted = self.asked_for or self.ssh_connection.interface or self.default_route_interface
        return next((each for each in self.interfaces if each.name == wanted), None)


class InfinibandPort(Section):
    """A port of an InfiniBand, Omni-Path, RoCE or EFA device; ``rate``: as the kernel says it, such as ``100 Gb/sec (4X EDR)``;
    ``roce_v2_gids``: the indexes of its RoCE v2 addresses, None if unknown; ``interfaces``: the device's network interfaces."""

    device: str | None = None
    port: int | None = None
    state: str | None = None
    link_layer: str | None = None
    vendor: str | None = None
    rate: str | None = None
    roce_v2_gids: list[int] | None = None
    interfaces: list[str] = []


class Signs(Section):
    """Evidence of known errors."""

    kernel_log: list[str] = []
    modes: dict[str, str] = {}
    listening: list[int] = []
    nccl_conf: dict[str, str] = {}
    mca_params: dict[str, str] = {}


class FileMode(Section):
    """A file's owner and its mode in octal digits."""

    path: str
    mode: str
    uid: int


class Ssh(Section):
    """ssh, as server and client; ``mesh_key``: the public key by which this host reaches the others."""

    ports: list[Port] = []
    client: Program | None = None
    host_keys: list[str] = []
    mesh_key: str | None = None
    files: list[FileMode] = []


class Venv(Section):
    """The environment in the prefix."""

    path: str | None = None
    python_version: str | None = None
    works: bool = False


class SystemPackages(Section):
    """Names of the system packages that earlier runs added, and of those whose version they changed."""

    added: list[str] = []
    replaced: list[str] = []


def noted_files(noted: object) -> dict[str, dict[str, dict[str, str | None]]]:
    """Folder → package → the file that it was installed from (version, url, sha256). Invalid notes are dropped: a host is not trusted."""

    def is_note(file: object) -> bool:
        if not isinstance(file, dict) or not isinstance(file.get("version"), str):
            return False
        return all(isinstance(file.get(key), str | None) for key in ("url", "sha256"))

    folders = noted.items() if isinstance(noted, dict) else ()
    return {folder: {name: file for name, file in files.items() if is_note(file)} for folder, files in folders if isinstance(files, dict)}


_DRIFT = {
    "file-missing": "{subject} is gone",
    "file-changed": "{subject} was changed",
    "file-content": "{subject} has other content",
    "file-size": "{subject} has another size",
    "no-interpreter": "{subject} has no interpreter",
    "settings-added": "{subject} has settings that are not provision's: {found}; it leaves them: remove them there",
    "distribution-missing": "{subject} is gone",
    "library-hidden": "the dynamic linker finds {found} before {subject}",
    "library-not-found": "the dynamic linker does not find {subject}",
    "package-missing": "package {subject} is gone",
    "package-version": "package {subject} is {found}, not {wanted}",
    "package-not-held": "package {subject} is no longer held",
    "locked": "another run holds {subject}, or left it there",
    "manifest-unreadable": UNREADABLE,
    "host-not-in-lock": "{lock} does not know this host",
    "differs-from-lock": "{subject} is {found}, {lock} says {wanted}",
    "differs-in-fields": "{subject} is {found} as in {lock}, but differs from it in: {wanted}",
    "more": "and {subject} more",
}

if TYPE_CHECKING:
    DriftKind = str
else:
    DriftKind = Literal[tuple(_DRIFT)]


class Drift(BaseModel):
    """One difference of a host from what the last run left, or from the lock; as text a sentence.

    Attributes:
        subject: the file, package or component; of ``more`` the number of differences that are left out.
        found: what the host has.
        wanted: what it should have.
        lock: the lock that says so, where one does.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    kind: DriftKind
    subject: _Subject
    found: _Subject = ""
    wanted: _Subject = ""
    lock: str = ""

    def __str__(self) -> str:
        return _DRIFT[self.kind].format(subject=self.subject, found=self.found, wanted=self.wanted, lock=self.lock)


class Installed(Section):
    """The installation in the prefix; ``distrust``: why others could write there; ``manifest_error``: why the manifest cannot be read."""

    prefix: str | None = None
    distrust: str | None = None
    manifest: Manifest | None = None
    manifest_error: Annotated[Drift, PlainSerializer(str), WithJsonSchema({"type": "string"})] | None = None
    elsewhere: list[str] = []
    venv: Venv = Venv()
    packages: dict[str, str] = {}
    torch_cuda: str | None = None
    files: Annotated[dict[str, dict[str, dict[str, Any]]], BeforeValidator(noted_files)] = {}
    system_packages: SystemPackages = SystemPackages()
    partial_mb: Number = 0
    engine_libraries: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _read_manifest(cls, stated: Any) -> Any:
        if not isinstance(stated, dict):
            return stated
        unreadable = Drift(kind="manifest-unreadable", subject="manifest.json")  # ours, not the host's own words
        if stated.get("manifest") is None:
            return {**stated, "manifest_error": unreadable if stated.get("manifest_error") else None}
        try:
            return {**stated, "manifest": Manifest.model_validate(stated["manifest"])}
        except ValidationError:
            return {**stated, "manifest": None, "manifest_error": unreadable}

    @property
    def was_completed(self) -> bool:
        """Whether a run has completed an installation in the prefix."""
        return self.manifest is not None or self.manifest_error is not None

    @property
    def plan(self) -> HostPlan | None:
        """What the last complete run has installed."""
        return self.manifest.host if self.manifest else None


@lru_cache(1000)
def _meant(name: str, unused: frozenset[str]) -> str:
    return did_you_mean(name, unused, cutoff=0.75)


class Facts(Section):
    """The facts of one host.

    ``missing`` names the unknown facts, which have their defaults; ``errors``: facts that could not be collected, and why.
    ``drift``: differences from what the last run left; None where no run was completed. ``candidates``: package → versions that the package
    manager offers, ``candidates_elsewhere``: those of third-party repositories.
    """

    hostname: Hostname | None = None
    hosts_file: list[str] = []
    machine_id: str | None = None
    boot_id: str | None = None
    container: str | None = None
    os: System
    arch: Annotated[WordOrNothing, AfterValidator(lambda name, info: _catalog(info).os().kernel_name(name))]
    cpu: Processors = Processors()
    memory: Memory = Memory()
    disk: Disk = Disk()
    user: User = User()
    limits: Annotated[dict[str, Limits], Known] = {}
    environment: Environment = Environment()
    security: Security = Security()
    time: Clock = Clock()
    python: Python = Python()
    pip: Pip = Pip()
    package_manager: PackageManager = PackageManager()
    packages: Annotated[dict[str, Version], Known] = {}
    held_packages: list[str] = []
    broken_packages: list[str] = []
    dpkg_interrupted: bool = False
    candidates: dict[str, list[str]] = {}
    candidates_elsewhere: dict[str, list[str]] = {}
    driver: Driver | None = None
    gpus: list[Gpu] = []
    nvidia: Nvidia = Nvidia()
    accelerators: Accelerators = Accelerators()
    amd: Amd | None = None
    tegra: Tegra | None = None
    efa_plugin: str | None = None
    cuda: CudaToolkits = CudaToolkits()
    nccl: Nccl = Nccl()
    mpi: Mpi = Mpi()
    hwloc: Hwloc = Hwloc()
    linker: Linker = Linker()
    cmake: Program | None = None
    compiler: Program | None = None
    make: Program | None = None
    network: NetworkFacts = NetworkFacts()
    infiniband: list[InfinibandPort] = []
    signs: Signs = Signs()
    ssh: Ssh = Ssh()
    drift: list[Drift] | None = None
    installed: Installed = Installed()
    missing: list[str] = []
    errors: dict[str, str] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, stated: Any, validate: ModelWrapValidatorHandler[Facts]) -> Facts:
        if not isinstance(stated, dict):
            return validate(stated)
        facts = validate(stated)
        unused = frozenset(set(cls.model_fields) - facts.model_fields_set)
        for name in facts.model_extra or ():  # unknown names are kept unless they look misspelt
            if meant := _meant(name, unused):
                raise ValueError(f"`{name}` is unknown{meant}")
        offers: dict[str, dict[str, list[str]]] = {}
        errors = dict(facts.errors)
        for name in OFFERS:  # versions get into the playbook and into commands
            stated_offers: dict[str, list[str]] = getattr(facts, name)
            offers[name] = {package: [each for each in versions if _is_version(each)] for package, versions in stated_offers.items()}
            if odd := [f"{package} {each!r}" for package, versions in stated_offers.items() for each in versions if not _is_version(each)]:
                errors[name] = f"not versions of packages: {', '.join(odd)}"
        missing = dict.fromkeys([*facts.missing, *facts._unknown(set(stated))])
        update = {**offers, "errors": errors, "missing": list(missing)}
        if facts.os.family == "other" and facts.user.can_become:  # a system whose packages are not managed: all of it without root
            update["user"] = facts.user.model_copy(update={"can_become": False, "sudo": "unmanaged"})
        return facts.model_copy(update=update)

    def _unknown(self, stated: set[str]) -> list[str]:
        """Facts that are not ``stated``. Drivers and GPUs count as known, because most hosts have none; where there is a driver, its CUDA
        and its GPUs' compute capabilities have to be stated."""
        known = {*stated, "driver", "gpus", "amd", "missing", "errors"}
        unknown = [name for name, field in type(self).model_fields.items() if name not in known and not field.is_required()]
        unknown += ["gpus"] if self.driver and "gpus" not in stated else []
        unknown += ["driver.cuda"] if self.driver and self.driver.cuda is None else []
        return unknown + [f"gpus[{index}].compute_capability" for index, gpu in enumerate(self.gpus) if gpu.compute_capability is None]

    @property
    def simulated(self) -> bool:
        """Whether a GPU of it is a sandbox's. A host that lies so gets a weaker verdict on its training, and nothing else."""
        return any(each.simulated for each in (*self.gpus, *(self.amd.gpus if self.amd else ())))


class Unsurveyed(Section):
    """A host without facts: there is no Python, or it was not reached."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["missing_python"]}, {"required": ["unreachable"]}]})

    missing_python: bool = False
    unreachable: str | None = None
