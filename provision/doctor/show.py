"""How findings are printed for people: roots with their evidence and commands to paste, consequences in one line below each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from provision.base.terminal import Console
from provision.diagnosis.findings import SEVERITIES, Finding
from provision.diagnosis.signatures import LAYERS, Signature, all_signatures

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
LONGEST_QUOTE = 300  # letters of a log line


def findings(found: Sequence[Finding], console: Console, *, looked_at: str) -> None:
    """Print all findings, then one closing line."""
    for finding in found:
        if finding.role == "root":
            _root(finding, console)
        else:
            where = f" ({_place(finding)})" if finding.evidence else ""
            console.say(f"    then: {finding.title}{where}", "dim")
    roots = [finding for finding in found if finding.role == "root"]
    if not roots:
        console.say(f"nothing found in {looked_at}", "bold green")
        return
    counts = {level: sum(each.severity == level for each in roots) for level in STYLES}
    said = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items() if count)
    console.say(f"\n{said} in {looked_at}", STYLES[roots[0].severity])


def overview(found: Sequence[Finding], hosts: Sequence[str], console: Console) -> None:
    """Print one row per host, the worst first, with the layers in which something was found."""
    rows = []
    for host in hosts:
        mine = [finding for finding in found if finding.host == host]
        worst = min((SEVERITIES.index(each.severity) for each in mine), default=len(SEVERITIES))
        layers = sorted({each.layer for each in mine}, key=lambda layer: LAYERS.index(layer) if layer in LAYERS else len(LAYERS))
        said = [f"{layer}: {', '.join(each.id for each in mine if each.layer == layer)}" for layer in layers]
        rows.append((worst, host, SEVERITIES[worst] if mine else "well", "; ".join(said)))
    width = max(len(host) for host in hosts)
    for _, host, state, layers_said in sorted(rows, key=lambda row: row[0]):
        console.say(f"{host:{width}}  {state:8} {layers_said}", STYLES.get(state, "green"))


def bandwidth(measured: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """Print who sends how fast to whom: a row per sender, a column per receiver."""
    names = sorted(measured.keys() | {target for row in measured.values() for target in row})
    width = max(8, *(len(name) for name in names))
    console.say("\nMbit/s, from the row to the column:", "bold")
    console.say(" " * width + "".join(f" {name:>{width}}" for name in names))
    for source in names:
        row = measured.get(source, {})
        cells = (f"{row[target]:.0f}" if target in row else "-" if target == source else "?" for target in names)
        console.say(f"{source:{width}}" + "".join(f" {cell:>{width}}" for cell in cells))


def _root(finding: Finding, console: Console) -> None:
    who = f"{finding.host}: " if finding.host else ""
    console.say(f"\n{who}{finding.severity}: {finding.title}  [{finding.id}]", STYLES[finding.severity])
    console.say(f"  {finding.plain}")
    if finding.seen:
        expected = f"; expected {finding.expected}" if finding.expected else ""
        console.say(f"  seen: {finding.seen}{expected}")
    for each in finding.evidence[:2]:
        console.say(f"  {each.file}:{each.line}: {each.text[:LONGEST_QUOTE]}", "cyan")
    if finding.times > 2:
        console.say(f"  … {finding.times} times in all", "dim")
    for step in finding.fix:
        console.say(f"  → {step}")


def entry(signature: Signature, console: Console, *, live: bool) -> None:
    """Print a whole entry of the catalogue."""
    console.say(f"{signature.id}  ({signature.layer}, {signature.severity})", "bold")
    console.say(signature.title)
    console.say(f"\n{signature.plain}")
    console.say(f"\nCause: {signature.cause}")
    console.say("\nTo fix it:")
    for step in signature.fix:
        console.say(f"  {step}")
    if signature.probe:
        console.say(f"\nTo see it on a host: {signature.probe}")
    console.say("\nprovision doctor HOSTS looks for it." if live else "\nIt shows in logs only: provision doctor --log FILE")
    if signature.consequence_of:
        causes = ", ".join("any other error" if name == "any" else name for name in sorted(signature.consequence_of))
        console.say(f"\nIt often follows from: {causes}")


def catalogue(console: Console) -> None:
    """Print the title of every entry, by layer."""
    for layer in LAYERS:
        entries = [each for each in all_signatures().values() if each.layer == layer and not each.generic]
        if entries:
            console.say(f"\n{layer}", "bold")
        for each in entries:
            console.say(f"  {each.id:30} {each.title}")


def _place(finding: Finding) -> str:
    return f"{finding.evidence[0].file}:{finding.evidence[0].line}"
