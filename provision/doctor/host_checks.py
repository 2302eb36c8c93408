"""Examinations of hosts: this machine by a local survey, others by the survey's round trip and one more for their connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace

from provision.base import resources
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import Catalog, overlay
from provision.diagnosis import logs
from provision.diagnosis.findings import Finding
from provision.doctor.checks import CHECKED, examine
from provision.doctor.health import verdict
from provision.doctor.health.collect import HealthRequest, of_hosts, of_this_machine
from provision.doctor.health.model import Health
from provision.remote.session import Session
from provision.survey import Facts, Unsurveyed, collect, gpu_code, reachability
from provision.survey.document import parse_survey
from provision.survey.preflight import host_problems, unsurveyed_problem

THIS_MACHINE = "localhost"
_TIMEOUT_S = 60.0
_NEEDED_MB = 200  # an examined host needs room for a job, not for an installation


@dataclass(frozen=True)
class Examination:
    """Facts of the hosts that answered, what is wrong with them, the names of all hosts, and the health of GPUs where it was asked for."""

    facts: Mapping[str, Facts]
    findings: list[Finding]
    hosts: list[str]
    healths: Mapping[str, Health] = field(default_factory=dict)

    @property
    def verdicts(self) -> list[verdict.Verdict]:
        """The verdicts on the health of all hosts' GPUs."""
        return verdict.verdicts(self.hosts, self.healths, self.findings)


def examine_this_machine(gpu: HealthRequest | None = None) -> Examination:
    """Raises UsageError when the survey cannot run here."""
    catalog = overlay.own()
    try:
        script = resources.script("survey").encode()
        options = {**os.environ, "PROVISION_SURVEY_OPTIONS": json.dumps({"managed_libc": catalog.os().others.managed_libc})}
        survey = subprocess.run([sys.executable, "-"], input=script, env=options, capture_output=True, timeout=_TIMEOUT_S, check=False)
        found = parse_survey(survey.stdout.decode(errors="replace"), catalog)
    except (OSError, subprocess.TimeoutExpired, ProvisionError) as error:
        raise UsageError(f"this machine cannot be surveyed: {error}") from error
    if isinstance(found, Unsurveyed):  # it runs on the Python that runs this
        raise UsageError(f"this machine cannot be surveyed: {unsurveyed_problem(THIS_MACHINE, found).what}")
    prefix = found.installed.prefix or "/opt"
    problems = host_problems(THIS_MACHINE, found, catalog, needed_mb=_NEEDED_MB, prefix=prefix, become_password=True)
    healths = {THIS_MACHINE: of_this_machine(gpu)} if gpu else {}
    findings = examine({THIS_MACHINE: found}, problems, {}, healths, catalog=catalog)
    return Examination({THIS_MACHINE: found}, findings, [THIS_MACHINE], healths)


def examine_gpus_of_this_machine(name: str) -> Examination:
    """The health of this machine's GPUs alone, without the survey, by the user's catalogue where it is valid.

    ``name``: how findings call it.
    """
    catalog = Catalog(overlay.usable([overlay.folder_of_user()])[0])
    healths = {name: of_this_machine(HealthRequest())}
    return Examination({}, examine({}, (), {}, healths, catalog=catalog), [name], healths)


def examine_hosts(session: Session, gpu: HealthRequest | None = None) -> Examination:
    """Survey all hosts of the inventory at once, then check their connections to each other, and their GPUs' health if asked."""
    survey = collect.survey_hosts(session, tries_networks=True)
    for host in session.inventory.hosts:  # checks compare with the inventory's interface, where it names one
        if host.name in survey.hosts:
            found = survey.hosts[host.name]
            network = found.network.model_copy(update={"asked_for": host.interface})
            survey.hosts[host.name] = found.model_copy(update={"network": network})
    connections, problems = reachability.check(session, survey.hosts)
    problems += gpu_code.check(session, {name: _python(found) for name, found in survey.hosts.items() if found.gpus or found.amd})
    healths = of_hosts(session, survey.hosts, gpu) if gpu else {}
    names = [host.name for host in session.inventory.hosts]
    findings = examine(survey.hosts, [*survey.problems, *problems], connections, healths, catalog=session.catalog)
    return Examination(survey.hosts, findings, names, healths)


def _python(found: Facts) -> str:
    """The Python with which jobs run: of the installation, else the host's own."""
    return f"{found.installed.prefix}/venv/bin/python" if found.installed.was_completed else found.python.executable or "python3"


def with_logs(examination: Examination, reading: logs.Reading | None) -> list[Finding]:
    """Findings on hosts and in logs together: what a host and a log show is one finding, confirmed; what no host shows now is marked."""
    log_of = {finding.id: finding for finding in reading.on(_worlds(examination.facts.values()))} if reading else {}
    seen = {finding.id for finding in examination.findings}
    confirmed = [
        replace(finding, evidence=log.evidence, observed=f"{finding.observed} (confirms what the log says)", caused_by=log.caused_by)
        for finding in examination.findings
        if (log := log_of.get(finding.id))
    ]
    absent = "the hosts do not show it now: it is over, or its cause is elsewhere"
    checked = CHECKED if examination.facts else frozenset[str]()
    confirmed += [replace(each, observed=absent) if each.id in checked else each for each in log_of.values() if each.id not in seen]
    return confirmed + [finding for finding in examination.findings if finding.id not in log_of]


def _worlds(hosts: Collection[Facts]) -> Set[str]:
    """Where jobs on these hosts run, as ids of signs: the vendor of their GPUs, and whether their users may become root."""
    ids = {"nvidia" if each.gpus else "amd" for each in hosts if each.gpus or (each.amd and each.amd.gpus)}
    return ids | {"with-root" if each.user.can_become else "without-root" for each in hosts}
