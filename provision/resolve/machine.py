"""What the choices depend on, out of a host's facts. Hosts that agree in it get the same, and are decided once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from provision import catalog
from provision.base.versions import key, minor
from provision.facts import Facts, gpus

USUAL_TOOLKIT = "/usr/local/cuda"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit of a host.

    Attributes:
        path: its folder, e.g. ``/usr/local/cuda-12.4``; ``bin/nvcc`` and ``include/cuda.h`` are below.
        version: its CUDA, e.g. ``12.4``; None where it does not say.
        compiler, headers: whether nvcc and cuda.h are there.
        found: how it is known.
    """

    path: str
    version: str | None
    compiler: bool = True
    headers: bool = True
    found: str = ""


@dataclass(frozen=True)
class Interpreter:
    """A Python 3 of a host. ``packages`` bring it where it is not installed; ``why`` says what speaks for it, of the host's own."""

    version: str
    path: str
    packages: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Machine:
    """One kind of host.

    Attributes:
        os_id, os_version, family: as the host says, e.g. ``ubuntu``, ``22.04``, ``debian``.
        repository: what NVIDIA calls the system in its repositories, e.g. ``ubuntu2204``; None where there is none.
        arch: ``x86_64`` or ``aarch64``.
        driver: version of the NVIDIA driver, None without one.
        cuda: the newest CUDA that the driver runs natively; None without a GPU or a driver.
        cuda_why: where ``cuda`` is known from.
        too_old: whether there are GPUs whose driver is too old for every CUDA that is known.
        own_nccl: its installed packages of NCCL with their versions, without those that earlier runs put there.
        gpu_fault: why its GPUs cannot be used, where their driver is missing or does not work.
        toolkits: its CUDA toolkits, those first that were set up on purpose; None where that is not known or, without ``cuda``, not asked.
        capabilities: the GPUs' compute capabilities, each once, lowest first; empty when they are not known.
        python: the interpreter that everything is made with unless another is chosen.
        others: further ones that are installed or that the distribution has.
        candidates: package → versions that the host's own package index offers, newest first.
        elsewhere: the same of repositories that the host knows without us.
        torch_wheels: names of wheels in folders that the host's pip knows.
        hwloc: installed packages of hwloc with their versions.
        root: whether things may be done as root there; without, nothing is installed but into the prefix.
        make: whether the program make is there or can be installed.
        builds: (package, CUDA) of NCCL and PyTorch that earlier runs took; they are kept where they fit.
    """

    os_id: str
    os_version: str
    family: str
    arch: str
    repository: str | None
    driver: str | None
    cuda: str | None
    cuda_why: str
    too_old: bool
    toolkits: tuple[Toolkit, ...] | None
    capabilities: tuple[str, ...]
    python: Interpreter
    others: tuple[Interpreter, ...]
    candidates: tuple[tuple[str, tuple[str, ...]], ...]
    torch_wheels: tuple[str, ...]
    hwloc: tuple[tuple[str, str], ...]
    root: bool = True
    make: bool = True
    builds: tuple[tuple[str, str | None], ...] = ()
    elsewhere: tuple[tuple[str, tuple[str, ...]], ...] = ()
    gpu_fault: gpus.Fault | None = None
    own_nccl: tuple[tuple[str, str], ...] = ()

    @property
    def system(self) -> str:
        """``ubuntu 22.04``"""
        return f"{self.os_id} {self.os_version}"

    def offered(self, package: str) -> tuple[str, ...]:
        """The versions of a package that the host's own package index offers, newest first; empty when it was not or could not be asked."""
        return dict(self.candidates).get(package, ())

    def knows(self, package: str, version: str) -> bool:
        """Whether a repository that the host knows without us has it."""
        return version in dict(self.elsewhere).get(package, ())

    def without_code(self, compiled: Iterable[str]) -> list[str]:
        """The compute capabilities of its GPUs that cannot run what was compiled for these.

        Machine code runs on GPUs of its major and no older minor, PTX (``9.0+PTX``) on all newer ones.
        """
        there = list(compiled)

        def runs(capability: str) -> bool:
            gpu = key(capability)
            return any(key(each) <= gpu and (key(each)[0] == gpu[0] or each.endswith("+PTX")) for each in there)

        return [capability for capability in self.capabilities if not runs(capability)]

    def of_system(self, table: Mapping[str, Any]) -> Any:
        """The entry of ``ubuntu 22.04`` or, where point releases do not count, of ``debian 12``; None without one."""
        return table.get(self.system, table.get(f"{self.os_id} {self.os_version.split('.')[0]}"))


def machine(facts: Facts, builds: tuple[tuple[str, str | None], ...] = ()) -> Machine:
    """The kind of host that these facts describe, with what earlier runs took there."""
    system = facts.os
    os_id, version, family, arch = system.id, system.version, system.family, str(facts.arch)
    driver = facts.driver.version if facts.driver else None
    fault = gpus.fault(facts)
    cuda, why = _cuda(facts) if fault is None else (None, fault.what)
    python, others = _interpreters(facts)
    return Machine(
        os_id=os_id,
        os_version=version,
        family=family,
        arch=arch,
        repository=_repository(os_id, version),
        driver=driver,
        cuda=cuda,
        cuda_why=why,
        too_old=gpus.has_gpu(facts) and cuda is None and fault is None and driver is not None,
        toolkits=_toolkits(facts) if cuda is not None else None,
        capabilities=tuple(sorted({gpu.compute_capability for gpu in facts.gpus if gpu.compute_capability}, key=key)),
        python=python,
        others=others,
        candidates=_newest_first(facts.candidates),
        torch_wheels=tuple(facts.pip.torch_wheels or ()),
        hwloc=tuple(sorted((n, v) for n, v in facts.packages.items() if n in catalog.hwloc().packages)),
        root=facts.user.can_become,
        make=facts.user.can_become or facts.make is not None or "make" in facts.missing,
        builds=builds,
        elsewhere=_newest_first(facts.candidates_elsewhere),
        gpu_fault=fault,
        own_nccl=_own_nccl(facts) if cuda is not None else (),
    )


def _own_nccl(facts: Facts) -> tuple[tuple[str, str], ...]:
    """What an earlier run brought counts as ours only as that run left it: a version that somebody put there since does not."""
    nccl = catalog.nccl().repository
    names = nccl.rpm if facts.os.family == "rhel" else nccl.apt
    installed = facts.installed
    brought = {*installed.system_packages.added, *installed.system_packages.replaced}
    named = installed.component("nccl").get("packages")
    pins = [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
    found = ((name, version.rpartition(":")[2]) for name, version in facts.packages.items() if name in names)
    return tuple(sorted((name, version) for name, version in found if not (name in brought and pins and _pinned(name, version, pins))))


def _pinned(name: str, version: str, pins: Iterable[str]) -> bool:
    return any(pin in (f"{name}={version}", f"{name}-{version}") for pin in pins)


def for_cpus(kind: Machine) -> Machine:
    """The same kind of host where its GPUs are not to be used."""
    has_none = kind.cuda is None and not kind.too_old and kind.gpu_fault is None
    why = kind.cuda_why if has_none else "--cpu was asked for; --no-cpu takes it back"
    return replace(kind, cuda=None, cuda_why=why, too_old=False, gpu_fault=None, toolkits=None, builds=(), own_nccl=())


def with_newest_driver(kind: Machine) -> Machine:
    """The same kind of host with a working driver, the newest that is known."""
    drivers = catalog.cuda().toolkits.drivers
    cuda = max(drivers, key=key)
    return replace(kind, cuda=cuda, driver=drivers[cuda], too_old=False, gpu_fault=None)


def _toolkits(facts: Facts) -> tuple[Toolkit, ...] | None:
    """What is left out of facts that were written by hand is taken to be there, in the usual place."""
    found = facts.cuda.toolkits
    if not found and "cuda" in facts.missing:
        return None
    return tuple(
        Toolkit(
            each.path or USUAL_TOOLKIT,
            minor(each.version) if each.version else None,
            compiler=each.nvcc,
            headers=each.headers,
            found=each.found or "its facts name it",
        )
        for each in found
    )


def _newest_first(offers: Mapping[str, list[str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(sorted(set(versions), key=key, reverse=True))) for name, versions in sorted(offers.items()))


def cuda_of_driver(version: str) -> str | None:
    """The newest CUDA that this driver runs natively, by NVIDIA's table; None for one that is older than the table."""
    known = catalog.cuda().toolkits.drivers
    fitting = [cuda for cuda, oldest in known.items() if key(oldest) <= key(version)]
    return max(fitting, key=key) if fitting else None


def driver_for(cuda: str) -> str | None:
    """The oldest driver that runs this CUDA natively."""
    oldest = catalog.cuda().toolkits.drivers.get(cuda)
    return str(oldest) if oldest else None


def _cuda(facts: Facts) -> tuple[str | None, str]:
    driver = facts.driver
    if driver is None or not gpus.has_gpu(facts):
        return None, "its container was given none of the machine's GPUs" if gpus.not_in_container(facts) else "it has no GPU"
    if driver.cuda:
        return str(driver.cuda), f"the driver's CUDA is {driver.cuda}"
    if driver.version:
        cuda = cuda_of_driver(driver.version)
        if cuda is None:
            return None, f"driver {driver.version} is older than every CUDA in NVIDIA's table"
        return cuda, f"driver {driver.version} runs CUDA {cuda} by NVIDIA's table"
    return None, "neither version nor CUDA of its driver is known"


def _repository(os_id: str, version: str) -> str | None:
    template = catalog.cuda_repositories().systems.get(os_id)
    return template.format(version=version.replace(".", ""), major=version.split(".")[0]) if template else None


def _interpreters(facts: Facts) -> tuple[Interpreter, tuple[Interpreter, ...]]:
    python, system = facts.python, facts.os
    asked = python.asked_for
    if asked and asked.version:  # the inventory's word: no other comes into question
        return Interpreter(".".join(map(str, key(asked.version))), asked.path or "", why="asked for in the inventory"), ()
    entry = catalog.os().distributions.get(system.id)
    pythons = entry.pythons if entry else {}
    release: str = system.version
    brought = pythons.get(release) or pythons.get(release.split(".")[0]) or ()
    version = python.version or (brought[0] if brought else None)
    why = "the host's own, as its facts say" if python.version else "the one that its distribution brings, since its facts name none"
    own = Interpreter(".".join(map(str, key(version))) if version else "", python.executable or "/usr/bin/python3", why=why)
    found = [Interpreter(each.version, each.path or "") for each in python.others if each.version]
    if not facts.user.can_become:  # nobody can bring another, or what the own one lacks
        brought = ()
    templates = catalog.system_packages().other_python.get(system.family, ())
    found += [
        Interpreter(each, f"/usr/bin/python{each}", tuple(name.format(python=each) for name in templates))
        for each in brought[1:]
        if not facts.candidates or f"python{each}" in facts.candidates
    ]
    others: dict[tuple[int, ...], Interpreter] = {}
    for each in found:
        others.setdefault(key(each.version)[:2], each)
    others.pop(key(own.version)[:2] if version else (), None)
    return own, tuple(others.values())
