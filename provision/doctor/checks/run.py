"""From the facts of hosts to findings: every check, the survey's own problems, and what the kernels' logs say. Pure."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence

from provision.base.problems import Problem
from provision.diagnosis.findings import SEVERITIES, UNKNOWN, Finding, Severity
from provision.diagnosis.logs import Scanner, judge
from provision.diagnosis.signatures import LAYERS, Signature, all_signatures, conditions, harmless
from provision.doctor.checks.model import CHECKS, Answer, Check, Seen
from provision.facts import Facts

LOGIN_FIX = (
    "provision up HOSTS   # lets every host into every other, with their host keys known",
    "ssh -v ADDRESS true   # from there, to see why",
)


def examine(hosts: Mapping[str, Facts], problems: Sequence[Problem] = (), answers: Mapping[str, Answer] | None = None) -> list[Finding]:
    """What is wrong with the hosts, worst first, then by layer and host.

    Args:
        hosts: name → facts, of the hosts that answered.
        problems: what the survey itself found.
        answers: what the hosts saw of each other, where they were asked.
    """
    found = [_of_problem(problem) for problem in problems]
    for each in CHECKS:
        found += _of_check(each, hosts, answers or {})
    for name, facts in hosts.items():
        found += _of_kernel_log(name, facts)
    for name, answer in (answers or {}).items():
        found += _of_logins(name, answer, hosts[name])
    unique: dict[tuple[str, str | None], Finding] = {}
    for finding in found:
        same = unique.setdefault((finding.id, finding.host), finding)
        if same is not finding and finding.seen not in same.seen:
            same.seen += f"; {finding.seen}"
            same.fix += [step for step in finding.fix if step not in same.fix]
    return sorted(unique.values(), key=lambda each: (SEVERITIES.index(each.severity), _layer(each), each.host or ""))


def _layer(finding: Finding) -> int:
    return LAYERS.index(finding.layer) if finding.layer in LAYERS else len(LAYERS)


def _of_check(check: Check, hosts: Mapping[str, Facts], answers: Mapping[str, Answer]) -> Iterable[Finding]:
    entry = entry_of(check.id)
    if check.one:
        for name, facts in hosts.items():
            yield from (_finding(entry, seen, name, check.severity) for seen in check.one(facts))
    if check.all:
        yield from (_finding(entry, seen, seen.host, check.severity) for seen in check.all(hosts))
    if check.between:
        yield from (_finding(entry, seen, seen.host, check.severity) for seen in check.between(answers))


def _of_problem(problem: Problem) -> Finding:
    """A problem of the survey under the catalogue's id, if it has one: its own, or that of what ssh said."""
    quoted = (each.id for each in _explained(problem.said) if each.id != UNKNOWN)
    name = problem.id or next(quoted, "host-not-usable" if problem.severity == "error" else "host-warning")
    fix = (problem.hint,) if problem.hint else ()
    return _finding(entry_of(name), Seen(problem.what, "", fix), problem.host, problem.severity)


def _of_kernel_log(host: str, facts: Facts) -> Iterable[Finding]:
    for finding in _explained("\n".join(facts.signs.kernel_log), f"kernel log of {host}"):
        if finding.id != UNKNOWN and finding.layer in ("driver", "os"):
            finding.host = host
            finding.seen = finding.evidence[0].text
            yield finding


def _of_logins(host: str, answer: Answer, facts: Facts) -> Iterable[Finding]:
    """What ssh said on the way to the others, under the ids of its messages. Where we installed nothing, nobody may need it."""
    severity: Severity = "error" if facts.installed.manifest else "warning"
    for peer, said in answer.ssh.items():
        if said is not None:
            name = next((each.id for each in _explained(said) if each.id != UNKNOWN), "ssh-between-hosts")
            seen = Seen(f"ssh to {peer}: {said.splitlines()[-1]}", "a login that asks nothing", LOGIN_FIX)
            yield _finding(entry_of(name), seen, host, severity)


def _explained(text: str, label: str = "survey") -> list[Finding]:
    if not text:
        return []
    scanner = Scanner(all_signatures().values(), harmless())
    scanner.read(io.BytesIO(text.encode(errors="replace")), label)
    return judge(scanner, all_signatures())


def entry_of(name: str) -> Signature:
    """The texts of a check: the known error of that id, or the condition."""
    return all_signatures().get(name) or conditions()[name]


def _finding(entry: Signature, seen: Seen, host: str | None, severity: Severity | None) -> Finding:
    return Finding(
        id=entry.id,
        layer=entry.layer,
        severity=severity or entry.severity,
        title=entry.title,
        plain=entry.plain,
        cause=entry.cause,
        fix=list(seen.fix or entry.fix),
        host=host,
        seen=seen.what,
        expected=seen.expected,
    )
