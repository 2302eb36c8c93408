"""Findings for people: root causes with their evidence and commands to paste, symptoms in one line below each."""

from __future__ import annotations

from collections.abc import Sequence

from provision.base.problems import SEVERITIES
from provision.base.terminal import Console
from provision.base.text import counted, few, grouped
from provision.catalog import OURS
from provision.diagnosis import xids
from provision.diagnosis.findings import Finding
from provision.diagnosis.logs.scanner import KEPT_MATCHES
from provision.diagnosis.signatures import LAYERS, Signature, Symptom, all_signatures
from provision.doctor.health.verdict import Verdict

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
VERDICT_STYLES = {"unfit": "bold red", "degraded": "bold yellow", "healthy": "green"}
LONGEST_QUOTE = 300  # characters of a log line
MAX_QUOTES = 4  # log lines of one error
MAX_HOSTS = 12  # named in a line


def findings(found: Sequence[Finding], console: Console, *, examined: str, searched: str) -> None:
    """Print all findings, then one line that counts them.

    Args:
        examined: in which logs, or on which hosts.
        searched: what was looked for in them: without a finding it says how much that means.
    """
    for group in _groups(found):
        if group[0].is_root_cause:
            _root_cause(group, console)
        else:
            evidence = group[0].evidence
            place = f" ({evidence[0].file}:{evidence[0].line})" if evidence else ""
            console.say(f"    then: {group[0].what}{place}", "dim")
    roots = [group[0] for group in _groups(found) if group[0].is_root_cause]
    if not roots:
        console.say(f"no known errors found {examined}: {searched}", "bold")
        return
    counts = {severity: sum(each.severity == severity for each in roots) for severity in SEVERITIES}
    totals = ", ".join(counted(count, severity) for severity, count in counts.items() if count)
    worst = min((each.severity for each in roots), key=SEVERITIES.index)
    console.say(f"\n{totals} {examined}", STYLES[worst])


def _groups(found: Sequence[Finding]) -> list[list[Finding]]:
    """The findings, those of one error on several hosts together."""
    return list(grouped(((finding.id, finding.severity, finding.caused_by), finding) for finding in found).values())


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
    rows = [("host", "verdict", "GPUs", "because of"), *((each.host, each.word, each.gpus, ", ".join(each.ids) or "-") for each in made)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    console.say("")
    for row in rows:
        line = "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=False)) + f"  {row[3]}"
        console.say(line.rstrip(), VERDICT_STYLES.get(row[1], "bold"))


def _root_cause(group: Sequence[Finding], console: Console) -> None:
    """Print one error, with the hosts that have it and what was observed on them."""
    finding = group[0]
    where = f"{_names(group)}: " if finding.host else ""
    console.say(f"\n{where}{finding.severity}: {finding.what}  [{finding.id}]", STYLES[finding.severity])
    console.prose(f"  {finding.summary}")
    observed = [each for each in group if each.observed]
    seen = grouped((each.observed + (f"; expected {each.expected}" if each.expected else ""), each) for each in observed)
    for text, those in seen.items():
        console.prose(f"  observed{f' on {_names(those)}' if len(seen) > 1 else ''}: {text}")
    evidence = [line for each in group for line in each.evidence[:3]]
    for line in list(dict.fromkeys(evidence))[:MAX_QUOTES]:
        console.say(f"  {line.file}:{line.line}: {line.text[:LONGEST_QUOTE]}", "cyan")
    if finding.times > 2:
        console.say(f"  … {finding.times} times{' or more' * (finding.times >= KEPT_MATCHES)} in all", "dim")
    for step, those in grouped((step, each) for each in group for step in each.fix).items():
        console.say(f"  → {step}" + (f"   # on {_names(those)}" if len(those) < len(group) else ""))


def _names(group: Sequence[Finding]) -> str:
    """The hosts of these findings; of many, the first ones and how many more."""
    return few(list(dict.fromkeys(each.host or "" for each in group)), MAX_HOSTS)


def entry(error: Signature, console: Console, *, checked: bool) -> None:
    """Print the whole entry of a known error. ``checked``: hosts are checked for it."""
    console.say(f"{error.id}  ({error.layer}, {error.severity})", "bold")
    console.say(error.title)
    console.prose(f"\n{error.summary}")
    console.prose(f"\nCause: {error.cause}")
    if error.probe:
        console.say(f"\nTo confirm it on a host: {error.probe}")
    if checked:
        console.say("\nprovision doctor HOSTS looks for it.")
    elif error.patterns:
        console.say("\nIt shows in logs only: provision doctor --log FILE")
    console.say("\nTo fix it:")
    for step in error.steps:
        if isinstance(step, str):
            console.say(f"  {step}")
        else:
            console.say(f"  {step.run}")
            console.say(f"      changes: {step.changes}", "dim")
            if step.needs:
                console.say(f"      needs: {', '.join(step.needs)}", "dim")
            console.say(f"      undo: {step.undo}", "dim")
    if error.id == xids.ANY:
        console.say("\nXids, and what NVIDIA recommends:")
        for number, each in xids.known(OURS):
            console.say(f"  {number:4}  {each.meaning}: {each.remedy}")
    if error.symptom_of:
        causes = ", ".join("any other error" if name == "any" else name for name in sorted(error.symptom_of))
        console.say(f"\nIt is often a symptom of: {causes}")
    if error.sources:
        console.say("\nRead more:")
        for address in error.sources:
            console.say(f"  {address}")


def listed() -> list[Signature]:
    """The known errors."""
    return [each for each in all_signatures().values() if not isinstance(each, Symptom)]


def known_errors(console: Console, layer: str | None = None) -> None:
    """Print the id and title of every known error, by layer, or of one layer."""
    for name in LAYERS if layer is None else (layer,):
        entries = [each for each in listed() if each.layer == name]
        if entries:
            console.say(f"\n{name}", "bold")
        for each in entries:
            console.say(f"  {each.id:30} {each.title}")
