"""The resolver: facts of all hosts, catalogue and requirements → one plan. It uses no network, clock or files, so a plan is reproducible.

One NCCL, one Open MPI, one Python and one PyTorch release for all hosts; per host only what must differ, such as the build for its driver.
What does not fit is a conflict that names the host. Hosts of one class (`host_classes.HostClass`) are resolved once, so that ten thousand
of them take seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar, cast

from provision import catalog
from provision.base.problems import Problem
from provision.base.text import joined
from provision.base.versions import key
from provision.plan.model import (
    CPU_ONLY,
    HOROVOD_NAMES,
    NCCL_STRICT,
    Component,
    Driver,
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
from provision.plan.requirements import HostRequirements, Requirements
from provision.resolve import driver, hardware, nccl, network, openmpi, python, torch
from provision.resolve.host_classes import (
    HostClass,
    HostClasses,
    Interpreter,
    host_class_of,
    with_newest_driver,
    with_packaged_pythons,
    without_gpus,
)
from provision.resolve.knowledge import knowledge, notes_on_driver_branches
from provision.resolve.remedies import CPU_ONLY as CPU_ONLY_REMEDY
from provision.resolve.remedies import (
    Conflict,
    Proposal,
    Trial,
    change_class,
    change_hosts,
    change_requirements,
    exclude,
    newer_drivers,
    older_driver,
    other_pythons,
)
from provision.survey import Facts, gpus
from provision.survey import hardware as hardware_facts

__all__ = ["HostRequirements", "Requirements", "resolve"]

AnyComponent = TypeVar("AnyComponent", bound=Component)

# One line, type and base64: the host keys in facts are copied into other hosts' known_hosts.
_HOST_KEY = re.compile(r"(ssh|ecdsa|sk)-[\w@.-]+ [A-Za-z0-9+/]+=*( [^\n]*)?")

# Facts that change the plan → what is assumed if they are missing.
_ASSUMPTIONS = {
    "python": "the distribution's own",
    "driver.cuda": "by the driver's version",
    "gpus": "one of unknown kind",
    "compute capability": "not taken into account",
    "network": "left open: no MPI job over several hosts can be started by this plan",
}


def resolve(
    facts: Mapping[str, Facts], requirements: Requirements, hosts: Mapping[str, HostRequirements], changes: Sequence[Proposal] = ()
) -> Plan:
    """The plan for all hosts in ``facts``, in their order. With ``hosts``: the requirements of single hosts. With ``changes``: as if the
    hosts had been changed like that."""
    of_host = {name: hosts.get(name, HostRequirements()) for name in facts}
    class_of = {name: host_class_of(host, of_host[name].builds) for name, host in facts.items()}
    drivers: dict[str, Driver] = {}
    driver_notes: list[str] = []
    if requirements.driver:
        drivers, driver_conflicts = driver.drivers(facts, class_of, requirements)
        if driver_conflicts:
            return Plan(conflicts=_driver_problems(facts, class_of, requirements, driver_conflicts))
        driver_notes = driver.notes(drivers, facts)
        facts = {name: driver.with_driver(host, drivers[name]) if name in drivers else host for name, host in facts.items()}
        class_of |= {name: host_class_of(facts[name], of_host[name].builds) for name in drivers}
    if requirements.cpu:
        class_of = {name: without_gpus(host_class) for name, host_class in class_of.items()}
    if requirements.packaged_pythons:
        class_of = {name: with_packaged_pythons(host_class) for name, host_class in class_of.items()}
    by_class: dict[HostClass, list[str]] = {}
    for name in sorted(class_of):  # common decisions must not depend on the inventory's order
        by_class.setdefault(class_of[name], []).append(name)
    host_classes: HostClasses = by_class
    for change in (*changes, *([CPU_ONLY_REMEDY] if changes and requirements.cpu else [])):  # a new driver does not undo --cpu
        if change.apply is not None:
            host_classes, requirements = change.apply(host_classes, requirements)
    class_of = {name: host_class for host_class, names in host_classes.items() for name in names}
    facts = {name: _with_changed_driver(host, class_of[name]) for name, host in facts.items() if name in class_of}
    components, conflicts, notes = _components(host_classes, requirements, driver.offer(facts, class_of, requirements))
    networks: dict[str, Network] = {}
    for name, host in facts.items():
        with _added_to(conflicts, f"the network of {name}"):
            networks[name] = network.network(name, host, of_host[name].interface, alone=len(facts) == 1)
    conflicts |= _prefix_conflict(facts, of_host) | _horovod_conflicts(facts, requirements, of_host)
    known = knowledge(facts)
    if conflicts:
        problems = Trial(host_classes, requirements, conflicts, lambda *other: _components(*other)[1]).problems()
        return Plan(conflicts=problems, knowledge=known)
    plans = {
        name: _host_plan(name, host, class_of[name], of_host[name], networks[name], drivers.get(name), components[class_of[name]])
        for name, host in facts.items()
    }
    notes += [
        *driver_notes,
        *notes_on_driver_branches(facts),
        *_notes_without_root(plans),
        *_notes_on_unused_gpus(facts, class_of),
        *_notes_on_hosts_without_gpus(class_of),
        *_notes_on_assumptions(facts),
        *_notes_on_infiniband(facts, plans),
        *hardware.notes(facts, gpus_used=any(host_class.cuda is not None for host_class in class_of.values())),
    ]
    return Plan(plans, notes=(*notes, *network.notes(networks.values())), knowledge=known)


def _with_changed_driver(facts: Facts, host_class: HostClass) -> Facts:
    """The facts of a host after a change of its driver: what is noted of it must not be about the earlier one."""
    now = facts.driver
    if host_class.driver is None or (now is not None and now.version == host_class.driver):
        return facts
    return driver.running(facts, host_class.driver, host_class.cuda, now.open if now is not None else None)


# --- components --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Components:
    """What all hosts of a class get: the fields of `HostPlan` that do not depend on the single host."""

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


def _components(
    host_classes: HostClasses, requirements: Requirements, driver_offer: str | None = None
) -> tuple[dict[HostClass, _Components], dict[Hashable, Conflict], list[str]]:
    """(the components of every host class, conflicts, notes); with conflicts there are no components."""
    conflicts = _host_conflicts(host_classes, driver_offer)
    host_classes = {host_class: names for host_class, names in host_classes.items() if host_class not in conflicts}
    if not host_classes:
        return {}, conflicts, []
    notes: list[str] = []
    openmpis: dict[HostClass, OpenMpi] = {}
    pythons: dict[HostClass, Interpreter] = {}
    torches: dict[HostClass, Wheel] = {}
    nccls: dict[HostClass, Nccl] = {}
    with _added_to(conflicts, "Open MPI"):
        openmpis, notes = openmpi.openmpi(host_classes, requirements)
    with _added_to(conflicts, "Python and PyTorch"):
        pythons, torches, torch_notes = _python_and_torch(host_classes, requirements)
        notes += torch_notes
    with _added_to(conflicts, "NCCL"):
        nccls, nccl_notes = nccl.nccl(host_classes, requirements)
        notes += nccl_notes
    if conflicts:
        return {}, conflicts, []
    versions: dict[str, list[str]] = {}
    for host_class, interpreter in pythons.items():
        versions.setdefault(interpreter.minor, []).extend(host_classes[host_class])
    if len(versions) > 1:
        listed = ", ".join(f"{joined(sorted(names))} {version}" for version, names in sorted(versions.items()))
        notes.append(f"hosts have different Pythons ({listed}): each keeps its own; objects sent by pickle may not be readable everywhere")
    notes += python.notes_on_candidates(host_classes, pythons)
    if downloaded := sorted(name for each, interpreter in pythons.items() if interpreter.from_uv for name in host_classes[each]):
        notes.append(
            f"{joined(downloaded)}: uv downloads Python from python-build-standalone, so these hosts must reach GitHub, or a mirror that "
            "their /etc/uv/uv.toml names (python-install-mirror)"
        )
    engine = Engine(
        requirements.engine_version,
        "collective-core",
        "bundled",
        ("built from the sources in this toolkit",),
        sha256=requirements.engine_sha256,
        options=(
            *([HOROVOD_NAMES] if requirements.horovod_names else []),
            *([CPU_ONLY] if requirements.cpu else []),
            *([NCCL_STRICT] if requirements.nccl_strict else []),
        ),
    )
    distinct: dict[Component, Component] = {}

    def once(component: AnyComponent) -> AnyComponent:
        """The same object for equal components: host classes share it, and the plan is printed and serialised by object."""
        return cast("AnyComponent", distinct.setdefault(component, component))

    components = {
        each: _Components(
            packages=_system_packages(each, pythons[each], openmpis[each], nccls.get(each)),
            python=once(python.component(each, pythons[each], _release_of(torches.get(each)), shared=len(versions) == 1)),
            openmpi=once(openmpis[each]),
            cmake=once(python.cmake(each)),
            engine=engine,
            mpi4py=once(python.mpi4py()),
            numpy=once(python.numpy(pythons[each])),
            cloudpickle=once(python.cloudpickle()),
            torch=once(torches[each]) if each in torches else None,
            nccl=once(nccls[each]) if each in nccls else None,
            hwloc=once(openmpi.hwloc(each, openmpis[each])),
        )
        for each in host_classes
    }
    return components, conflicts, notes


@contextmanager
def _added_to(conflicts: dict[Hashable, Conflict], subject: str) -> Iterator[None]:
    """Add a conflict that the block raises."""
    try:
        yield
    except Conflict as conflict:
        conflicts[subject] = conflict


def _python_and_torch(
    host_classes: HostClasses, requirements: Requirements
) -> tuple[dict[HostClass, Interpreter], dict[HostClass, Wheel], list[str]]:
    """The choice of interpreters that leads to the best PyTorch, of several the one that changes least. Raises the conflict of the first
    choice if there is none."""
    torch_conflict, python_conflict = None, None
    best: tuple[tuple[bool, bool, int], dict[HostClass, Interpreter]] | None = None
    preferred = torch.pythons_of_releases(requirements) if requirements.torch else [tuple(catalog.python_packages().numpy.by_python)]
    lowest = torch.lowest_cost(host_classes, requirements) if requirements.torch else None
    tried: set[tuple[str, ...]] = set()
    for pythons in python.candidates(host_classes, preferred, requirements.python_downloads):
        versions = tuple(interpreter.minor for interpreter in pythons.values())
        if versions in tried:
            continue
        tried.add(versions)
        rejected = next(((each, reason) for each, chosen in pythons.items() if (reason := python.rejection(chosen))), None)
        if rejected:
            host_class, reason = rejected
            names = host_classes[host_class]
            proposals = (*other_pythons(host_class, names, preferred[0] if preferred else ()), exclude(names))
            python_conflict = python_conflict or Conflict(names[0], reason, proposals)
            continue
        if not requirements.torch:
            return pythons, {}, []
        try:
            cost = torch.cost(host_classes, pythons, requirements)
        except Conflict as conflict:
            torch_conflict = torch_conflict or conflict
            continue
        if best is None or cost < best[0]:
            best = cost, pythons
        if cost == lowest:
            break
    if best:
        return best[1], *torch.torch(host_classes, best[1], requirements)
    raise torch_conflict or python_conflict or RuntimeError("no Python was tried")


def _release_of(wheel: Wheel | None) -> str | None:
    return wheel.version.partition("+")[0] if wheel else None


def _system_packages(host_class: HostClass, interpreter: Interpreter, openmpi: OpenMpi, nccl: Nccl | None) -> tuple[str, ...]:
    """Packages of the distribution. They do not depend on what is installed, so that a second plan is the same as the first."""
    if not host_class.root:
        return ()
    packages = [*catalog.system_packages().of(host_class.family), *interpreter.packages]
    if openmpi.source == "distribution":
        packages.append(openmpi.package)
    if isinstance(openmpi, SourceBuild):
        packages += catalog.openmpi().tarball.packages[host_class.family]
    if nccl is not None and nccl.source == "source":
        packages += catalog.nccl().tarball.packages[host_class.family]
    return tuple(dict.fromkeys(packages))


def _host_plan(
    name: str,
    host: Facts,
    host_class: HostClass,
    requirements: HostRequirements,
    network: Network,
    driver: Driver | None,
    components: _Components,
) -> HostPlan:
    return HostPlan(
        name=name,
        hostname=str(host.hostname or name),
        system=host_class.system,
        arch=host_class.arch,
        prefix=requirements.prefix,
        slots=requirements.slots or (len(host.gpus) if host_class.cuda is not None else 0) or 1,
        family=host.os.family,
        login=host.user.name or "",
        # The port that our own connection uses, else one that sshd listens on.
        ssh_port=int(host.network.ssh_connection.server_port or next(iter(host.ssh.ports), 22)),
        ssh_host_keys=tuple(each for each in host.ssh.host_keys if _HOST_KEY.fullmatch(each)),
        network=network,
        driver=driver,
        interpreter=host.python.executable or "/usr/bin/python3",
        root=host_class.root,
        **vars(components),
    )


# --- conflicts of hosts ------------------------------------------------------------------------------------------------------------------


def _driver_problems(
    facts: Mapping[str, Facts], class_of: Mapping[str, HostClass], requirements: Requirements, conflicts: dict[Hashable, Conflict]
) -> tuple[Problem, ...]:
    """The conflicts of drivers as problems. Their remedies are tried for drivers alone: what runs with them is planned afterwards."""

    def resolved(host_classes: HostClasses, changed: Requirements) -> dict[Hashable, Conflict]:
        left = {name: facts[name] for names in host_classes.values() for name in names}
        return driver.drivers(left, class_of, changed)[1] if changed.driver else {}

    host_classes: dict[HostClass, list[str]] = {}
    for name, host_class in class_of.items():
        host_classes.setdefault(host_class, []).append(name)
    return Trial(host_classes, requirements, conflicts, resolved).problems()


def _host_conflicts(host_classes: HostClasses, driver_offer: str | None) -> dict[Hashable, Conflict]:
    """Host classes with an unsupported system, or with a driver that nothing runs on."""
    known = catalog.os()
    found: dict[Hashable, Conflict] = {}
    for host_class, names in host_classes.items():
        entry = known.distributions.get(host_class.os_id)
        proposals: Iterable[Proposal] = (exclude(names), Proposal(f"install a supported system there: {known.supported}"))
        if host_class.arch not in known.architectures:
            what = f"architecture {host_class.arch} is not supported; supported are {', '.join(known.architectures)}"
            proposals = (exclude(names),)
        elif host_class.family not in ("debian", "rhel"):
            listed = ", ".join(known.distributions)
            what = f"the distribution {host_class.system.strip()} is not known; known are {listed}, and those like them (ID_LIKE)"
        elif entry and host_class.os_version and key(host_class.os_version) < key(entry.oldest):
            what = f"{host_class.system} is too old; {entry.oldest} is the oldest that is supported"
        elif host_class.obstacle is not None:
            what, remedy = host_class.obstacle.what, host_class.obstacle.remedy
            removed = [change_class(remedy.format(host=joined(names)), host_class, replace(host_class, obstacle=None))] if remedy else []
            proposals = (*removed, exclude(names), CPU_ONLY_REMEDY)
        elif host_class.driver_too_old:
            what = f"{host_class.cuda_why}: no build of NCCL or PyTorch for GPUs runs on it"
            proposals = chain((exclude(names),), newer_drivers(host_class, names), (CPU_ONLY_REMEDY,))
        elif host_class.cuda is not None and (misfit := host_class.driver_misfit):
            what = f"driver {host_class.driver or f'for CUDA {host_class.cuda}'} does not support its GPUs: {misfit}"
            proposals = chain(newer_drivers(host_class, names), older_driver(host_class, names), (exclude(names), CPU_ONLY_REMEDY))
        elif host_class.gpu_fault is not None:
            what = host_class.gpu_fault.what
            newest = with_newest_driver(host_class)  # which driver it will be is unknown
            by_hand = change_class(host_class.gpu_fault.remedy.format(host=joined(names)), host_class, newest)
            if driver_offer and driver.installable(host_class):
                by_hand = change_hosts(driver_offer, lambda each: with_newest_driver(each) if driver.installable(each) else each)
            proposals = (by_hand, exclude(names), CPU_ONLY_REMEDY)
        else:
            continue
        found[host_class] = Conflict(names[0], what + (f"; the same on {joined(names[1:])}" if len(names) > 1 else ""), proposals)
    return found


def _prefix_conflict(facts: Mapping[str, Facts], requirements: Mapping[str, HostRequirements]) -> dict[Hashable, Conflict]:
    """Hosts with different prefixes."""
    hosts: dict[str, list[str]] = {}
    for name in sorted(facts):
        hosts.setdefault(requirements[name].prefix, []).append(name)
    if len(hosts) <= 1:
        return {}
    counted = Counter({prefix: len(names) for prefix, names in hosts.items()})
    usual = min(counted, key=lambda prefix: (-counted[prefix], prefix))
    others = sorted(name for prefix, names in hosts.items() if prefix != usual for name in names)
    listed = ", ".join(f"{prefix} on {joined(hosts[prefix])}" for prefix in sorted(hosts))
    without_root = next((name for name in sorted(facts) if not facts[name].user.can_become), None)
    same = f"{requirements[without_root].prefix}, which hosts without root can write" if without_root else usual
    proposals = (Proposal(f"give all hosts the same provision_prefix: {same}"), exclude(others))
    return {"the prefix": Conflict(others[0], f"mpirun needs the same prefix on every host, not {listed}", proposals)}


def _horovod_conflicts(
    facts: Mapping[str, Facts], requirements: Requirements, hosts: Mapping[str, HostRequirements]
) -> dict[Hashable, Conflict]:
    """Hosts whose environment has the real Horovod, whose files the engine's Horovod names would overwrite."""
    found: dict[Hashable, Conflict] = {}
    for name, host in facts.items() if requirements.horovod_names else ():
        version = host.installed.packages.get("horovod")
        if version:
            venv = f"{hosts[name].prefix}/venv"
            proposals = (
                Proposal(f"uninstall it there: {venv}/bin/pip uninstall horovod"),
                change_requirements("leave --horovod-names out", horovod_names=False),
            )
            what = f"Horovod {version} is in {venv}, and --horovod-names would overwrite its files"
            found[f"Horovod on {name}"] = Conflict(name, what, proposals)
    return found


# --- notes -------------------------------------------------------------------------------------------------------------------------------


def _notes_without_root(plans: Mapping[str, HostPlan]) -> list[str]:
    """What is left out where root is unavailable."""
    names = sorted(name for name, plan in plans.items() if not plan.root)
    if not names:
        return []
    prefix = plans[names[0]].prefix
    return [
        f"{joined(names)}: without root everything is installed in {prefix}. Left out: system packages (the needed ones are installed), "
        "holds on them, NVIDIA's repository (NCCL is the wheel), removing a hwloc that breaks Open MPI, raising limits, and configuring "
        f"the dynamic linker: jobs are started with its paths; programs started by hand need `. {prefix}/env.sh`"
    ]


def _notes_on_unused_gpus(facts: Mapping[str, Facts], class_of: Mapping[str, HostClass]) -> list[str]:
    """GPUs that the plan does not use, by cause."""
    unused: dict[str, list[str]] = {}
    for name in sorted(facts):
        if (gpus.has_gpu(facts[name]) or gpus.hidden_from_container(facts[name])) and class_of[name].cuda is None:
            unused.setdefault(class_of[name].cuda_why, []).append(name)
    count = {why: sum(len(facts[name].gpus) for name in names) for why, names in unused.items()}
    return [f"{joined(names)}: {count[why] or 'all'} GPUs stay unused: {why}" for why, names in unused.items()]


def _notes_on_hosts_without_gpus(class_of: Mapping[str, HostClass]) -> Iterator[str]:
    """Hosts without GPUs among hosts that compute on theirs."""
    without = sorted(name for name, host_class in class_of.items() if host_class.cuda is None)
    if without and len(without) < len(class_of):
        few = f" (--limit '{','.join(f'!{name}' for name in without)}' leaves {'it' if len(without) == 1 else 'them'} out)"
        yield (
            f"{joined(without)}: no GPU is used there, unlike on the other hosts: every step of training waits for the CPU, and NCCL, "
            f"which connects GPUs only, cannot reach {'it' if len(without) == 1 else 'them'}{few if len(without) <= 3 else ''}"
        )


def _notes_on_infiniband(facts: Mapping[str, Facts], plans: Mapping[str, HostPlan]) -> Iterator[str]:
    """Problems, over InfiniBand, of the NCCL inside PyTorch where several hosts with GPUs have it."""
    connected: dict[str, list[str]] = {}
    for name in sorted(plans):
        inside = torch.nccl_inside(plans[name].torch)
        if inside and hardware_facts.active_ports(facts[name], "infiniband"):
            connected.setdefault(inside, []).append(name)
    for version, names in connected.items():
        for trouble in catalog.nccl().known_weak if len(names) > 1 else ():
            if trouble.network == "infiniband" and trouble.covers(version):
                prefix, nccl = plans[names[0]].prefix, plans[names[0]].nccl
                other = f"{nccl.version} of this plan" if nccl and not trouble.covers(nccl.version) else "another NCCL"
                yield (
                    f"{joined(names)}: the NCCL {version} inside PyTorch is known for a {trouble}; if it does, load {other} into the ranks "
                    f"instead: LD_PRELOAD=PATH of its libnccl.so.2 (a wheel's is below {prefix}/nccl)"
                )


def _notes_on_assumptions(facts: Mapping[str, Facts]) -> list[str]:
    """What was assumed for facts that are missing on some hosts and would change the plan."""
    missing: dict[tuple[str, ...], list[str]] = {}
    for name, host in sorted(facts.items()):
        parts = {"compute capability" if part.endswith("compute_capability") else part for part in host.missing}
        relevant = tuple(part for part in _ASSUMPTIONS if part in parts)
        if relevant:
            missing.setdefault(relevant, []).append(name)
    return [
        f"{joined(names)}: missing facts, and what is assumed: " + ", ".join(f"{part} ({_ASSUMPTIONS[part]})" for part in parts)
        for parts, names in missing.items()
    ]
