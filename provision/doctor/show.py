"""Findings for people: root causes with their evidence and commands to paste, symptoms in one line below each."""

from __future__ import annotations

from collections.abc import Sequence

from provision.base.problems import SEVERITIES
from provision.base.terminal import Console
from provision.diagnosis.findings import Finding
from provision.diagnosis.signatures import LAYERS, Signature, Symptom, all_signatures
from provision.doctor.health.verdict import Verdict

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
VERDICT_STYLES = {"unfit": "bold red", "degraded": "bold yellow", "healthy": "green"}
LONGEST_QUOTE = 300  # characters of a log line


def findings(found: Sequence[Finding], console: Console, *, examined: str) -> None:
    """Print all findings, then one line that counts them. ``examined`` names the hosts or logs."""
    for finding in found:
        if finding.is_root_cause:
            _root_cause(finding, console)
        else:
            place = f" ({finding.evidence[0].file}:{finding.evidence[0].line})" if finding.evidence else ""
            console.say(f"    then: {finding.what}{place}", "dim")
    roots = [finding for finding in found if finding.is_root_cause]
    if not roots:
        console.say(f"nothing found in {examined}", "bold green")
        return
    counts = {severity: sum(each.severity == severity for each in roots) for severity in SEVERITIES}
    counted = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items() if count)
    console.say(f"\n{counted} in {examined}", STYLES[roots[0].severity])


def overview(found: Sequence[Finding], hosts: Sequence[str], console: Console) -> None:
    """Print one row per host, the worst first, with the errors of each layer."""
    rows = []
    for host in hosts:
        of_host = [finding for finding in found if finding.host == host]
        worst = min((SEVERITIES.index(each.severity) for each in of_host), default=len(SEVERITIES))
        layers = [f"{layer}: {', '.join(ids)}" for layer in LAYERS if (ids := [each.id for each in of_host if each.layer == layer])]
        rows.append((worst, host, SEVERITIES[worst] if of_host else "well", "; ".join(layers)))
    width = max(len(host) for host in hosts)
    for _, host, state, layers_text in sorted(rows, key=lambda row: row[0]):
        console.say(f"{host:{width}}  {state:8} {layers_text}", STYLES.get(state, "green"))


def verdicts(made: Sequence[Verdict], console: Console) -> None:
    """Print the table of verdicts on GPUs, the worst host first."""
    if not made:
        return
    rows = [("host", "verdict", "GPUs", "because of"), *((each.host, each.word, each.gpus, _reasons(each)) for each in made)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    console.say("")
    for row in rows:
        line = "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=False)) + f"  {row[3]}"
        console.say(line.rstrip(), VERDICT_STYLES.get(row[1], "bold"))


def _reasons(verdict: Verdict) -> str:
    return ", ".join(dict.fromkeys(each.id for each in verdict.reasons)) or "-"


def _root_cause(finding: Finding, console: Console) -> None:
    host = f"{finding.host}: " if finding.host else ""
    console.say(f"\n{host}{finding.severity}: {finding.what}  [{finding.id}]", STYLES[finding.severity])
    console.say(f"  {finding.summary}")
    if finding.observed:
        expected = f"; expected {finding.expected}" if finding.expected else ""
        console.say(f"  observed: {finding.observed}{expected}")
    for each in finding.evidence[:2]:
        console.say(f"  {each.file}:{each.line}: {each.text[:LONGEST_QUOTE]}", "cyan")
    if finding.times > 2:
        console.say(f"  … {finding.times} times in all", "dim")
    for step in finding.fix:
        console.say(f"  → {step}")


def entry(error: Signature, console: Console, *, checked: bool) -> None:
    """Print the whole entry of a known error. ``checked``: hosts are checked for it."""
    console.say(f"{error.id}  ({error.layer}, {error.severity})", "bold")
    console.say(error.title)
    console.say(f"\n{error.summary}")
    console.say(f"\nCause: {error.cause}")
    console.say("\nTo fix it:")
    for step in error.fix:
        console.say(f"  {step}")
    if error.probe:
        console.say(f"\nTo see it on a host: {error.probe}")
    if checked:
        console.say("\nprovision doctor HOSTS looks for it.")
    elif error.patterns:
        console.say("\nIt shows in logs only: provision doctor --log FILE")
    if error.symptom_of:
        causes = ", ".join("any other error" if name == "any" else name for name in sorted(error.symptom_of))
        console.say(f"\nIt is often a symptom of: {causes}")


def known_errors(console: Console) -> None:
    """Print the id and title of every known error in logs, by layer."""
    for layer in LAYERS:
        entries = [each for each in all_signatures().values() if each.layer == layer and not isinstance(each, Symptom)]
        if entries:
            console.say(f"\n{layer}", "bold")
        for each in entries:
            console.say(f"  {each.id:30} {each.title}")
