"""Notes on a plan: what a person has to know or do that no package of it does, one per kind, with its hosts; and what it cannot know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.base.text import grouped, joined
from provision.base.versions import key
from provision.catalog import Catalog
from provision.catalog.models import Trouble
from provision.plan.model import HostPlan, Knowledge
from provision.resolve import torch
from provision.resolve.host_classes import HostClass
from provision.survey import Facts, amd, gpus, hardware
from provision.survey.model import Amd

# RDMA as conditions name it → as notes do.
_NETWORKS = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA", "omni-path": "Omni-Path", "slingshot": "Slingshot"}
_Held = Mapping[str, Mapping[str, str]]  # host → what holds of it, by condition (`hardware.conditions`)


def of_hosts(facts: Mapping[str, Facts], class_of: Mapping[str, HostClass], plans: Mapping[str, HostPlan], catalog: Catalog) -> list[str]:
    """The notes on all hosts, besides those of the plan's components."""
    used = {"gpus used": ""} if any(host_class.uses_gpus for host_class in class_of.values()) else {}
    held = {name: {**hardware.conditions(facts[name], catalog, alone=len(facts) == 1), **used} for name in sorted(facts)}
    return [
        *_on_driver_branches(facts, catalog),
        *_without_root(plans),
        *_on_unused_gpus(facts, class_of, catalog),
        *_on_hosts_without_gpus(class_of),
        *_on_assumptions(facts, catalog.hardware().notes.assumed),
        *_on_known_problems(facts, plans, held, catalog),
        *_on_hardware(held, catalog),
        *_on_several_networks({name: held[name] for name in held if class_of[name].uses_gpus and "infiniband" not in facts[name].missing}),
    ]


def knowledge(facts: Mapping[str, Facts], catalog: Catalog) -> Knowledge:
    """The newest releases that the catalogue knows, and the hosts whose driver is newer."""
    reach = catalog.reach()
    newer = sorted(name for name, host in facts.items() if host.driver and host.driver.cuda and key(host.driver.cuda) > key(reach.cuda))
    return Knowledge(**vars(reach), newer_drivers=tuple(newer))


def _on_driver_branches(facts: Mapping[str, Facts], catalog: Catalog) -> list[str]:
    """Drivers whose branch gets no fixes any more, by the date of the catalogue: the clock would make plans irreproducible."""
    known, usable = catalog.cuda().driver_branches, sorted(catalog.production_branches())
    free = ((host.driver, name) for name, host in sorted(facts.items()) if not hardware.driver_is_fixed(host, catalog))
    versions = [(driver.version, name) for driver, name in free if driver and driver.version]
    ended = grouped(((version.split(".")[0], month), name) for version, name in versions if (month := known.ended(version)))
    found = []
    for (branch, month), names in ended.items():
        capabilities = {each for name in names for each in gpus.capabilities(facts[name], catalog)}
        others = joined([each for each in usable if catalog.driver().gpus.misfit(each, sorted(capabilities, key=key)) is None])
        supported = f"; NVIDIA supports {others} for these GPUs" if others else ""
        found.append(f"{joined(names)}: NVIDIA's support for driver branch {branch} ended in {month}{supported}")
    return found


def _without_root(plans: Mapping[str, HostPlan]) -> list[str]:
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


def _on_unused_gpus(facts: Mapping[str, Facts], class_of: Mapping[str, HostClass], catalog: Catalog) -> list[str]:
    """GPUs that the plan does not use, by cause."""

    def has_gpus(host: Facts) -> bool:
        return gpus.has_gpu(host, catalog) or gpus.hidden_from_container(host, catalog) or amd.has_gpu(host, catalog)

    unused = grouped((class_of[name].cuda_why, name) for name in sorted(facts) if has_gpus(facts[name]) and not class_of[name].uses_gpus)
    count = {why: sum(len(facts[name].gpus or amd.gpus(facts[name], catalog)) for name in names) for why, names in unused.items()}
    return [f"{joined(names)}: unused GPUs ({count[why] or 'all'}): {why}" for why, names in unused.items()]


def _on_hosts_without_gpus(class_of: Mapping[str, HostClass]) -> Iterator[str]:
    """Hosts without GPUs among hosts that compute on theirs."""
    without = sorted(name for name, host_class in class_of.items() if not host_class.uses_gpus)
    if without and len(without) < len(class_of):
        few = f" (--limit '{','.join(f'!{name}' for name in without)}' leaves {'it' if len(without) == 1 else 'them'} out)"
        yield (
            f"{joined(without)}: no GPU is used there, unlike on the other hosts: every step of training waits for the CPU, and NCCL, "
            f"which connects GPUs only, cannot reach {'it' if len(without) == 1 else 'them'}{few if len(without) <= 3 else ''}"
        )


def _on_known_problems(facts: Mapping[str, Facts], plans: Mapping[str, HostPlan], held: _Held, catalog: Catalog) -> Iterator[str]:
    """Known problems of drivers and of NCCL, the plan's and the one inside PyTorch, that need what these hosts have."""
    nccl, found = catalog.nccl(), list[tuple[tuple[str, str], str]]()
    for name, plan in sorted(plans.items()):
        own, inside = plan.nccl.version if plan.nccl else None, torch.nccl_inside(plan.torch, catalog)
        driver, amdgpu = facts[name].driver if own else None, (facts[name].amd or Amd()).driver
        rocm = catalog.pytorch().rocm.of.get(plan.torch.version.partition("+rocm")[2]) if plan.torch else None
        listed = [
            (f"driver {driver.version}", driver.version, catalog.driver().known_weak) if driver and driver.version else None,
            (f"amdgpu {amdgpu}", amdgpu, rocm.known_weak) if amdgpu and rocm else None,
            (f"NCCL {own}", own, (*nccl.known_weak, *nccl.known_limits)) if own else None,
            (f"the NCCL {inside} inside PyTorch", inside, (*nccl.known_weak, *nccl.known_limits)) if inside else None,
        ]
        of_host: dict[Trouble, tuple[str, str]] = {}
        for what, version, entries in filter(None, listed):
            for trouble in entries:
                if trouble.when and set(trouble.when) <= held[name].keys() and trouble.covers(version):
                    preload = f"load another NCCL into the ranks{f', {own} of this plan' if own and not trouble.covers(own) else ''}: "
                    preload += f"LD_PRELOAD=PATH of its libnccl.so.2 (a wheel's is below {plan.prefix}/nccl)"
                    of_host.setdefault(trouble, (what, f"{trouble}; {trouble.remedy or f'if it does, {preload}'}"))
        found += [(each, name) for each in of_host.values()]
    for (what, problem), names in grouped(found).items():
        yield f"{joined(names)}: {what}: {problem}"


def _on_assumptions(facts: Mapping[str, Facts], known: Mapping[str, str]) -> list[str]:
    """What was assumed for facts that are missing on some hosts and would change the plan."""

    def assumed(host: Facts) -> tuple[str, ...]:
        parts = {"compute capability" if part.endswith("compute_capability") else part for part in host.missing}
        return tuple(part for part in known if part in parts)

    return [
        f"{joined(names)}: missing facts, and what is assumed: " + ", ".join(f"{part} ({known[part]})" for part in parts)
        for parts, names in grouped((assumed(host), name) for name, host in sorted(facts.items())).items()
        if parts
    ]


def _on_hardware(held: _Held, catalog: Catalog) -> list[str]:
    """What hosts' hardware needs; without GPUs that are used NCCL's networks do not matter."""
    found = list[tuple[str, str]]()
    for name, of_host in held.items():
        known = (each for each in catalog.hardware().notes.of if set(each.when) <= of_host.keys() and not set(each.unless) & of_host.keys())
        found += [(each.text.format(*(of_host[condition] for condition in each.when)), name) for each in known]
    return [f"{joined(names)}: {text}" for text, names in grouped(found).items()]


def _on_several_networks(held: _Held) -> Iterator[str]:
    """Hosts with GPUs whose NCCL would take different networks."""
    found = grouped((next((kind for kind in _NETWORKS if kind in of_host), "no RDMA"), name) for name, of_host in held.items())
    if len(found) > 1:
        listed = "; ".join(f"{_NETWORKS.get(kind, kind)} on {joined(names)}" for kind, names in found.items())
        yield f"different networks ({listed}): NCCL hangs between ranks of two of them (nccl#234): for a job over both set NCCL_NET=Socket"
