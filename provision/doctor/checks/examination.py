"""From the facts of hosts to findings: all checks, the survey's own problems, failed logins and the kernels' logs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from provision.base.problems import SEVERITIES, Problem, Severity
from provision.catalog import Catalog
from provision.diagnosis import logs
from provision.diagnosis.findings import Finding
from provision.diagnosis.signatures import LAYERS, is_known, known_error
from provision.doctor.checks.registry import CHECKS
from provision.doctor.health.model import Health
from provision.doctor.health.parsers import xids
from provision.survey import Facts
from provision.survey.reachability import Reachability

LOGIN_FIX = ("provision up HOSTS   # sets up ssh between all hosts, host keys included", "ssh -v ADDRESS true   # on this host, to see why")

_WITHOUT_NVIDIA_SMI = {"nvml-driver-mismatch", "nvidia-smi-no-driver", "nouveau-loaded", "nvidia-driver-unsupported-gpu"}


def examine(
    hosts: Mapping[str, Facts],
    problems: Sequence[Problem] = (),
    connections: Mapping[str, Reachability] | None = None,
    healths: Mapping[str, Health] | None = None,
    *,
    catalog: Catalog,
) -> list[Finding]:
    """What is wrong with the hosts, worst first, then by layer and host.

    Args:
        hosts: name → facts, of the hosts that answered.
        problems: what the survey itself found.
        connections: host → whether it reaches the others, where that was checked.
        healths: host → the health of its GPUs, where that was asked for.
    """
    connections, healths = connections or {}, healths or {}
    found = [_of_problem(problem, catalog) for problem in problems]
    for check in CHECKS:
        for seen in check.observe(hosts, connections, healths, catalog):
            error = known_error(seen.id or check.id)
            found.append(
                Finding.on_host(
                    error,
                    seen.host,
                    severity=seen.severity or check.severity or error.severity,
                    observed=seen.what,
                    expected=seen.expected,
                    fix=seen.fix or error.fix,
                )
            )
    for name, facts in hosts.items():
        in_log = _of_kernel_log(name, facts, catalog)
        # The check of health reads all Xids, and knows more of each.
        found += [each for each in in_log if name not in healths or not any(xids((each.observed,)))]
    for name, reachability in connections.items():
        found += _of_logins(name, reachability, hosts[name], catalog)
    return sorted(
        _without_explained(list(_merged(found))),
        key=lambda each: (SEVERITIES.index(each.severity), LAYERS.index(each.layer), each.host or ""),
    )


def _without_explained(found: Sequence[Finding]) -> Iterator[Finding]:
    """Findings without those that nvidia-smi cannot be read, on hosts of which another finding says why it fails."""
    explained = {each.host for each in found if each.id in _WITHOUT_NVIDIA_SMI}
    return (each for each in found if not (each.id == "gpu-health-unreadable" and each.host in explained))


def _merged(found: Iterable[Finding]) -> Iterable[Finding]:
    """One finding per error and host, with everything that was observed."""
    merged: dict[tuple[str, str | None], Finding] = {}
    for finding in found:
        same = merged.setdefault((finding.id, finding.host), finding)
        if finding.observed not in same.observed:
            fix = (*same.fix, *(step for step in finding.fix if step not in same.fix))
            worst = min(same.severity, finding.severity, key=SEVERITIES.index)
            observed = f"{same.observed}; {finding.observed}"
            merged[finding.id, finding.host] = replace(same, severity=worst, observed=observed, fix=fix)
    return merged.values()


def _of_problem(problem: Problem, catalog: Catalog) -> Finding:
    """A problem of the survey as the known error that it is: by its own id, or by ssh's message."""
    by_message = next((error.id for error in logs.known_errors(problem.message, "survey", catalog)), "")
    of_others = "host-not-usable" if problem.severity == "error" else "host-warning"
    error = known_error(problem.id if is_known(problem.id) else by_message or of_others)
    fix = (problem.hint,) if problem.hint else error.fix
    return Finding.on_host(error, problem.host, severity=problem.severity, observed=problem.what, fix=fix)


def _of_kernel_log(host: str, facts: Facts, catalog: Catalog) -> Iterator[Finding]:
    for finding in logs.known_errors("\n".join(facts.signs.kernel_log), f"kernel log of {host}", catalog):
        if finding.layer in ("driver", "os"):
            yield replace(finding, host=host, observed=finding.evidence[0].text)


def _of_logins(host: str, reachability: Reachability, facts: Facts, catalog: Catalog) -> Iterator[Finding]:
    """Failed logins to the other hosts, as the errors that ssh's messages mean. Where nothing is installed, they may not be needed."""
    severity: Severity = "error" if facts.installed.was_completed else "warning"
    for peer, message in reachability.ssh.items():
        if message is not None:
            error = known_error(next((error.id for error in logs.known_errors(message, "ssh", catalog)), "ssh-between-hosts"))
            details = {"observed": f"ssh to {peer}: {message.splitlines()[-1]}", "expected": "a login without a prompt", "fix": LOGIN_FIX}
            yield Finding.of(error, severity=severity, host=host, **details)
