"""The main job: survey, plan, install, train, report. It strings the steps together; each step lives in a file of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from provision import (
    builds,
    catalog,
    converged,
    decided,
    downloads,
    dry_run,
    engine_source,
    facts,
    hold,
    install,
    installed,
    interrupts,
    last_run,
    launch,
    lock_file,
    paths,
    tarball,
)
from provision import lock as locking
from provision import remove as removing
from provision import survey as surveying
from provision.bundle.archive import Bundle, unpack
from provision.bundle.gather import Places, gather
from provision.doctor.logs.reading import explain
from provision.engine_source import EngineSource
from provision.errors import ProvisionError, UsageError, told
from provision.install import Sources
from provision.inventory import Host, Inventory, by_name
from provision.plan import HostPlan, Plan
from provision.playbook import Event, HostResult, Outcome
from provision.progress import Progress
from provision.remove import HostRemoval
from provision.report import Failure, HostReport, Report
from provision.resolve import DEFAULT_PREFIX, HostWishes, Wishes, resolve
from provision.resolve.blocked import some
from provision.resolve.wishes import NcclSource, OpenMpiSource
from provision.session import Interrupted, Session
from provision.supplies import Given, with_checksums
from provision.survey import Survey


@dataclass(frozen=True)
class Options:
    """What the user asked for on the command line, besides the hosts.

    ``upgrade`` leaves provision.lock out of account, ``full`` runs every step also where the survey shows nothing to do, and
    ``first_step`` leaves out the steps before it. ``bundle``: a file from which everything comes instead of from a network.
    """

    torch: bool = True
    torch_version: str | None = None
    torch_index: str | None = None
    index_url: str | None = None
    wheels: Path | None = None
    nccl_source: NcclSource = "auto"
    nccl_version: str | None = None
    nccl_local: Path | None = None
    nccl_tarball: tarball.Sources | None = None
    openmpi: OpenMpiSource = "auto"
    openmpi_version: str | None = None
    openmpi_tarball: Path | None = None
    openmpi_cuda: bool = False
    openmpi_verbs: bool = False
    allow_bad: bool = False
    check: bool = False
    upgrade: bool = False
    full: bool = False
    first_step: str | None = None
    bundle: Path | None = None
    apt_mirror: str | None = None
    smoke: launch.SmokeOptions | None = field(default_factory=launch.SmokeOptions)


def hold_hosts(inventory: Inventory, purpose: str) -> AbstractContextManager[None]:
    """The lock of every host of the inventory, for ``with``."""
    return hold.hosts(paths.home() / "locks", [(host.address, host.port or 22) for host in inventory.hosts], purpose)


def index_asked(options: Options) -> Literal["new", "all"] | None:
    """Which hosts' own package indexes count for a plan: none where another is named, and not where the plan keeps to what is there."""
    if options.index_url:
        return None
    return "all" if options.upgrade or options.nccl_version else "new"


def _index_counts(facts: Mapping[str, Any], options: Options) -> dict[str, list[str]]:
    """What a host's package index offers, as far as it matters: not of what is there already and is not asked for anew."""
    offered: dict[str, list[str]] = {} if options.index_url else facts.get("wheel_candidates") or {}
    keeps = bool(facts.get("installed")) and not options.upgrade
    return {name: versions for name, versions in offered.items() if not (keeps and name == "openmpi")}


def wishes_of(options: Options, engine: EngineSource) -> Wishes:
    """What the resolver is asked for, as the user wrote it."""
    sources = options.nccl_tarball
    return Wishes(
        torch=options.torch,
        torch_version=options.torch_version,
        torch_index=options.torch_index,
        wheels=tuple(sorted(path.name for path in options.wheels.glob("*.whl"))) if options.wheels else (),
        nccl_source=_nccl_source(options),
        nccl_version=options.nccl_version,
        nccl_local=options.nccl_local.name if options.nccl_local else None,
        nccl_local_sha256=downloads.digest(options.nccl_local) if options.nccl_local else None,
        nccl_tarball=sources.path.name if sources else None,
        nccl_tarball_version=sources.version if sources else None,
        nccl_tarball_sha256=sources.sha256 if sources else None,
        openmpi=options.openmpi,
        openmpi_version=options.openmpi_version,
        openmpi_tarball=options.openmpi_tarball.name if options.openmpi_tarball else None,
        openmpi_tarball_sha256=downloads.digest(options.openmpi_tarball) if options.openmpi_tarball else None,
        openmpi_cuda=options.openmpi_cuda,
        openmpi_verbs=options.openmpi_verbs,
        allow_bad=options.allow_bad,
        engine_version=engine.version,
        engine_sha256=engine.sha256,
    )


def _nccl_source(options: Options) -> NcclSource:
    """Who gives a file wants it."""
    if options.nccl_source != "auto":
        return options.nccl_source
    return "local" if options.nccl_local else "source" if options.nccl_tarball else "auto"


def make_plan(
    inventory: Inventory, known: Mapping[str, Mapping[str, Any]], options: Options, locked: locking.Lock | None = None
) -> tuple[Plan, Sources]:
    """The plan for the hosts in ``known`` (their facts), and where its parts come from.

    Where there is a lock, it answers what the user left open; where there is none, what earlier runs have left on the hosts does. A plan
    for some hosts that does not fit those that ``--limit`` leaves out has conflicts, and no hosts.
    """
    plan, sources = _make_plan(inventory, known, options, locked)
    if unfit := decided.conflicts(plan, inventory, upgrade=options.upgrade):
        plan = Plan(conflicts=tuple(unfit))
    return with_checksums(plan, options.wheels), sources


def _make_plan(
    inventory: Inventory, known: Mapping[str, Mapping[str, Any]], options: Options, locked: locking.Lock | None
) -> tuple[Plan, Sources]:
    known = {name: {**each, "wheel_candidates": _index_counts(each, options)} for name, each in known.items()}
    source = engine_source.pack()
    wishes = wishes_of(options, source)
    given = Given(options.nccl_local, options.nccl_tarball.path if options.nccl_tarball else None, options.openmpi_tarball)
    sources = Sources(source, options.wheels, options.index_url, options.apt_mirror, given)
    asked = {host.name: _host_wishes(host, known[host.name]) for host in inventory.hosts if host.name in known}
    kept = locked if locked is not None or options.upgrade else _as_installed(inventory, known)
    if kept is None:
        return resolve(known, wishes, asked), sources
    filled = locking.fill_in(wishes, kept)
    builds = kept.builds(asked)
    plan = resolve(known, filled, {name: replace(each, builds=builds[name]) for name, each in asked.items()})
    name = kept.kept_to
    if plan.conflicts:
        limited = bool(decided.left_out(inventory))
        return _without_lock(plan, resolve(known, wishes, asked), name, limited=limited), sources
    plan = locking.applied(plan, kept)
    differ = (f"{name} is {line}: all of these hosts get one, resolved anew" for line in decided.mixed(kept))
    plan = replace(plan, notes=(*plan.notes, *differ))
    if name == decided.LAST_RUN:
        plan = replace(plan, notes=(*plan.notes, f"versions are {name}, so that these hosts fit those that --limit leaves out"))
    if wishes.torch and not filled.torch:
        plan = replace(plan, notes=(*plan.notes, f"PyTorch is left out, to keep to {name}: --torch VERSION or --upgrade brings it"))
    if filled.torch_index and not wishes.torch_index:
        said = f"to keep to {name}; where it needs a login, give it again: --torch-index"
        plan = replace(plan, notes=(*plan.notes, f"PyTorch comes from {filled.torch_index}, {said}"))
    if locked is None or not locked.environments:
        return plan, sources
    new = locking.unknown_environments(plan, locked)
    notes = (f"{locking.NAME} has no files for {line}: they come as the index has them" for line in new)
    return replace(plan, notes=(*plan.notes, *notes)), replace(sources, locked=locking.files_for(plan, locked))


def _as_installed(inventory: Inventory, known: Mapping[str, Mapping[str, Any]]) -> locking.Lock | None:
    """What stands in for a lock: versions and sources, and no files, of what is on the hosts; None where nothing is."""
    there = {host.name: host for host in installed.plans(known)}
    return replace(locking.of_plan(Plan(there), {}, None, inventory), kept_to="what is installed there") if there else None


def _without_lock(plan: Plan, anew: Plan, name: str, *, limited: bool) -> Plan:
    """The conflicts of a plan that keeps to the lock ``name``: where that is what stands in the way, giving it up is the first way out.

    Other options are none then: they answer wishes that the lock had, not the user.
    """
    if anew.conflicts:
        return anew
    upgrade = f"--upgrade{' without --limit' if limited else ''}, which resolves anew instead of keeping to {name}"
    kept = [[way for way in one.ways_out if "--" not in way.replace("--limit", "")] for one in plan.conflicts]
    conflicts = [replace(one, ways_out=(upgrade, *ways[:1])) for one, ways in zip(plan.conflicts, kept, strict=True)]
    return replace(plan, conflicts=tuple(conflicts))


def from_facts(
    path: Path, inventory: Inventory | None, limit: str | None = None
) -> tuple[Inventory, dict[str, dict[str, Any]], list[facts.Problem]]:
    """(the hosts to plan for, the facts of those that were surveyed, what is odd about them), from a file and without touching a host.

    Without an inventory it is the hosts of the file, after ``limit``.

    Raises:
        UsageError: the file cannot be used, or holds facts of none of the hosts.
    """
    found = facts.load_file(path)
    if inventory is None:
        if limit and last_run.FAILED in limit.split(","):
            raise UsageError(f"--limit {limit}: a file of facts knows no last run", todo="name HOSTS besides --facts")
        inventory = by_name(str(path), list(found), limit)
    listed = {
        host.name: facts.with_python(found[host.name], host.python, inventory.where(host, "provision_python"))
        for host in inventory.hosts
        if host.name in found
    }
    known = {name: each for name, each in listed.items() if not (each.get("unreachable") or each.get("missing_python"))}
    problems = [
        problem
        for name in listed
        if name not in known
        for problem in facts.problems(name, listed[name], needed_mb=0, prefix=DEFAULT_PREFIX)
    ]
    if not known:
        again = f"make them anew: provision survey {inventory.argument} --json"
        said = "; ".join(map(str, problems)) or "the facts are of none of the inventory's hosts"
        raise UsageError(said, where=str(path), todo=again)
    untested: dict[str, list[str]] = {}
    for name, each in known.items():
        if odd := facts.untested(each["os"]):
            untested.setdefault(odd, []).append(name)
    return inventory, known, [*problems, *(facts.Problem("warning", some(names), odd) for odd, names in untested.items())]


def up(inventory: Inventory, options: Options, progress: Progress, passwords: Mapping[str, str]) -> Report:
    """Make every host of the inventory ready and prove it; problems of single hosts are in the report, the others go on."""
    catalog.check()
    if options.smoke:
        launch.check_options([(host.address, host.slots or 1) for host in inventory.hosts], options.smoke)
    locked = None if options.upgrade else decided.to_keep(inventory)
    with _run(inventory, "provision up", progress, passwords) as (session, report):
        session.step = "bundle"
        bundle = unpack(options.bundle, session.folder / "bundle") if options.bundle else None
        if bundle is not None:
            locked, options = bundle.lock, _with_files_of(bundle, options)
        session.step = "survey"
        survey = surveying.look(session, index=None if bundle else index_asked(options))
        _add_problems(report, survey)
        usable = {name: facts for name, facts in survey.hosts.items() if name not in survey.blocked}
        not_begun = _not_begun(usable, options.first_step)
        report.failures += not_begun
        if usable and not not_begun:
            session.step = "plan"
            plan, sources = make_plan(inventory, usable, options, locked)
            session.write("plan.json", plan.as_dict())
            report.notes += [*plan.notes, *_without_apt(plan, options.apt_mirror)]
            _add_conflicts(report, plan)
            if options.upgrade:
                for line in upgrade(inventory, usable, plan):
                    progress.line(line)
            if bundle is not None:
                bundle.must_hold(plan)
                builds.adopt(bundle.folder / "supplies")
                sources = replace(sources, bundle=bundle, given=_with_sources_of(bundle, sources.given))
            if plan.hosts:
                session.step = "install"
                notes_what_is_decided = not options.check and not options.first_step  # which leaves out steps
                try:
                    files = _make_ready(session, report, plan, usable, sources, options)
                except Interrupted:
                    if notes_what_is_decided:
                        decided.note(inventory, plan, list(plan.hosts), session.folder)
                    raise
                if notes_what_is_decided:
                    decided.note(inventory, plan, [failure.host for failure in report.failures], session.folder)
                if options.smoke and not options.check and not report.failures:
                    session.step = "training"
                    _add_smoke(report, session, plan, _with_data_of(bundle, options.smoke))
                if options.first_step and not options.check:
                    report.notes.append(_WITHOUT_RECORD.format(step=options.first_step))
                elif report.ok and not options.check:
                    session.step = "lock"
                    _write_lock(inventory, plan, files, report)
    return report


_WITHOUT_RECORD = (
    "--from {step}: earlier steps were left out, so it is not written down that these hosts hold the plan, neither there nor in "
    f"{locking.NAME}; a run without --from looks at all steps and does that"
)


def _not_begun(known: Mapping[str, Mapping[str, Any]], first: str | None) -> list[Failure]:
    """The hosts on which ``--from`` cannot begin at a step, because there is no environment."""
    if first is None or "python" in install.steps(first):
        return []
    without = [name for name, each in known.items() if not ((each.get("installed") or {}).get("venv") or {}).get("works")]
    said = f"--from {first}: the steps before it are missing here: there is no working environment in the prefix; nothing was changed"
    return [Failure(name, "survey", said, "leave --from out") for name in without]


def _without_apt(plan: Plan, mirror: str | None) -> list[str]:
    others = [name for name, host in plan.hosts.items() if host.family != "debian"]
    return [f"{some(others)}: --apt-mirror is for Debian and Ubuntu: packages come from where they always do"] if mirror and others else []


def bundle(inventory: Inventory, options: Options, target: Path, progress: Progress, passwords: Mapping[str, str]) -> Survey:
    """Gather in ``target`` all that the plan needs; raises ProvisionError when something cannot be had. Returns the survey."""
    with hold_hosts(inventory, "provision bundle"):
        session = Session(inventory, progress, passwords)
        try:
            survey = surveying.look(session)
            if survey.blocked:
                return survey
            locked = None if options.upgrade else decided.to_keep(inventory)
            plan, sources = make_plan(inventory, survey.hosts, options, locked)
            refuse_conflicts(plan)
            places = Places(options.index_url, options.torch_index, options.wheels, options.apt_mirror)
            gather(session, plan, survey.hosts, places, sources, target, locked)
            return survey
        finally:
            session.close()


def _with_files_of(bundle: Bundle, options: Options) -> Options:
    """The options with the files that were given when the bundle was made, where none are given now."""
    nccl_sources = bundle.supply("nccl_tarball")
    return replace(
        options,
        nccl_local=options.nccl_local or bundle.supply("nccl_local"),
        nccl_tarball=options.nccl_tarball or (tarball.nccl(nccl_sources) if nccl_sources else None),
        openmpi_tarball=options.openmpi_tarball or bundle.supply("openmpi_tarball"),
    )


def _with_sources_of(bundle: Bundle, given: Given) -> Given:
    """What was fetched for the bundle takes the place of fetching it."""
    return replace(
        given,
        nccl_tarball=given.nccl_tarball or bundle.supply("nccl_sources"),
        openmpi_tarball=given.openmpi_tarball or bundle.supply("openmpi_sources"),
    )


def _with_data_of(bundle: Bundle | None, options: launch.SmokeOptions) -> launch.SmokeOptions:
    if bundle is None or bundle.data is None or options.data is not None:
        return options
    return replace(options, cache=bundle.cache, source=bundle.data)


def _make_ready(
    session: Session, report: Report, plan: Plan, facts: Mapping[str, Mapping[str, Any]], sources: Sources, options: Options
) -> dict[str, dict[str, Any]]:
    """Run the installation where the survey does not show that there is nothing to do; returns per host the files that pip took."""
    manifests = install.manifests(plan, session.inventory, facts)
    reasons = _reasons_to_run(plan, manifests, facts)
    if not reasons and not options.full and not options.first_step:
        session.progress.line("the survey shows that every host holds what the plan says: no step has to run (--full runs them all)")
        report.hosts += [_host_report(host, HostResult()) for host in plan.hosts.values()]
        return {name: (facts[name].get("installed") or {}).get("files") or {} for name in plan.hosts}
    for name, reason in reasons.items():
        session.progress.line(f"{name}: {reason}", "dim")
    done = install.install(session, plan, facts, sources, check=options.check, first=options.first_step)
    _add_outcome(report, session.inventory, plan, done.outcome)
    if options.check:
        for host in report.hosts:
            result, found = done.outcome.hosts.get(host.host), facts.get(host.host, {})
            if result is not None and result.failure is None:
                rewritten = not options.first_step and converged.is_rewritten(manifests[host.host], found)
                dry_run.foretell(host, result, rewritten=rewritten, drifted=bool(found.get("drift")))
    report.notes += done.stand_ins
    for name, packages in done.unlocked.items():
        said = f"{locking.NAME} did not know {', '.join(packages)}"
        report.notes.append(f"{name}: {said}: taken as the index had it, without a checksum to compare with; it is in the lock from now on")
    return done.files


def _reasons_to_run(plan: Plan, manifests: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Host → why the installation has to run there; hosts that hold everything are not in it."""
    found = {}
    for name, wanted in manifests.items():
        bad = plan.hosts[name].hwloc
        reason = f"{bad.package} is to be taken off" if bad and bad.source == "remove" else converged.reason_to_run(wanted, facts[name])
        if reason:
            found[name] = reason
    return found


def upgrade(inventory: Inventory, known: Mapping[str, Mapping[str, Any]], plan: Plan) -> list[str]:
    """What a new resolution changes against the lock, or without one against what is on the hosts, in lines; none for new hosts."""
    try:
        locked = lock_file.read(inventory)
    except UsageError as error:
        return [f"{error.where}: {error.what}; --upgrade writes it anew"]
    before = locked or _as_installed(inventory, known)
    if before is None or plan.conflicts:
        return []
    changes = locking.differences(plan, before) or [f"nothing: the plan is {before.kept_to}"]
    return [f"upgrade: {line}" for line in changes]


def _write_lock(inventory: Inventory, plan: Plan, files: Mapping[str, Mapping[str, Mapping[str, Any]]], report: Report) -> None:
    try:
        lock_file.write(inventory, locking.of_plan(plan, files, decided.for_all(inventory), inventory))
    except OSError as error:
        report.notes.append(f"provision.lock could not be written: {error}")


def smoke(inventory: Inventory, options: launch.SmokeOptions, progress: Progress, passwords: Mapping[str, str]) -> Report:
    """The training job alone, on hosts that hold what an earlier run installed, as their manifests say."""
    launch.check_options([(host.address, host.slots or 1) for host in inventory.hosts], options)
    with _run(inventory, "provision smoke", progress, passwords) as (session, report):
        survey = surveying.look(session)
        _add_problems(report, survey)
        for name in installed.without_manifest(survey.hosts):
            report.failures.append(Failure(name, "smoke", "nothing is installed here yet", f"provision up {inventory.argument}"))
        if not report.failures:
            plan = installed.plan(inventory, survey.hosts)
            report.hosts = [_host_report(host, HostResult()) for host in plan.hosts.values()]
            session.step = "training"
            _add_smoke(report, session, plan, options)
    return report


def remove(
    inventory: Inventory,
    progress: Progress,
    passwords: Mapping[str, str],
    wanted: Callable[[list[HostRemoval]], bool],
) -> list[HostRemoval]:
    """Take off the hosts what earlier runs put there, after ``wanted`` has seen what would go and agreed; else that is what returns."""
    with hold_hosts(inventory, "provision remove"):
        session = Session(inventory, progress, passwords)
        try:
            survey = surveying.look(session)
            found = removing.remove(session, survey, dry_run=True)
            if any(one.state == "would remove" for one in found) and wanted(found):
                found = removing.remove(session, survey, dry_run=False)
            return found
        finally:
            session.close()


@contextmanager
def _run(inventory: Inventory, purpose: str, progress: Progress, passwords: Mapping[str, str]) -> Iterator[tuple[Session, Report]]:
    """The frame of every run: the hosts are held, the report is written whatever comes, and hosts that were kept out have their line."""
    began = time.monotonic()
    with interrupts.also_when_ended(), hold_hosts(inventory, purpose):
        session = Session(inventory, progress, passwords)
        report = Report(session.run_id, str(session.folder), last_run.identity(inventory))
        try:
            yield session, report
        except BaseException as error:
            said = told(error)
            report.failures.append(Failure(said.where or "controller", session.step, said.what, said.todo))
            session.locks_left |= said is not error  # a defect, or a Ctrl-C between two steps, may have come while hosts were locked
            raise
        finally:
            with interrupts.held_back():
                _add_blocked(report, inventory)
                report.seconds = time.monotonic() - began
                session.write("report.json", report.as_dict())
                session.close()


def _add_conflicts(report: Report, plan: Plan) -> None:
    for conflict in plan.conflicts:
        report.failures.append(Failure(conflict.host, "plan", f"no plan fits: {conflict.constraint}", "  or  ".join(conflict.ways_out)))


def refuse_conflicts(plan: Plan) -> None:
    """Raise ProvisionError for the plan's first conflict; hosts are unchanged."""
    if plan.conflicts:
        first = plan.conflicts[0]
        others = f" (and {len(plan.conflicts) - 1} more)" if len(plan.conflicts) > 1 else ""
        raise ProvisionError(f"no plan fits: {first.constraint}{others}", where=first.host, todo="  or  ".join(first.ways_out))


def _host_wishes(host: Host, found: Mapping[str, Any]) -> HostWishes:
    return HostWishes(host.slots, surveying.prefix_of(host, found), host.interface)


def _add_problems(report: Report, survey: Survey) -> None:
    for problem in survey.problems:
        if problem.level == "error":
            report.failures.append(Failure(problem.host, "survey", problem.what, problem.todo))
        else:
            report.notes.append(f"{problem.host}: {problem.what}" + (f"; {problem.todo}" if problem.todo else ""))


def _add_blocked(report: Report, inventory: Inventory) -> None:
    """Hosts that the survey kept out still have their line in the table."""
    listed = {host.host for host in report.hosts}
    report.hosts += [HostReport(host.name, "blocked") for host in inventory.hosts if host.name not in listed]
    order = [host.name for host in inventory.hosts]
    report.hosts.sort(key=lambda host: order.index(host.host))


def _add_outcome(report: Report, inventory: Inventory, plan: Plan, outcome: Outcome) -> None:
    for name, host in plan.hosts.items():
        result = outcome.hosts.get(name)
        report.hosts.append(_host_report(host, result))
        if result is None:
            report.failures.append(Failure(name, "install", "Ansible reported nothing about this host", f"read {outcome.log}"))
        elif result.failure is not None:
            report.failures.append(_failure(inventory.host(name), result.failure))
    if outcome.rc != 0 and not report.failures:
        report.failures.append(Failure("controller", "install", _tail(outcome.log), f"read {outcome.log}"))


def _host_report(host: HostPlan, result: HostResult | None) -> HostReport:
    if result is None or result.failure is not None:
        unreachable = result is not None and result.failure is not None and result.failure.kind == "unreachable"
        changed, seconds = (result.changed, result.seconds) if result else (0, 0.0)
        return HostReport(host.name, "unreachable" if unreachable else "failed", changed=changed, seconds=seconds)
    return HostReport(
        host.name,
        "installed" if result.changed else "unchanged",
        openmpi=host.openmpi.version,
        cmake=host.cmake.version,
        python=host.python.version,
        torch=host.torch.version if host.torch else "-",
        nccl=host.nccl.version if host.nccl else "-",
        engine=host.engine.version,
        changed=result.changed,
        seconds=result.seconds,
    )


def _failure(host: Host, event: Event) -> Failure:
    step = " / ".join(part for part in (event.role, event.task) if part)
    again = "run the same command again: what is done stays done (--limit @failed: only the hosts that failed)"
    if event.kind == "unreachable":
        return Failure(host.name, step, event.text, surveying.connection_problem(host, event.text).todo)
    known = explain(event.text, step)
    todo = f"{known.title}: {known.fix[0]} (more: provision doctor explain {known.id}); then {again}" if known else f"mend it, then {again}"
    return Failure(host.name, step, event.text, todo)


def _add_smoke(report: Report, session: Session, plan: Plan, options: launch.SmokeOptions) -> None:
    try:
        result = launch.smoke(session, plan, options)
    except Interrupted:
        raise
    except ProvisionError as error:  # the installation before it stands, and its table is still to be shown
        report.failures.append(Failure(error.where or "controller", "training", error.what, error.todo))
        return
    report.smoke = result.report
    report.smoke_summary = result.summary
    report.smoke_faults = list(result.faults)
    if not result.faults:
        for host in report.hosts:
            host.state = "ready"


def _tail(log: Path, lines: int = 12) -> str:
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)
