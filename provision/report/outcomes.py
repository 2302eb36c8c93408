"""What the survey, the plan and the installation came to, as entries of the report."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.diagnosis.logs.explanation import explain
from provision.inventory import Host, Inventory
from provision.plan.model import HostPlan, Plan
from provision.remote.ansible import Event, HostResult, Outcome
from provision.report.model import HostReport, Prospect, Report
from provision.survey import collect
from provision.survey.collect import Survey

_TAIL_LINES = 12  # of Ansible's log, where it failed and no host did


def add_problems(report: Report, survey: Survey) -> None:
    """What the survey found: errors are failures of their host, warnings notes."""
    for problem in survey.problems:
        if problem.severity == "error":
            report.failures.append(Problem("error", problem.what, problem.hint, host=problem.host, where="survey"))
        else:
            report.notes.append(f"{problem.host}: {problem.what}" + (f"; {problem.hint}" if problem.hint else ""))


def add_unfinished(report: Report, inventory: Inventory) -> None:
    """Hosts that nothing is known against when a run ends early: it had not come to its end on them, or not begun."""
    known = {host.host for host in report.hosts} | {failure.host for failure in report.failures}
    report.hosts += [HostReport(host=host.name, state="not finished") for host in inventory.hosts if host.name not in known]


def add_blocked(report: Report, inventory: Inventory) -> None:
    """Hosts that the survey or the plan kept out still have their line in the table."""
    listed = {host.host for host in report.hosts}
    report.hosts += [HostReport(host=host.name, state="blocked") for host in inventory.hosts if host.name not in listed]
    order = [host.name for host in inventory.hosts]
    report.hosts.sort(key=lambda host: order.index(host.host))


def add_conflicts(report: Report, plan: Plan) -> None:
    """Why there is no plan."""
    for conflict in plan.conflicts:
        report.failures.append(Problem("error", f"no plan fits: {conflict.what}", conflict.advice, host=conflict.host, where="plan"))


def add_outcome(report: Report, inventory: Inventory, plan: Plan, outcome: Outcome) -> None:
    """What the installation did on each host, and what failed there."""
    for name, host in plan.hosts.items():
        result = outcome.hosts.get(name)
        report.hosts.append(host_report(host, result))
        if result is None:
            what = "Ansible reported nothing about this host"
            report.failures.append(Problem("error", what, f"read {outcome.log}", host=name, where="install"))
        elif result.failure is not None:
            report.failures.append(failure_of(inventory.host(name), result.failure))
    if outcome.rc != 0 and not report.failures:
        report.failures.append(Problem("error", _tail(outcome.log), f"read {outcome.log}", host="controller", where="install"))


def host_report(host: HostPlan, result: HostResult | None) -> HostReport:
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


def foretell(report: HostReport, result: HostResult, unchecked: Collection[str], *, rewritten: bool, drifted: bool) -> None:
    """Put into a host's line of the report what a real run would do.

    Args:
        unchecked: steps of which the dry run left something out.
        rewritten: whether the manifest there is to say something else, which no dry run of its step tells.
        drifted: whether the survey found that something is not as it was left.
    """
    steps = _prospects(result, unchecked, drifted=drifted)
    if rewritten and "manifest" in steps:
        steps["manifest"] = "will change"
    report.steps = steps
    report.state = "would change" if drifted or result.changed or "will change" in steps.values() else "unchanged"


def _prospects(result: HostResult, unchecked: Collection[str], *, drifted: bool) -> dict[str, Prospect]:
    """What a dry run says of each step.

    What it left out it cannot know once an earlier step will change the host; nor where it could not look at anything, and something is not
    as it was left.
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


def failure_of(host: Host, event: Event) -> Problem:
    """The failure that an event of Ansible is, with the way out where the error is a known one."""
    step = " / ".join(part for part in (event.role, event.task) if part)
    again = "run the same command again: what is done stays done (--limit @failed: only the hosts that failed)"
    if event.kind == "unreachable":
        return Problem("error", event.text, collect.connection_problem(host, event.text).hint, host=host.name, where=step)
    known = explain(event.text, step)
    hint = f"{known.title}: {known.fix[0]} (more: provision doctor explain {known.id}); then {again}" if known else f"fix it, then {again}"
    return Problem("error", event.text, hint, host=host.name, where=step)


def failure_that_ended(error: ProvisionError, inventory: Inventory, step: str) -> Problem:
    """The failure that an error is: its host's where it names one, else the controller's, with the place before the text."""
    if error.where in [host.name for host in inventory.hosts]:
        return Problem("error", error.what, error.hint, host=error.where, where=step)
    return Problem("error", f"{error.where}: {error.what}" if error.where else error.what, error.hint, host="controller", where=step)


def _tail(log: Path) -> str:
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    except OSError as error:
        return str(error)
