"""Brings the facts of hosts home and has them examined: of this machine directly, of others through the survey's round trip
and one more in which they look at each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from provision import facts
from provision.base import resources
from provision.base.errors import ProvisionError, UsageError
from provision.diagnosis.findings import Finding
from provision.doctor import reach
from provision.doctor.checks import examine
from provision.facts import Facts, Unsurveyed
from provision.remote.session import Session
from provision.survey import collect

HERE = "localhost"
_PATIENCE_S = 60.0
_NEEDED_MB = 200  # a host that is only looked at needs room for a job, not for an installation


@dataclass(frozen=True)
class Look:
    """What the look at hosts brought.

    Attributes:
        facts: of the hosts that answered.
        names: of all hosts that were asked.
        bandwidth: from host → to host → megabits a second, where it was measured.
    """

    facts: Mapping[str, Facts]
    findings: list[Finding]
    names: list[str]
    bandwidth: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def here() -> Look:
    """Look at this machine. Raises UsageError when the survey cannot run here."""
    try:
        script = resources.script("survey").encode()
        answer = subprocess.run([sys.executable, "-"], input=script, capture_output=True, timeout=_PATIENCE_S, check=False)
        found = facts.parse_survey(answer.stdout.decode(errors="replace"))
    except (OSError, subprocess.TimeoutExpired, ProvisionError) as error:
        raise UsageError(f"cannot look at this machine: {error}") from error
    if isinstance(found, Unsurveyed):  # it runs on the Python that runs this
        raise UsageError(f"cannot look at this machine: {facts.unsurveyed_problem(HERE, found).what}")
    prefix = found.installed.prefix or "/opt"
    problems = facts.host_problems(HERE, found, needed_mb=_NEEDED_MB, prefix=prefix, become_password=True)
    return Look({HERE: found}, examine({HERE: found}, problems), [HERE])


def everywhere(session: Session, *, bandwidth: bool = False) -> Look:
    """Look at all hosts of the inventory at once, then have them look at each other."""
    survey = collect.survey_hosts(session)
    for host in session.inventory.hosts:  # a requirement of the inventory decides before anything that is seen
        if host.name in survey.hosts:
            found = survey.hosts[host.name]
            network = found.network.model_copy(update={"asked_for": host.interface})
            survey.hosts[host.name] = found.model_copy(update={"network": network})
    answers, unable = reach.look(session, survey.hosts, bandwidth=bandwidth)
    names = [host.name for host in session.inventory.hosts]
    findings = examine(survey.hosts, [*survey.problems, *unable], answers)
    return Look(survey.hosts, findings, names, {name: answer.mbit for name, answer in answers.items() if answer.mbit})


def with_logs(hosts: list[Finding], logs: list[Finding], looked_for: set[str]) -> list[Finding]:
    """Both together: what a log says and a probe sees is one finding, confirmed; what no probe sees is said to be so.

    Args:
        looked_for: ids that the probes of hosts look for.
    """
    seen = {finding.id for finding in hosts}
    for finding in hosts:
        said = next((each for each in logs if each.id == finding.id), None)
        if said:
            finding.evidence = said.evidence
            finding.seen = f"{finding.seen} (confirms what the log says)"
            finding.under = said.under
    for finding in logs:
        if finding.id not in seen and finding.id in looked_for:
            finding.seen = "the probes of the hosts do not show it now: it is over, or its cause is elsewhere"
    confirmed = {finding.id for finding in hosts if finding.evidence}
    roots_first = [finding for finding in hosts if finding.id in confirmed] + [each for each in logs if each.id not in seen]
    return roots_first + [finding for finding in hosts if finding.id not in confirmed]
