"""Facts of all hosts + catalogue + requirements → one plan. Pure: no network, no clock, no files; the same input gives the same plan.

One NCCL, one Open MPI, one Python, one PyTorch release for the whole inventory; per host only what must differ (the build for its driver,
its interface). What does not fit becomes a conflict that names the host; nothing is guessed. Hosts that agree in all that matters are one
kind (`machine.Machine`) and are decided once, so that ten thousand of them cost no more than a few.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from provision import catalog
from provision.base.text import some
from provision.base.versions import key, minor
from provision.facts import Facts, gpus
from provision.plan.model import (
    CPU_ONLY,
    HOROVOD_NAMES,
    Component,
    Engine,
    HostPlan,
    Hwloc,
    Nccl,
    Network,
    OpenMpi,
    Plan,
    Python,
    SourceBuild,
    Wheel,
)
from provision.plan.requirements import DEFAULT_PREFIX, HostRequirements, Requirements
from provision.resolve import cmake, hwloc, nccl, network, openmpi, python, torch
from provision.resolve.blocked import Attempt, Blocked, Kinds, ask, become, instead, leave_out, newer_drivers, other_pythons
from provision.resolve.machine import Interpreter, Machine, for_cpus, machine, with_newest_driver
from provision.resolve.remedies import Trial, Trouble

__all__ = ["DEFAULT_PREFIX", "HostRequirements", "Requirements", "resolve"]

AnyComponent = TypeVar("AnyComponent", bound=Component)

# One line, type and base64: what a host says of its keys goes into other hosts' known_hosts.
_HOST_KEY = re.compile(r"(ssh|ecdsa|sk)-[\w@.-]+ [A-Za-z0-9+/]+=*( [^\n]*)?")

# Facts that change the plan → what is assumed where they are missing.
_ASSUMED = {
    "python": "the distribution's own",
    "driver.cuda": "by the driver's version",
    "gpus": "one of unknown kind",
    "compute capability": "not taken into account",
    "network": "left open: no MPI job over several hosts can be started by this plan",
}


@dataclass(frozen=True)
class _Shared:
    """What hosts of one kind have in common."""

    packages: tuple[str, ...]
    python: Python
    openmpi: OpenMpi
    cmake: Wheel
    engine: Engine
    mpi4py: Wheel
    numpy: Wheel
    cloudpickle: Wheel
    torch: Wheel | None
    nccl: Nccl | None
    hwloc: Hwloc


def resolve(facts: Mapping[str, Facts], requirements: Requirements, hosts: Mapping[str, HostRequirements]) -> Plan:
    """The plan for all hosts in ``facts`` (see ``provision.facts``); its order is the inventory's."""
    kind_of = {name: machine(host, hosts[name].builds if name in hosts else ()) for name, host in facts.items()}
    if requirements.cpu:
        kind_of = {name: for_cpus(kind) for name, kind in kind_of.items()}
    kinds: dict[Machine, list[str]] = {}
    for name in sorted(kind_of):  # what is decided for all must not depend on the inventory's order
        kinds.setdefault(kind_of[name], []).append(name)
    shared, trouble, notes = _shared(kinds, requirements)
    networks: dict[str, Network] = {}
    for name, host in facts.items():
        try:
            networks[name] = network.network(name, host, hosts.get(name, HostRequirements()).interface, alone=len(facts) == 1)
        except Blocked as blocked:
            trouble[f"the network of {name}"] = blocked
    trouble |= _different_prefixes(facts, hosts) | _next_to_horovod(facts, requirements, hosts)
    if trouble:
        return Plan(conflicts=tuple(Trial(kinds, requirements, trouble, lambda *other: _shared(*other)[1]).conflicts()))
    plans = {
        name: _host_plan(name, host, kind_of[name], hosts.get(name, HostRequirements()), networks[name], shared[kind_of[name]])
        for name, host in facts.items()
    }
    return Plan(
        hosts=plans,
        notes=(*notes, *_without_root(plans), *_unused_gpus(facts, kind_of), *_missing(facts), *network.notes(networks.values())),
    )


def _next_to_horovod(
    facts: Mapping[str, Facts], requirements: Requirements, hosts: Mapping[str, HostRequirements]
) -> dict[Hashable, Blocked]:
    """Hosts whose environment has the real Horovod, whose files the names for the engine would overwrite."""
    found: dict[Hashable, Blocked] = {}
    for name, host in facts.items() if requirements.horovod_names else ():
        version = host.installed.packages.get("horovod")
        if version:
            venv = f"{hosts.get(name, HostRequirements()).prefix}/venv"
            attempts = (
                Attempt(f"uninstall it there: {venv}/bin/pip uninstall horovod"),
                ask("leave --horovod-names out", horovod_names=False),
            )
            found[f"Horovod on {name}"] = Blocked(
                name, f"Horovod {version} is in {venv}, and --horovod-names would overwrite its files", attempts
            )
    return found


def _unusable(kinds: Kinds) -> Trouble:
    """Systems that nothing is known of or that are too old, and drivers that nothing runs on; by kind of host."""
    known = catalog.os()
    found: dict[Hashable, Blocked] = {}
    for kind, names in kinds.items():
        entry = known.distributions.get(kind.os_id)
        attempts: list[Attempt] = [leave_out(names), Attempt(f"install a system there that is supported: {_supported()}")]
        if kind.arch not in known.architectures:
            what = f"architecture {kind.arch} is not supported; there are {', '.join(known.architectures)}"
            attempts.pop()
        elif kind.family not in ("debian", "rhel"):
            listed = ", ".join(known.distributions)
            what = f"the distribution {kind.system.strip()} is not known; known are {listed}, and those alike (ID_LIKE)"
        elif entry and kind.os_version and key(kind.os_version) < key(entry.oldest):
            what = f"{kind.system} is too old; {entry.oldest} is the oldest that is supported"
        elif kind.too_old:
            what = f"{kind.cuda_why}: no build of NCCL or PyTorch for GPUs runs on it"
            attempts[1:] = newer_drivers(kind, names)
        elif kind.gpu_fault is not None:
            what = kind.gpu_fault.what
            remedy = kind.gpu_fault.remedy.format(host=some(names))
            attempts = [
                become(remedy, instead(kind, with_newest_driver(kind))),  # tried with that, since nothing says which driver it will be
                become("--cpu: the CPU build on all hosts, their GPUs stay unused", for_cpus),
                leave_out(names),
            ]
        else:
            continue
        found[kind] = Blocked(names[0], what + (f"; the same on {some(names[1:])}" if len(names) > 1 else ""), attempts)
    return found


def _supported() -> str:
    return "; ".join(f"{name} {each.oldest} to {each.newest}" for name, each in catalog.os().distributions.items())


def _shared(kinds: Kinds, requirements: Requirements) -> tuple[dict[Machine, _Shared], dict[Hashable, Blocked], list[str]]:
    """(everything that is decided for all hosts at once, what does not work out of it, notes)"""
    trouble = dict(_unusable(kinds))
    kinds = {kind: names for kind, names in kinds.items() if kind not in trouble}
    openmpis, versions, nccls = None, None, None
    notes: list[str] = []
    try:
        openmpis, said = openmpi.openmpi(kinds, requirements) if kinds else ({}, [])
        notes += said
    except Blocked as blocked:
        trouble["Open MPI"] = blocked
    try:
        versions = _python_and_torch(kinds, requirements) if kinds else None
    except Blocked as blocked:
        trouble["Python and PyTorch"] = blocked
    try:
        nccls, said = nccl.nccl(kinds, requirements)
        notes += said
    except Blocked as blocked:
        trouble["NCCL"] = blocked
    if trouble or openmpis is None or versions is None or nccls is None:
        return {}, trouble, notes
    pythons, torches, said = versions
    notes += said + _python_notes(kinds, pythons)
    one_python = len({minor(chosen.version) for chosen in pythons.values()}) == 1
    mpi4py = _anywhere("mpi4py", "speaks the ABI of every Open MPI 4.x; finds the library at run time")
    cloudpickle = _anywhere("cloudpickle", "functions of Runner travel with it")
    engine = Engine(
        requirements.engine_version,
        "collective-core",
        "bundled",
        ("built on the host from the sources that this toolkit carries",),
        sha256=requirements.engine_sha256,
        options=(*([HOROVOD_NAMES] if requirements.horovod_names else []), *([CPU_ONLY] if requirements.cpu else [])),
    )
    equal: dict[Component, Component] = {}

    def once(component: AnyComponent) -> AnyComponent:
        """Of equal components always the same object: kinds of hosts share them, and what prints a plan sees it."""
        return cast("AnyComponent", equal.setdefault(component, component))

    shared = {
        kind: _Shared(
            packages=_system_packages(kind, pythons[kind], openmpis[kind], nccls.get(kind)),
            python=once(python.python(kind, pythons[kind], shared=one_python)),
            openmpi=once(openmpis[kind]),
            cmake=once(cmake.cmake(kind)),
            engine=engine,
            mpi4py=mpi4py,
            numpy=once(python.numpy(pythons[kind])),
            cloudpickle=cloudpickle,
            torch=once(torches[kind]) if kind in torches else None,
            nccl=once(nccls[kind]) if kind in nccls else None,
            hwloc=once(hwloc.hwloc(kind, openmpis[kind])),
        )
        for kind in kinds
    }
    return shared, trouble, notes


def _python_and_torch(kinds: Kinds, requirements: Requirements) -> tuple[dict[Machine, Interpreter], dict[Machine, Wheel], list[str]]:
    """The best choice of interpreters for which there is a PyTorch. Raises Blocked with what the best one lacks."""
    no_torch, no_python = None, None
    liked = torch.pythons(requirements) if requirements.torch else catalog.python_packages().numpy.by_python
    for pythons in python.possible(kinds, liked):  # at least one choice: each its own
        wrong = next(((kind, said) for kind, chosen in pythons.items() if (said := python.misfit(chosen))), None)
        if wrong:
            kind, said = wrong
            attempts = (*other_pythons(kind, kinds[kind], liked), leave_out(kinds[kind]))
            no_python = no_python or Blocked(kinds[kind][0], said, attempts)
            continue
        try:
            torches, notes = torch.torch(kinds, pythons, requirements) if requirements.torch else ({}, [])
        except Blocked as blocked:
            no_torch = no_torch or blocked
        else:
            return pythons, torches, notes
    raise no_torch or no_python or RuntimeError("no Python was tried")


def _host_plan(name: str, host: Facts, kind: Machine, asked: HostRequirements, net: Network, shared: _Shared) -> HostPlan:
    return HostPlan(
        name=name,
        hostname=str(host.hostname or name),
        system=kind.system,
        arch=kind.arch,
        prefix=asked.prefix,
        slots=asked.slots or (len(host.gpus) if kind.cuda is not None else 0) or 1,
        family=host.os.family,
        login=host.user.name or "",
        ssh_port=_ssh_port(host),
        ssh_host_keys=tuple(key for key in host.ssh.host_keys if _HOST_KEY.fullmatch(key)),
        network=net,
        interpreter=host.python.executable or "/usr/bin/python3",
        root=kind.root,
        **vars(shared),
    )


def _ssh_port(host: Facts) -> int:
    """The port that our own connection came in by, else one that sshd listens on."""
    return int(host.network.ssh_connection.server_port or next(iter(host.ssh.ports), 22))


def _system_packages(kind: Machine, chosen: Interpreter, openmpi: OpenMpi, nccl: Nccl | None) -> tuple[str, ...]:
    """What the package manager must bring. It says nothing of what is there already, so that a second plan is the same as the first."""
    if not kind.root:
        return ()
    wanted = list(catalog.system_packages().of(kind.family))
    wanted += chosen.packages
    if openmpi.source == "distribution":
        wanted.append(openmpi.package)
    if isinstance(openmpi, SourceBuild):
        known = catalog.openmpi().tarball
        wanted += known.packages[kind.family].always
        if set(known.verbs) <= set(openmpi.options):
            wanted += known.packages[kind.family].verbs
    if nccl is not None and nccl.source == "source":
        wanted += catalog.nccl().tarball.packages[kind.family]
    return tuple(dict.fromkeys(wanted))


def _different_prefixes(facts: Mapping[str, Facts], hosts: Mapping[str, HostRequirements]) -> dict[Hashable, Blocked]:
    prefixes = {name: hosts.get(name, HostRequirements()).prefix for name in facts}
    counted = Counter(prefixes.values())
    if len(counted) <= 1:
        return {}
    usual = min(counted, key=lambda prefix: (-counted[prefix], prefix))
    odd = sorted(name for name, prefix in prefixes.items() if prefix != usual)
    listed = ", ".join(f"{prefix} on {some(sorted(name for name in facts if prefixes[name] == prefix))}" for prefix in sorted(counted))
    rootless = sorted(name for name in facts if not facts[name].user.can_become)
    same = f"{prefixes[rootless[0]]}, which hosts without root can write" if rootless else usual
    attempts = (Attempt(f"give all hosts the same provision_prefix: {same}"), leave_out(odd))
    return {"the prefix": Blocked(odd[0], f"mpirun needs the same prefix on every host, not {listed}", attempts)}


def _without_root(plans: Mapping[str, HostPlan]) -> list[str]:
    """What is given up where root is not to be had."""
    names = sorted(name for name, plan in plans.items() if not plan.root)
    if not names:
        return []
    prefix = plans[names[0]].prefix
    return [
        f"{some(names)}: without root everything goes into {prefix}. Given up: system packages (what is needed is there), holds on them, "
        "NVIDIA's repository (NCCL is the wheel), taking off a hwloc that breaks Open MPI, raising limits, and the dynamic linker's "
        f"configuration: jobs are started with its paths; programs started by hand need `. {prefix}/env.sh`"
    ]


def _anywhere(name: str, why: str) -> Wheel:
    """A package of the catalogue of which one release fits every host."""
    version = getattr(catalog.python_packages(), name).version
    return Wheel(version, f"{name}=={version}", "wheel", (why,))


def _python_notes(kinds: Mapping[Machine, list[str]], pythons: Mapping[Machine, Interpreter]) -> list[str]:
    versions: dict[str, list[str]] = {}
    for kind, chosen in pythons.items():
        versions.setdefault(minor(chosen.version), []).extend(kinds[kind])
    if len(versions) == 1:
        return []
    listed = ", ".join(f"{some(sorted(names))} {version}" for version, names in sorted(versions.items()))
    return [f"hosts have different Pythons ({listed}): each keeps its own; objects that are sent by pickle may not be readable everywhere"]


def _unused_gpus(facts: Mapping[str, Facts], kind_of: Mapping[str, Machine]) -> list[str]:
    """GPUs that the plan leaves alone, by cause."""
    unused: dict[str, list[str]] = {}
    for name in sorted(facts):
        if (gpus.has_gpu(facts[name]) or gpus.not_in_container(facts[name])) and kind_of[name].cuda is None:
            unused.setdefault(kind_of[name].cuda_why, []).append(name)
    count = {why: sum(len(facts[name].gpus) for name in names) for why, names in unused.items()}
    return [f"{some(names)}: {count[why] or 'all'} GPUs stay unused: {why}" for why, names in unused.items()]


def _missing(facts: Mapping[str, Facts]) -> list[str]:
    """What was assumed because the facts of some hosts say nothing of it, and would change the plan."""
    missing: dict[tuple[str, ...], list[str]] = {}
    for name, host in sorted(facts.items()):
        parts = {"compute capability" if part.endswith("compute_capability") else part for part in host.missing}
        told = tuple(part for part in _ASSUMED if part in parts)
        if told:
            missing.setdefault(told, []).append(name)
    return [
        f"{some(names)}: the facts do not say: " + ", ".join(f"{part} ({_ASSUMED[part]})" for part in parts)
        for parts, names in missing.items()
    ]
