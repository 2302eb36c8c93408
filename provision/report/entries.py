"""What the survey, the plan and the installation contribute to the report of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.base.text import grouped, joined, shortened
from provision.diagnosis import logs
from provision.install import drift
from provision.install.installer import Installed
from provision.install.roles import partly_checked
from provision.install.rollout import Rollout
from provision.inventory import Inventory
from provision.plan import lock
from provision.plan.model import HostPlan, Plan
from provision.remote.ansible import Event, HostResult, Outcome
from provision.report.model import HostReport, Prospect, Report, State
from provision.survey import collect


def add_survey(report: Report, survey: collect.Survey) -> None:
    """The survey's problems: errors are failures of their host, warnings are notes. And which hosts have simulated GPUs."""
    report.failures += [replace(problem, where="survey") for problem in survey.problems if problem.severity == "error"]
    warnings = (((each.what, each.hint), str(each.host)) for each in survey.problems if each.severity != "error")
    report.notes += [f"{shortened(hosts)}: {'; '.join(filter(None, said))}" for said, hosts in grouped(warnings).items()]
    report.simulated = [name for name, facts in survey.hosts.items() if facts.simulated]


def add_plan(report: Report, rollout: Rollout, hint: str | None) -> None:
    """What there is to say about the plan, with the resolver's hint, or why there is none."""
    plan = rollout.plan
    report.notes += plan.notes
    if hint is not None:
        report.notes.append(f"hint: {hint}; see provision plan")
    others = [name for name, host in plan.hosts.items() if host.family != "debian"]
    if rollout.request.options.apt_mirror and others:
        report.notes.append(f"{joined(others)}: --apt-mirror is for Debian and Ubuntu; packages come from the configured sources")
    for conflict in plan.conflicts:
        report.failures.append(replace(conflict, what=f"no plan fits: {conflict.what}", hint=conflict.advice, remedies=(), where="plan"))


def add_installation(report: Report, rollout: Rollout, done: Installed) -> None:
    """What the installation changed on each host, and what failed there."""
    outcome = done.outcome
    for name, host in rollout.plan.hosts.items():
        result = outcome.hosts.get(name)
        report.hosts.append(host_line(host, result))
        if result is None:
            what = "Ansible reported nothing about this host"
            report.failures.append(Problem("error", what, f"read {outcome.log}", host=name, where="install", id="no-result"))
        elif result.failure is not None:
            report.failures.append(task_failure(rollout, result.failure))
    report.notes += done.fallbacks
    for name, packages in done.unlocked.items():
        report.notes.append(
            f"{name}: {lock.NAME} did not know {', '.join(packages)}: installed as the index had it, without a checksum to compare with; "
            "it is in the lock from now on"
        )


def add_drivers(report: Report, rollout: Rollout, outcome: Outcome) -> bool:
    """What failed while drivers were installed, and whether nothing did; hosts that are fine get no line yet."""
    failed = [task_failure(rollout, result.failure) for result in outcome.hosts.values() if result.failure is not None]
    report.failures += failed
    if not failed:
        report.notes.append(f"{joined(rollout.drivers)}: NVIDIA's driver was installed and the host rebooted; nvidia-smi answers")
    return not failed


def add_complete(report: Report, plan: Plan) -> None:
    """Hosts that hold the plan already."""
    report.hosts += [host_line(host, HostResult()) for host in plan.hosts.values()]


def add_dry_run(report: Report, rollout: Rollout, outcome: Outcome) -> None:
    """What a run without ``--check`` would do on each host."""
    partial = rollout.request.options.first_step is not None  # it leaves out steps, and so does not write the manifest
    for line in report.hosts:
        result, found = outcome.hosts.get(line.host), rollout.facts.get(line.host)
        if result is None or found is None or result.failure is not None:
            continue
        rewritten = not partial and drift.is_rewritten(rollout.manifests[line.host], found)
        unchecked = partly_checked(rollout.plan.hosts[line.host])
        set_prospects(line, result, unchecked, rewritten=rewritten, drifted=bool(found.drift))


def set_prospects(line: HostReport, result: HostResult, unchecked: Collection[str], *, rewritten: bool, drifted: bool) -> None:
    """Put what a real run would do into a host's line.

    Args:
        unchecked: steps of which the dry run skipped something.
        rewritten: whether the manifest on the host will change, which the dry run of its step cannot tell.
        drifted: whether the survey found that something is not as it was left.
    """
    line.steps = _prospects(result, unchecked, drifted=drifted)
    if rewritten and "manifest" in line.steps:
        line.steps["manifest"] = "will change"
    line.state = "would change" if drifted or result.changed or "will change" in line.steps.values() else "unchanged"


def add_missing_hosts(report: Report, inventory: Inventory, state: State) -> None:
    """A line for each host that has none; where a run ended early, those that failed are left for the state ``blocked``."""
    listed = {line.host for line in report.hosts}
    if state != "blocked":
        listed |= {failure.host for failure in report.failures if failure.host}
    report.hosts += [HostReport(host=host.name, state=state) for host in inventory.hosts if host.name not in listed]
    order = [host.name for host in inventory.hosts]
    report.hosts.sort(key=lambda line: order.index(line.host))


def host_line(host: HostPlan, result: HostResult | None) -> HostReport:
    """A host's line after the installation; without a result nothing is known of it."""
    if result is None or result.failure is not None:
        unreachable = result is not None and result.failure is not None and result.failure.kind == "unreachable"
        changed, seconds = (result.changed, result.seconds) if result else (0, 0.0)
        return HostReport(host=host.name, state="unreachable" if unreachable else "failed", changed=changed, seconds=seconds)
    return HostReport(
        host=host.name,
        state="installed" if result.changed else "unchanged",
        openmpi=host.openmpi.version,
        cmake=host.cmake.version,
        python=host.python.version,
        torch=host.torch.version if host.torch else "-",
        nccl=host.nccl.version if host.nccl else "-",
        engine=host.engine.version,
        changed=result.changed,
        seconds=result.seconds,
    )


def _prospects(result: HostResult, unchecked: Collection[str], *, drifted: bool) -> dict[str, Prospect]:
    """What a dry run says about each step.

    About tasks that it skipped it knows nothing once an earlier step will change the host; nor where it could check nothing at all and the
    host has drifted.
    """
    found: dict[str, Prospect] = {}
    changing = False
    for name, step in result.steps.items():
        if name == "guard":
            continue
        unknown = name in unchecked and (changing or (drifted and step.ran == 0))
        found[name] = "will change" if step.changed else "cannot know yet" if unknown else "will not change"
        changing = changing or step.changed > 0
    return found


def task_failure(rollout: Rollout, event: Event) -> Problem:
    """The failure of an Ansible task, with a hint from the doctor where the error is a known one."""
    host = rollout.inventory.host(event.host)
    step = " / ".join(part for part in (event.role, event.task) if part)
    again = "run the same command again: finished steps are kept (--limit @failed: only the hosts that failed)"
    if event.kind == "unreachable":
        return replace(collect.connection_problem(host, event.text, rollout.request.options.catalog), what=event.text, where=step)
    known = logs.root_cause(event.text, step, rollout.request.options.catalog)
    hint = f"{known.what}: {known.fix[0]} (more: provision doctor explain {known.id}); then {again}" if known else f"fix it, then {again}"
    return Problem("error", event.text, hint, host=host.name, where=step, id=known.id if known else "task-failed")


def error_failure(error: ProvisionError, inventory: Inventory, step: str) -> Problem:
    """An error that ended the run, as a failure of the host that it names, else of the controller."""
    of_host = error.where in [host.name for host in inventory.hosts]
    what = f"{error.where}: {error.what}" if error.where and not of_host else error.what
    return Problem("error", what, error.hint, host=error.where if of_host else "controller", where=step, id="run-ended-early")
