"""What hosts need for any plan: a supported system, GPUs that can be used, one prefix, no other Horovod."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import chain

from provision.base.text import grouped, joined
from provision.catalog import Catalog
from provision.plan.requirements import HOME_PREFIX, HostRequirements, Requirements
from provision.resolve import driver
from provision.resolve.host_classes import HostClasses, with_newest_driver
from provision.resolve.remedies import (
    CPU_ONLY,
    Conflict,
    ConflictId,
    Proposal,
    change_classes,
    change_hosts,
    change_requirements,
    exclude,
    newer_drivers,
    older_driver,
)
from provision.survey import Facts
from provision.survey.preflight import OWN_DISK_PREFIX, SHARED_FILE_SYSTEMS, why_no_root


def conflicts(host_classes: HostClasses, catalog: Catalog, driver_offer: str | None) -> dict[Hashable, Conflict]:
    """Host classes with an unsupported system, or with a driver that nothing runs on.

    Args:
        driver_offer: the text of the remedy ``--driver auto`` (see `driver.offer`).
    """
    known = catalog.os()
    found: dict[Hashable, Conflict] = {}
    id: ConflictId
    for host_class, names in host_classes.items():
        proposals: Iterable[Proposal] = (exclude(names), Proposal(f"install a supported system there or in a container: {known.supported}"))
        if host_class.arch not in known.architectures:
            id, what = "architecture", f"architecture {host_class.arch} is not supported; supported are {', '.join(known.architectures)}"
            proposals = (exclude(names),)
        elif host_class.obstacle is not None:
            id, what, remedy = "accelerator", host_class.obstacle.what, host_class.obstacle.hint
            lifted = [change_classes(remedy.format(host=joined(names)), {host_class: replace(host_class, obstacle=None)})] if remedy else []
            proposals = (*lifted, exclude(names), CPU_ONLY)
        elif host_class.no_wheels:
            id, what = "distribution", f"nothing can be installed on {host_class.system.strip()}: {host_class.no_wheels}"
        elif host_class.driver_too_old:
            id, what = "driver-too-old", f"{host_class.cuda_why}: no build of NCCL or PyTorch for GPUs runs on it"
            proposals = chain((exclude(names),), newer_drivers(host_class, host_classes), (CPU_ONLY,))
        elif host_class.cuda is not None and (misfit := host_class.driver_misfit):
            id = "driver-misfit"
            what = f"driver {host_class.driver or f'for CUDA {host_class.cuda}'} does not support its GPUs: {misfit}"
            proposals = chain(newer_drivers(host_class, host_classes), older_driver(host_class, names), (exclude(names), CPU_ONLY))
        elif host_class.gpu_fault is not None:
            id, what = "gpu-fault", host_class.gpu_fault.what
            hint = str(host_class.gpu_fault.hint).format(host=joined(names))  # other hosts have their own
            by_hand = change_hosts(hint, lambda each: with_newest_driver(each) if each.gpu_fault else each)  # which one is unknown
            if driver_offer and driver.installable(host_class):
                by_hand = change_hosts(driver_offer, lambda each: with_newest_driver(each) if driver.installable(each) else each)
            proposals = (by_hand, exclude(names), CPU_ONLY)
        else:
            continue
        found[host_class] = Conflict(id, names[0], what + (f"; the same on {joined(names[1:])}" if len(names) > 1 else ""), proposals)
    return found


def prefix_conflict(facts: Mapping[str, Facts], requirements: Mapping[str, HostRequirements]) -> dict[Hashable, Conflict]:
    """Hosts with different prefixes. Of as many hosts with root as without, those without are the exception."""
    hosts = grouped((requirements[name].prefix, name) for name in sorted(facts))
    if len(hosts) <= 1:
        return {}
    rootless = [name for name in sorted(facts) if not facts[name].user.can_become]
    usual = min(hosts, key=lambda prefix: (-len(hosts[prefix]), hosts[prefix][0] in rootless, prefix))
    others = sorted(name for prefix, names in hosts.items() if prefix != usual for name in names)
    listed = ", ".join(f"{prefix} on {joined(hosts[prefix])}" for prefix in sorted(hosts))
    what = f"mpirun needs the same prefix on every host, not {listed}"
    same, why, proposals = usual, "", []
    if rootless:
        first = facts[rootless[0]]
        same, why = requirements[rootless[0]].prefix, " that those without root can write"
        if first.disk.prefix.filesystem in SHARED_FILE_SYSTEMS:
            same = OWN_DISK_PREFIX
        what += f"; {joined(rootless)}: {why_no_root(first)}"
    denied = [name for name in rootless if requirements[name].prefix == f"{facts[name].user.home}/{HOME_PREFIX}"]  # none was requested
    if 0 < len(denied) == len(rootless) < len(facts) and all(facts[name].user.sudo in ("none", "password") for name in denied):
        proposals.append(change_requirements(f"let {facts[denied[0]].user.name or 'the user'} use sudo on {joined(denied)}"))
    proposals.append(change_requirements(f"give all hosts one prefix{why}: below [all:vars] in the inventory, provision_prefix={same}"))
    return {"the prefix": Conflict("prefix", rootless[0] if rootless else others[0], what, (*proposals, exclude(others)))}


def horovod_conflicts(
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
            found[f"Horovod on {name}"] = Conflict("horovod-installed", name, what, proposals)
    return found
