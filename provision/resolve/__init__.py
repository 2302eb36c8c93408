"""The resolver: facts of all hosts, catalogue and requirements → one plan. It uses no network, clock or files, so a plan is reproducible.

One NCCL, one Open MPI, one Python and one PyTorch release for all hosts; per host only what must differ, such as the build for its driver.
What does not fit is a conflict that names the host. Hosts of one class (`host_classes.HostClass`) are resolved once, so that ten thousand
of them take seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from provision.plan.model import PUBLIC_KEY, Component, Driver, Engine, HostPlan, Nccl, Network, OpenMpi, Plan, SourceBuild, Wheel
from provision.plan.requirements import HostRequirements, Requirements
from provision.resolve import driver, engine, nccl, network, notes, openmpi, python, torch
from provision.resolve.host_classes import (
    HostClass,
    HostClasses,
    Interpreter,
    by_class,
    host_class_of,
    with_packaged_pythons,
    without_gpus,
)
from provision.resolve.hosts import conflicts as host_conflicts
from provision.resolve.hosts import horovod_conflicts, prefix_conflict
from provision.resolve.remedies import CPU_ONLY, Conflict, Proposal, Trial
from provision.survey import Facts, amd, hardware

__all__ = ["HostRequirements", "Requirements", "resolve"]

AnyComponent = TypeVar("AnyComponent", bound=Component)
ClassPlan = dict[str, Any]  # what all hosts of a class get: the fields of `HostPlan` that do not depend on the single host


def resolve(
    facts: Mapping[str, Facts], requirements: Requirements, hosts: Mapping[str, HostRequirements], changes: Sequence[Proposal] = ()
) -> Plan:
    """The plan for all hosts in ``facts``, in their order. With ``hosts``: the requirements of single hosts. With ``changes``: as if the
    hosts had been changed like that."""
    of_host = {name: hosts.get(name, HostRequirements()) for name in facts}
    class_of = {name: host_class_of(host, requirements.catalog, of_host[name].builds) for name, host in facts.items()}
    drivers: dict[str, Driver] = {}
    driver_notes: list[str] = []
    if requirements.driver:
        drivers, driver_conflicts = driver.drivers(facts, class_of, requirements)
        if driver_conflicts:
            return Plan(conflicts=driver.problems(facts, class_of, requirements, driver_conflicts))
        driver_notes = driver.notes(drivers, facts, requirements.catalog)
        facts = {
            name: driver.with_driver(host, drivers[name], requirements.catalog) if name in drivers else host for name, host in facts.items()
        }
        class_of |= {name: host_class_of(facts[name], requirements.catalog, of_host[name].builds) for name in drivers}
    if requirements.cpu:
        class_of = {name: without_gpus(host_class) for name, host_class in class_of.items()}
    if requirements.packaged_pythons:
        class_of = {name: with_packaged_pythons(host_class) for name, host_class in class_of.items()}
    host_classes = by_class(class_of)
    for change in (*changes, *([CPU_ONLY] if changes and requirements.cpu else [])):  # a new driver does not undo --cpu
        if change.apply is not None:
            host_classes, requirements = change.apply(host_classes, requirements)
    class_of = {name: host_class for host_class, names in host_classes.items() for name in names}
    facts = {name: _with_changed_driver(host, class_of[name]) for name, host in facts.items() if name in class_of}
    components, conflicts, found = _components(host_classes, requirements, driver.offer(facts, class_of, requirements))
    networks: dict[str, Network] = {}
    for name, host in facts.items():
        with _added_to(conflicts, f"the network of {name}"):
            networks[name] = network.network(name, host, of_host[name].interface, alone=len(facts) == 1)
    conflicts |= prefix_conflict(facts, of_host) | horovod_conflicts(facts, requirements, of_host)
    known = notes.knowledge(facts, requirements.catalog)
    if conflicts:
        problems = Trial(host_classes, requirements, conflicts, lambda *other: _components(*other)[1]).problems()
        return Plan(conflicts=problems, knowledge=known)
    plans = {
        name: _host_plan(name, host, class_of[name], of_host[name], networks[name], drivers.get(name), components[class_of[name]])
        for name, host in facts.items()
    }
    found += [*driver_notes, *notes.of_hosts(facts, class_of, plans, requirements.catalog), *network.notes(networks, facts)]
    return Plan(plans, notes=tuple(found), knowledge=known)


def _with_changed_driver(facts: Facts, host_class: HostClass) -> Facts:
    """The facts of a host after a change of its driver: what is noted of it must not be about the earlier one."""
    now = facts.driver
    if host_class.driver is None or (now is not None and now.version == host_class.driver):
        return facts
    return driver.running(facts, host_class.driver, host_class.cuda, now.open if now is not None else None, host_class.catalog)


def _components(
    host_classes: HostClasses, requirements: Requirements, driver_offer: str | None = None
) -> tuple[dict[HostClass, ClassPlan], dict[Hashable, Conflict], list[str]]:
    """(the components of every host class, conflicts, notes); with conflicts there are no components."""
    conflicts = host_conflicts(host_classes, requirements.catalog, driver_offer)
    host_classes = {host_class: names for host_class, names in host_classes.items() if host_class not in conflicts}
    if not host_classes:
        return {}, conflicts, []
    openmpis: dict[HostClass, OpenMpi] = {}
    pythons: dict[HostClass, Interpreter] = {}
    torches: dict[HostClass, Wheel] = {}
    nccls: dict[HostClass, Nccl] = {}
    openmpi_notes, torch_notes, nccl_notes = list[str](), list[str](), list[str]()
    with _added_to(conflicts, "Open MPI"):
        openmpis, openmpi_notes = openmpi.openmpi(host_classes, requirements)
    with _added_to(conflicts, "Python and PyTorch"):
        pythons, torches, torch_notes = torch.choose(host_classes, requirements)
    with _added_to(conflicts, "NCCL"):
        nccls, nccl_notes = nccl.nccl(host_classes, requirements)
    if conflicts:
        return {}, conflicts, []
    shared = len({interpreter.minor for interpreter in pythons.values()}) == 1
    distinct: dict[Component, Component] = {}

    def once(component: AnyComponent) -> AnyComponent:
        """The same object for equal components: host classes share it, and the plan is printed and serialised by object."""
        return cast("AnyComponent", distinct.setdefault(component, component))

    engines = {each: engine.engine(each, requirements) for each in host_classes}
    components: dict[HostClass, ClassPlan] = {
        each: {
            "packages": _system_packages(each, pythons[each], openmpis[each], nccls.get(each), engines[each]),
            "python": once(python.component(each, pythons[each], torches.get(each), shared=shared)),
            "openmpi": once(openmpis[each]),
            "engine": once(engines[each]),
            **{name: once(wheel) for name, wheel in python.wheels(each, pythons[each]).items()},
            "torch": once(torches[each]) if each in torches else None,
            "nccl": once(nccls[each]) if each in nccls else None,
            "hwloc": once(openmpi.hwloc(each, openmpis[each])),
        }
        for each in host_classes
    }
    return components, conflicts, [*openmpi_notes, *torch_notes, *nccl_notes, *python.notes(host_classes, pythons)]


@contextmanager
def _added_to(conflicts: dict[Hashable, Conflict], subject: str) -> Iterator[None]:
    """Add a conflict that the block raises."""
    try:
        yield
    except Conflict as conflict:
        conflicts[subject] = conflict


def _system_packages(
    host_class: HostClass, interpreter: Interpreter, openmpi: OpenMpi, nccl: Nccl | None, engine: Engine
) -> tuple[str, ...]:
    """Packages of the distribution. They do not depend on what is installed, so that a second plan is the same as the first."""
    if not host_class.root:
        return ()
    compiler, *packages = host_class.catalog.system_packages().of(host_class.family)
    if engine.file is None or "source" in (openmpi.source, nccl and nccl.source):
        packages.insert(0, compiler)
    packages += interpreter.packages
    if openmpi.source == "distribution":
        packages.append(openmpi.package)
    if isinstance(openmpi, SourceBuild):
        packages += host_class.catalog.openmpi().tarball.packages[host_class.family]
    if nccl is not None and nccl.source == "source":
        packages += host_class.catalog.nccl().tarball.packages[host_class.family]
    return tuple(dict.fromkeys(packages))


def _gpus(host: Facts, host_class: HostClass) -> int:
    """The number of a host's GPUs that are used."""
    if host_class.targets:
        return len(amd.gpus(host, host_class.catalog))
    return hardware.ranks(host) if host_class.uses_gpus else 0


def _host_plan(
    name: str,
    host: Facts,
    host_class: HostClass,
    requirements: HostRequirements,
    network: Network,
    driver: Driver | None,
    components: ClassPlan,
) -> HostPlan:
    return HostPlan(
        name=name,
        hostname=str(host.hostname or name),
        system=host_class.system,
        arch=host_class.arch,
        prefix=requirements.prefix,
        slots=requirements.slots or _gpus(host, host_class) or 1,
        family=host.os.family,
        login=host.user.name or "",
        # The port that our own connection uses, else one that sshd listens on.
        ssh_port=int(host.network.ssh_connection.server_port or next(iter(host.ssh.ports), 22)),
        ssh_host_keys=tuple(each for each in host.ssh.host_keys if PUBLIC_KEY.fullmatch(each)),
        network=network,
        driver=driver,
        interpreter=host.python.executable or "/usr/bin/python3",
        root=host_class.root,
        **components,
    )
