"""Host classes: what decisions depend on, extracted from a host's facts. Hosts that agree in it form one class and are resolved once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TypeVar

from provision.base.problems import Problem
from provision.base.text import grouped, joined
from provision.base.versions import key, minor
from provision.catalog import Catalog
from provision.plan.model import Builder, Rejected, Repository
from provision.survey import Facts, amd, gpus, hardware
from provision.survey.model import Toolkit

T = TypeVar("T")

TOOLKIT_PLACES = "CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda*, /opt/cuda and the distribution's nvidia-cuda-toolkit"
# Folders of environments that are not the system's; a Python of Nix has its own loader, which does not find the libraries that wheels need.
_ENVIRONMENTS = re.compile(
    r"nix|current-system|\.?(ana|mini)?conda\d*|(mini|mamba)forge\d*|micromamba|\.?pyenv|envs|\.?v?env|virtualenvs?", re.IGNORECASE
)
_PRERELEASE = re.compile(r"\d(a|b|rc)\d")  # of a Python, such as Ubuntu 22.04's 3.11.0rc1
_MAX_BUILDERS = 8  # hosts are named for a build: one builds, and the next takes over if it cannot


@dataclass(frozen=True)
class Interpreter:
    """A Python 3 of a host. ``packages`` install it where it is missing; ``why`` is the reason for the host's own; ``from_uv``: uv
    downloads it, to ``path`` below the prefix."""

    version: str
    path: str
    packages: tuple[str, ...] = ()
    why: str = ""
    from_uv: bool = False

    @property
    def minor(self) -> str:
        """``3.11``; empty if its version is unknown."""
        return minor(self.version) if self.version else ""


@dataclass(frozen=True)
class HostClass:
    """The facts that all hosts of a class have in common.

    Attributes:
        os_id, os_version, family: as in the host's facts, e.g. ``ubuntu``, ``22.04``, ``debian``.
        nvidia_system: NVIDIA's name of the system in its repositories, e.g. ``ubuntu2204``; None if it has none.
        arch: ``x86_64`` or ``aarch64``.
        driver: version of the NVIDIA driver, None without one.
        driver_name: what that is called there.
        cuda: the newest CUDA that the driver runs natively; None without a GPU or a driver.
        targets: of AMD's GPUs, without duplicates, if these are used; empty otherwise.
        amdgpu: version of AMD's driver; None without one, and for the kernel's own.
        cuda_why: the evidence for ``cuda``.
        driver_too_old: whether it has GPUs whose driver is too old for every known CUDA.
        toolkits: its CUDA toolkits in the order of preference; None if they are unknown, or without ``cuda``.
        capabilities: the GPUs' compute capabilities without duplicates, lowest first; empty if unknown.
        python: the interpreter for the virtual environment unless another is chosen.
        other_pythons: further ones that are installed, in the distribution, or downloaded by uv.
        offers: package → versions in the host's own package index, newest first.
        third_party_offers: the same for repositories that another user configured on the host.
        torch_wheels: names of wheels in folders from the settings of the host's pip.
        installed_hwloc: installed packages of hwloc with their versions.
        installed_nccl: the same for NCCL, without those that earlier runs installed.
        root: whether steps may run as root; without, nothing is installed outside the prefix.
        missing_build_tools: what a build from source needs of make and a C++ compiler, is missing, and cannot be installed.
        kept_builds: (package, CUDA) of NCCL and PyTorch that earlier runs chose; they are kept where they fit.
        gpu_fault: why its GPUs cannot be used if their driver is missing or does not work.
        libc: the release of its glibc; None where it is not known.
        kept_engine: the sources (SHA-256) of the engine that it holds unchanged, and the wheel that it came from; None: it was compiled.
        no_wheels: why wheels do not run on its system, where that is not one of the known families or too old.
        obstacle: why its accelerators cannot be used: another vendor's, a Jetson's, partitioned ones, AMD's without a working driver.
        catalog: by which it was made; the same for all classes of a plan.
    """

    os_id: str
    os_version: str
    family: str
    arch: str
    nvidia_system: str | None
    driver: str | None
    cuda: str | None
    cuda_why: str
    driver_too_old: bool
    toolkits: tuple[Toolkit, ...] | None
    capabilities: tuple[str, ...]
    python: Interpreter
    other_pythons: tuple[Interpreter, ...]
    offers: tuple[tuple[str, tuple[str, ...]], ...]
    third_party_offers: tuple[tuple[str, tuple[str, ...]], ...]
    torch_wheels: tuple[str, ...]
    installed_hwloc: tuple[tuple[str, str], ...]
    installed_nccl: tuple[tuple[str, str], ...]
    root: bool
    missing_build_tools: tuple[str, ...]
    kept_builds: tuple[tuple[str, str | None], ...]
    gpu_fault: Problem | None
    obstacle: Problem | None
    catalog: Catalog
    libc: str | None = None
    no_wheels: str | None = None
    targets: tuple[str, ...] = ()
    amdgpu: str | None = None
    kept_engine: tuple[str | None, str | None] = (None, None)
    driver_name: str = "the NVIDIA driver"

    @property
    def uses_gpus(self) -> bool:
        """Whether programs compute on its GPUs."""
        return self.cuda is not None or bool(self.targets)

    @property
    def system(self) -> str:
        """``ubuntu 22.04``"""
        return f"{self.os_id} {self.os_version}"

    @property
    def build_platform(self) -> tuple[str, str, bool]:
        """Classes that agree in it can share builds. What was built without root is not installed where root would install it."""
        return self.system, self.arch, self.root

    def offered(self, package: str) -> tuple[str, ...]:
        """The versions of a package in the host's own package index, newest first; empty if the index is unknown."""
        return dict(self.offers).get(package, ())

    def lacks_libc(self, oldest: str) -> bool:
        """Whether wheels that need this glibc or a newer one do not run there."""
        return self.libc is not None and key(self.libc) < key(oldest)

    def gpus_without_code(self, compiled: Iterable[str]) -> list[str]:
        """The compute capabilities of its GPUs that cannot run code compiled for these.

        Machine code runs on GPUs of the same major and no older minor, PTX (``9.0+PTX``) on all newer ones.
        """
        targets = list(compiled)

        def runs(capability: str) -> bool:
            gpu = key(capability)
            return any(key(each) <= gpu and (key(each)[0] == gpu[0] or each.endswith("+PTX")) for each in targets)

        return [capability for capability in self.capabilities if not runs(capability)]

    def runs_natively(self, cuda: str) -> bool:
        """Whether its driver is for this CUDA or a newer one."""
        return self.cuda is not None and key(cuda) <= key(self.cuda)

    def runs(self, cuda: str) -> bool:
        """Whether its driver runs machine code that was built for this CUDA: natively, or by minor-version compatibility."""
        if self.cuda is None or self.runs_natively(cuda):
            return self.cuda is not None
        oldest = self.catalog.cuda().minor_compatibility.of.get(cuda.split(".")[0])
        same_major = key(cuda)[0] == key(self.cuda)[0]
        return same_major and oldest is not None and (self.driver is None or key(self.driver) >= key(oldest))

    @property
    def driver_misfit(self) -> str | None:
        """Why its driver does not support its GPUs, as a sentence; None if it does, or if nothing is known of one of them."""
        drivers = self.catalog.cuda().toolkits.of
        driver = self.driver or drivers.get(self.cuda or "")
        if driver is None:
            return None
        # In WSL the driver is Windows', whose numbers in branch 580 are 580 to 582.
        branches = (each for each in drivers.values() if key(each)[0] <= key(driver)[0])
        return self.catalog.driver().gpus.misfit(max(branches, key=key, default=driver), self.capabilities)

    def of_release(self, table: Mapping[str, T]) -> T | None:
        """The entry of ``22.04`` or, for distributions with point releases, of ``9``; None without one."""
        return table.get(self.os_version, table.get(self.os_version.split(".")[0]))

    def of_system(self, table: Mapping[str, T]) -> T | None:
        """The entry of ``ubuntu 22.04`` or, for distributions with point releases, of ``debian 12``; None without one."""
        return table.get(self.system, table.get(f"{self.os_id} {self.os_version.split('.')[0]}"))


HostClasses = Mapping[HostClass, list[str]]  # with the names of the hosts of each class


def host_class_of(facts: Facts, catalog: Catalog, kept_builds: tuple[tuple[str, str | None], ...] = ()) -> HostClass:
    """The class of a host, from its facts and from the builds that earlier runs chose for it."""
    system = facts.os
    fault = gpus.fault(facts, catalog)
    held = facts.installed.plan.engine if facts.installed.plan and not facts.drift else None
    cuda, cuda_why = _cuda(facts, catalog) if fault is None else (None, fault.what)
    python, other_pythons = _interpreters(facts, catalog)
    root = facts.user.can_become
    known = facts.cuda.toolkits  # without what does not tell classes apart
    toolkits = [Toolkit(path=each.path, version=each.version and minor(each.version), nvcc=each.nvcc, found=each.found) for each in known]
    amd_gpus = [] if gpus.has_gpu(facts, catalog) or amd.hidden_from_container(facts) else amd.gpus(facts, catalog)
    return HostClass(
        os_id=system.id,
        os_version=system.version,
        family=system.family,
        arch=str(facts.arch),
        nvidia_system=_nvidia_system(system.id, system.version, catalog),
        driver=facts.driver.version if facts.driver else None,
        cuda=cuda,
        cuda_why=cuda_why,
        driver_too_old=gpus.has_gpu(facts, catalog) and cuda is None and fault is None and bool(facts.driver and facts.driver.version),
        toolkits=None if cuda is None or (not known and "cuda" in facts.missing) else tuple(toolkits),
        capabilities=tuple(gpus.capabilities(facts, catalog) if gpus.has_gpu(facts, catalog) else ()),
        python=python,
        other_pythons=other_pythons,
        offers=_newest_first(facts.candidates),
        third_party_offers=_newest_first(facts.candidates_elsewhere),
        torch_wheels=tuple(facts.pip.torch_wheels or ()),
        installed_hwloc=tuple(sorted((n, v) for n, v in facts.packages.items() if n in catalog.hwloc().packages)),
        installed_nccl=_installed_nccl(facts, catalog) if cuda is not None else (),
        root=root,
        missing_build_tools=() if root else _missing_build_tools(facts),
        kept_builds=kept_builds,
        gpu_fault=fault,
        obstacle=hardware.obstacle(facts, catalog),
        catalog=catalog,
        libc=system.libc,
        no_wheels=system.no_wheels(catalog),
        targets=tuple(sorted({gpu.target for gpu in amd_gpus if gpu.target})),
        amdgpu=facts.amd.driver if facts.amd and amd_gpus else None,
        kept_engine=(held.sha256, held.file) if held else (None, None),
        driver_name="Windows' NVIDIA driver" if hardware.wsl(facts) else "the machine's driver" if facts.container else "the NVIDIA driver",
    )


def by_class(class_of: Mapping[str, HostClass]) -> HostClasses:
    """The hosts of each class, by name: common decisions must not depend on the inventory's order."""
    return grouped((class_of[name], name) for name in sorted(class_of))


def _missing_build_tools(facts: Facts) -> tuple[str, ...]:
    tools = {"make": facts.make, "compiler": facts.compiler}
    return tuple(
        "a C++ compiler" if name == "compiler" else name for name, found in tools.items() if found is None and name not in facts.missing
    )


def without_gpus(host_class: HostClass) -> HostClass:
    """The same class if its GPUs are not to be used."""
    has_none = not host_class.uses_gpus and not host_class.driver_too_old and host_class.gpu_fault is None and host_class.obstacle is None
    why = host_class.cuda_why if has_none else "--cpu was requested; --no-cpu reverts it"
    without = replace(host_class, cuda=None, cuda_why=why, driver_too_old=False, gpu_fault=None, obstacle=None, toolkits=None)
    return replace(without, kept_builds=(), installed_nccl=(), targets=(), amdgpu=None)


def with_packaged_pythons(host_class: HostClass) -> HostClass:
    """The same class with the Pythons of its distribution's packages alone: the host's own, else the default. One that the inventory names
    stays."""
    packaged = host_class.catalog.os().pythons(host_class.os_id, host_class.os_version)
    if not packaged or not host_class.other_pythons:
        return host_class
    pythons = (host_class.python, *host_class.other_pythons)
    fitting = [each for each in pythons if each.minor in packaged and each.path.startswith("/usr/bin/")]
    default = Interpreter(packaged[0], "/usr/bin/python3", why="the distribution's default")
    own, *others = fitting if host_class.python in fitting else (default, *fitting)
    return replace(host_class, python=own, other_pythons=tuple(each for each in others if each.minor != own.minor))


def with_driver_for(host_class: HostClass, cuda: str) -> HostClass:
    """The same class with a working driver, the oldest that runs this CUDA natively."""
    driver = host_class.catalog.cuda().toolkits.of[cuda]
    return replace(host_class, cuda=cuda, driver=driver, driver_too_old=False, gpu_fault=None)


def with_newest_driver(host_class: HostClass) -> HostClass:
    """The same class with the newest working driver that supports its GPUs, else the newest."""
    drivers = host_class.catalog.cuda().toolkits.of
    newest_first = [with_driver_for(host_class, cuda) for cuda in sorted(drivers, key=key, reverse=True)]
    return next((each for each in newest_first if each.driver_misfit is None), newest_first[0])


def builders(sharing: HostClasses, toolkit_of: Callable[[HostClass], tuple[str | None, str] | None]) -> tuple[Builder, ...]:
    """A few of the hosts that share a build and can make it: ``toolkit_of`` returns (folder of the CUDA toolkit, why), or None if a class
    cannot build."""
    found = [Builder(name, *how) for each, names in sharing.items() if (how := toolkit_of(each)) for name in names[:_MAX_BUILDERS]]
    return tuple(sorted(found, key=lambda each: each.host)[:_MAX_BUILDERS])


def nvidia_repository(host_class: HostClass) -> Repository | Rejected:
    """NVIDIA's package repository with its key's checksum, or why there is none. None is trusted without a known checksum."""
    known = host_class.catalog.cuda_repositories()
    candidate = "NVIDIA's package repository"
    system, arch = host_class.nvidia_system, known.architectures.get(host_class.arch)
    if system is None or arch is None:
        return Rejected(candidate, f"NVIDIA has no package repository for {host_class.system} on {host_class.arch}", id="system")
    base = known.base.format(system=system, arch=arch)
    name = f"cuda-{system}-{arch}"
    if host_class.family == "rhel":
        rpm_key = known.rpm.keys.get(system)
        if rpm_key is None or rpm_key.sha256 is None:
            return Rejected(candidate, f"the key of NVIDIA's repository {system} is not known", id="system")
        keyring = known.rpm.keyring
        entry = f"[{name}]\nname={name}\nbaseurl={base}\nenabled=1\ngpgcheck=1\ngpgkey=file://{keyring}\n"
        return Repository("rpm", name, base, entry, f"{base}/{rpm_key.file}", keyring, rpm_key.sha256)
    sha256 = known.apt.sha256.get(system, {}).get(host_class.arch)
    if sha256 is None:
        cause = f"no checksum of the key of NVIDIA's repository {system} for {host_class.arch} is known"
        return Rejected(candidate, cause, id="system")
    keyring = known.apt.keyring
    entry = known.apt.list_line.format(base=base, keyring=keyring)
    return Repository("apt", name, base, entry, known.apt.keyring_deb.format(base=base), keyring, sha256)


def describe_toolkits(able: Iterable[Builder]) -> list[str]:
    """A sentence for each toolkit: ``with the CUDA toolkit at /opt/cuda (on a and b: its nvcc is on the PATH, of CUDA 12.4)``."""
    hosts = grouped(((each.toolkit, each.why), each.host) for each in able if each.toolkit)
    return [f"with the CUDA toolkit at {toolkit} (on {joined(names)}: {why})" for (toolkit, why), names in hosts.items()]


def _installed_nccl(facts: Facts, catalog: Catalog) -> tuple[tuple[str, str], ...]:
    """A package that an earlier run installed does not count, unless another version of it was installed since."""
    repository = catalog.nccl().repository
    names = repository.rpm if facts.os.family == "rhel" else repository.apt
    installed = facts.installed
    ours = {*installed.system_packages.added, *installed.system_packages.replaced}
    pins = installed.plan.nccl_packages.packages if installed.plan and installed.plan.nccl_packages else ()

    def is_ours(name: str, version: str) -> bool:
        return name in ours and (f"{name}={version}" in pins or f"{name}-{version}" in pins)

    found = ((name, version.rpartition(":")[2]) for name, version in facts.packages.items() if name in names)
    return tuple(sorted((name, version) for name, version in found if not is_ours(name, version)))


def _newest_first(offers: Mapping[str, list[str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(sorted(set(versions), key=key, reverse=True))) for name, versions in sorted(offers.items()))


def _cuda(facts: Facts, catalog: Catalog) -> tuple[str | None, str]:
    """(the newest CUDA that the driver runs natively, evidence)"""
    driver = facts.driver
    if driver is None or not gpus.has_gpu(facts, catalog):
        hidden = gpus.hidden_from_container(facts, catalog) or (amd.on_bus(facts, catalog) and amd.hidden_from_container(facts))
        none = "it has no NVIDIA GPU" if amd.gpus(facts, catalog) else "it has no GPU of NVIDIA or AMD"
        return None, "its container was given none of the machine's GPUs" if hidden else none
    if driver.cuda:
        return str(driver.cuda), f"the driver's CUDA is {driver.cuda}"
    if driver.version:
        cuda = catalog.cuda().toolkits.of_branch(driver.version)
        if cuda is None:
            return None, f"driver {driver.version} is older than every CUDA in NVIDIA's table"
        return cuda, f"driver {driver.version} runs CUDA {cuda} by NVIDIA's table"
    return None, "neither version nor CUDA of its driver is known"


def _normal(version: str) -> str:
    return ".".join(map(str, key(version)))


def _of_the_user(path: str, home: str | None) -> bool:
    """Whether a Python is below a home, or in an environment of conda, venv or pyenv: what its owner does with it would change ours."""
    folders = PurePosixPath(path).parts[1:-1]
    below = [each.rstrip("/") for each in (home or "", "/home", "/root") if each.rstrip("/")]
    return any(path.startswith(each + "/") for each in below) or any(_ENVIRONMENTS.fullmatch(folder) for folder in folders)


def _nvidia_system(os_id: str, version: str, catalog: Catalog) -> str | None:
    template = catalog.cuda_repositories().systems.get(os_id) or catalog.cuda_repositories().systems.get(catalog.os().id_of(os_id))
    return template.format(version=version.replace(".", ""), major=version.split(".")[0]) if template else None


def _interpreters(facts: Facts, catalog: Catalog) -> tuple[Interpreter, tuple[Interpreter, ...]]:
    """(the host's own interpreter, others that are installed or can be installed: by the distribution, else by uv)"""
    python, system = facts.python, facts.os
    named = python.asked_for
    if named and named.version:  # named in the inventory: no other is considered
        return Interpreter(_normal(named.version), named.path or "", why="requested in the inventory"), ()
    packaged = catalog.os().pythons(system.id, system.version)
    found = [
        Interpreter(each.version, each.path or "")
        for each in python.others
        if each.version and not _PRERELEASE.search(each.version) and not _of_the_user(each.path or "", facts.user.home)
    ]
    version, path = python.version or (packaged[0] if packaged else None), python.executable or "/usr/bin/python3"
    of_user = python.environment or _of_the_user(path, facts.user.home)
    if of_user or _PRERELEASE.search(python.version or ""):
        why = f"not {path}, which " + ("belongs to a user or an environment" if of_user else f"is a pre-release ({python.version})")
        default = next((each for each in found if each.minor in packaged[:1]), max(found, key=lambda each: key(each.version), default=None))
        if default is None and packaged and facts.user.can_become:
            default = Interpreter(packaged[0], "/usr/bin/python3", ("python3",))
        own = replace(default, why=why) if default else Interpreter("", "", why=why)
    else:
        why = "the host's own, as its facts say" if python.version else "the distribution's default, since its facts name none"
        own = Interpreter(_normal(version) if version else "", path, why=why)
    if facts.user.can_become:
        found += [
            Interpreter(each, f"/usr/bin/python{each}", (f"python{each}",))
            for each in packaged[1:]
            if not facts.candidates or f"python{each}" in facts.candidates
        ]
    found += [
        Interpreter(exact, f"python/cpython-{exact}-linux-{facts.arch}-gnu/bin/python{each}", from_uv=True)
        for each, exact in catalog.python_packages().uv.pythons.items()
    ]
    others: dict[str, Interpreter] = {}
    for each in found:
        others.setdefault(each.minor, each)
    others.pop(own.minor, None)
    return own, tuple(others.values())
