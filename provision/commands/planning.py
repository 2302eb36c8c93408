"""The plan of a command: the resolver's choice under the command's options, the lock, and what earlier runs installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date

from provision.base.problems import Remedy
from provision.install.artifacts import UserFiles, with_checksums
from provision.install.rollout import PackageSources, Rollout
from provision.inventory import Inventory
from provision.plan.lock import Lock
from provision.plan.model import CPU_ONLY, HOROVOD_NAMES, NCCL_STRICT, Plan
from provision.plan.options import Options, requirements_of
from provision.plan.request import Request
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements, resolve, what_if
from provision.resolve.host_classes import host_class_of
from provision.resolve.nccl_builds import downgrades
from provision.survey import Facts, collect, installed

_FRESH_DAYS = 30  # a catalogue that is older says so


def make_plan(request: Request, facts: Mapping[str, Facts]) -> Rollout:
    """The plan for the hosts in ``facts``, and where its parts come from.

    What the user left open is as the lock says; without a lock as earlier runs installed it on the hosts. A plan that is incompatible with
    the hosts that ``--limit`` leaves out has conflicts, and no hosts.
    """
    options, inventory, baseline = request.options, request.inventory, request.lock
    requirements, per_host = _requirements(request, facts)
    given = UserFiles(options.nccl_local, options.nccl_tarball.path if options.nccl_tarball else None, options.openmpi_tarball)
    sources = PackageSources(request.engine, options.wheels, options.index_url, options.apt_mirror, given)
    if baseline is None and not options.upgrade:
        baseline = _installed(inventory, facts)
    if baseline is None:
        plan = resolve(facts, requirements, per_host)
    else:
        filled = baseline.fill_in(requirements)
        builds = baseline.builds(per_host)
        plan = resolve(facts, filled, {name: replace(each, builds=builds[name]) for name, each in per_host.items()})
        if plan.conflicts:
            plan = _offer_upgrade(plan, resolve(facts, requirements, per_host), baseline, limited=bool(inventory.left_out))
        else:
            plan, files = baseline.apply(plan, options.catalog)
            plan = replace(plan, notes=(*plan.notes, *_notes(requirements, filled, baseline)))
            sources = replace(sources, locked=files)
    if request.previous and (conflicts := tuple(request.previous.conflicts(plan, inventory.left_out, upgrade=options.upgrade))):
        plan = Plan(conflicts=conflicts)
    return Rollout(request, with_checksums(_aged(plan, request.today), options.wheels), facts, sources)


def with_agreed_downgrade(rollout: Rollout, agreed: Callable[[list[str]], bool]) -> Rollout:
    """The rollout with ``--allow-downgrade`` where a requested NCCL is older than installed packages, nothing else is in conflict, and
    ``agreed`` says so of the lines that announce it; else as it is."""
    options = rollout.request.options
    if not rollout.plan.conflicts or options.allow_downgrade or options.driver or not (options.nccl_version or options.nccl_local):
        return rollout
    changed = make_plan(replace(rollout.request, options=replace(options, allow_downgrade=True)), rollout.facts)
    lines = [
        f"{name}: {package} {now} would be replaced by the older {then}"
        for name, host in changed.plan.hosts.items()
        if host.nccl_packages
        for package, now, then in downgrades(host.nccl_packages.packages, host_class_of(rollout.facts[name], options.catalog))
    ]
    return changed if lines and agreed(lines) else rollout


def plan_after(request: Request, facts: Mapping[str, Facts], changes: Sequence[str]) -> what_if.WhatIf:
    """The plan after changes of the hosts (``driver=580``), held against the one without them; both keep to no lock.

    Raises UsageError for an invalid change.
    """
    after = what_if.what_if(facts, *_requirements(request, facts), what_if.parse(changes, facts, request.options.catalog))
    return replace(after, plan=_aged(after.plan, request.today))


def hint(rollout: Rollout) -> str | None:
    """A change of the hosts that would lift them all; None without one, and where a lock has decided."""
    request, facts = rollout.request, rollout.facts
    return what_if.hint(facts, *_requirements(request, facts)) if request.lock is None else None


def _requirements(request: Request, facts: Mapping[str, Facts]) -> tuple[Requirements, dict[str, HostRequirements]]:
    """The resolver's input besides the facts, without what the lock says."""
    requirements = _with_earlier_options(requirements_of(request.options, request.engine), request.options, facts)
    return requirements, {
        host.name: HostRequirements(host.slots, collect.prefix_of(host, facts[host.name]), host.interface)
        for host in request.inventory.hosts
        if host.name in facts
    }


def _with_earlier_options(requirements: Requirements, options: Options, facts: Mapping[str, Facts]) -> Requirements:
    """The requirements with ``--horovod-names``, ``--cpu`` and ``--nccl strict`` of earlier runs: those of one host
    count for all, as they work together."""
    earlier = {option for host in installed.plans(facts) for option in host.engine.options}
    names = {"horovod_names": HOROVOD_NAMES, "cpu": CPU_ONLY, "nccl_strict": NCCL_STRICT}
    kept = {field: True for field, option in names.items() if getattr(options, field) is None and option in earlier}
    return replace(requirements, **kept)  # type: ignore[arg-type]


def _installed(inventory: Inventory, facts: Mapping[str, Facts]) -> Lock | None:
    found = Plan({host.name: host for host in installed.plans(facts)})
    return Lock.from_installed(found, inventory)


def _notes(requirements: Requirements, filled: Requirements, baseline: Lock) -> list[str]:
    """What the lock decided and the user may not expect."""
    notes = []
    own = requirements.catalog.reach().overlay
    if baseline.catalogue and baseline.catalogue != own:
        now = "none are in use now" if own is None else "they have changed since"
        notes.append(f"{baseline.title} was written with catalogue files of your own; {now}")
    if requirements.torch and not filled.torch:
        notes.append(f"PyTorch is left out, to keep to {baseline.title}: --torch RELEASE or --upgrade adds it")
    if filled.torch_index and not requirements.torch_index:
        notes.append(
            f"PyTorch comes from {filled.torch_index}, to keep to {baseline.title}; for a login give it again: --index-url torch=URL"
        )
    return notes


def _aged(plan: Plan, today: date) -> Plan:
    """The plan, with a note in front where the catalogue is old."""
    days = (today - date.fromisoformat(plan.knowledge.date)).days if plan.knowledge else 0
    if plan.knowledge is None or days <= _FRESH_DAYS:
        return plan
    what = "newer releases and faults found since are not in it; `provision catalog update` looks for them"
    return replace(plan, notes=(f"the catalogue is of {plan.knowledge.date}, {days} days old: {what}", *plan.notes))


def _offer_upgrade(plan: Plan, without_baseline: Plan, baseline: Lock, *, limited: bool) -> Plan:
    """The conflicts of a plan that keeps to ``baseline``, with ``--upgrade`` as the first remedy where there is a plan without it."""
    if without_baseline.conflicts:
        return without_baseline
    text = f"--upgrade{' without --limit' if limited else ''}, which resolves again instead of keeping to {baseline.title}"
    conflicts = [replace(one, remedies=(Remedy(text, "options"), *one.remedies[:1])) for one in plan.conflicts]
    return replace(plan, conflicts=tuple(conflicts))


def describe_upgrade(rollout: Rollout) -> list[str]:
    """What a plan with ``--upgrade`` changes compared with the lock, or without one with what is installed; a line each."""
    request = rollout.request
    if (error := request.invalid) is not None:
        return [f"{f'{error.where}: ' if error.where else ''}{error.what}; --upgrade replaces it"]
    baseline = request.previous or _installed(request.inventory, rollout.facts)
    if baseline is None or rollout.plan.conflicts:
        return []
    changes = baseline.differences(rollout.plan) or [f"no change: the plan is the same as {baseline.title}"]
    return [f"upgrade: {line}" for line in changes]
