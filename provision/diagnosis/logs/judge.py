"""From what was found in logs to what is said: roots first, what follows from them below, unknown errors as unknown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from provision.diagnosis.findings import SEVERITIES, UNKNOWN, Evidence, Finding
from provision.diagnosis.logs.scan import Found, Hit, Scanner
from provision.diagnosis.logs.unknown import STRONG
from provision.diagnosis.signatures import Signature

SHOWN_LINES = 5  # of evidence per finding


def judge(scanner: Scanner, signatures: Mapping[str, Signature]) -> list[Finding]:
    """The findings of all logs that the scanner read: roots, worst first, each followed by its consequences."""
    found = _without_outranked(scanner.found, signatures)
    found = {name: each for name, each in found.items() if not _recovered(scanner, name, each)}
    known = {name: each for name, each in found.items() if not signatures[name].generic}
    under = _explanations(known, signatures)
    findings = {name: _finding(scanner, signatures[name], each) for name, each in known.items()}

    certain = [name for name in known if name not in under and _is_cause(signatures[name])]
    unknown = None if certain else _unknown(scanner, found, signatures)
    if unknown is not None:
        for name in known:  # what could follow from any error follows from this one
            if "any" in signatures[name].consequence_of:
                under[name] = UNKNOWN
        findings[UNKNOWN] = unknown
    roots = [each for name, each in findings.items() if name not in under]
    roots.sort(key=lambda each: (SEVERITIES.index(each.severity), scanner.files.index(each.evidence[0].file), each.evidence[0].line))
    if roots:
        for name in found.keys() - known.keys():
            findings[name] = _finding(scanner, signatures[name], found[name])
            under[name] = roots[0].id
    return [one for root in roots for one in (root, *_below(root.id, findings, under))]


def _below(root: str, findings: Mapping[str, Finding], under: Mapping[str, str]) -> list[Finding]:
    mine = [findings[name] for name, cause in under.items() if cause == root and name in findings]
    for each in mine:
        each.under = root
    return sorted(mine, key=lambda each: each.evidence[0].line)


def _is_cause(signature: Signature) -> bool:
    return signature.severity == "error" and "any" not in signature.consequence_of


def _without_outranked(found: Mapping[str, Found], signatures: Mapping[str, Signature]) -> dict[str, Found]:
    """Without matches on lines that a signature of higher precedence claims: a cause outranks a generic text."""
    kept: dict[str, Found] = {}
    for name, each in found.items():
        mine = signatures[name]
        rivals = [
            hit
            for other, theirs in found.items()
            if other != name and (name in signatures[other].over or (mine.generic and not signatures[other].generic))
            for hit in theirs.hits
        ]
        hits = [hit for hit in each.hits if not any(_overlap(hit, rival) for rival in rivals)]
        if hits:
            kept[name] = Found(hits, each.times - len(each.hits) + len(hits))
    return kept


def _overlap(one: Hit, other: Hit) -> bool:
    return one.file == other.file and one.first <= other.last and other.first <= one.last


def _recovered(scanner: Scanner, name: str, found: Found) -> bool:
    return name in scanner.recovered and scanner.recovered[name] > (found.hits[-1].file, found.hits[-1].first)


def _explanations(known: Mapping[str, Found], signatures: Mapping[str, Signature]) -> dict[str, str]:
    """finding → the root that explains it, for those that something explains."""
    direct: dict[str, list[str]] = {}
    for name in known:
        tokens = signatures[name].consequence_of
        direct[name] = [
            other
            for other in known
            if other != name
            and (other in tokens or (_is_cause(signatures[other]) and ("any" in tokens or signatures[other].layer in tokens)))
        ]
    under: dict[str, str] = {}
    for name in known:
        root, path = name, {name}
        while direct[root]:
            following = min((each for each in direct[root] if each not in path), key=lambda each: _first(known[each]), default=None)
            if following is None:
                break
            root = following
            path.add(root)
        if root != name and not direct[root]:
            under[name] = root
    return under


def _first(found: Found) -> tuple[int, int]:
    return found.hits[0].file, found.hits[0].first


def _finding(scanner: Scanner, signature: Signature, found: Found) -> Finding:
    return Finding(
        id=signature.id,
        layer=signature.layer,
        severity=signature.severity,
        title=signature.title,
        plain=signature.plain,
        cause=signature.cause,
        fix=list(signature.fix),
        evidence=[Evidence(scanner.files[hit.file], hit.first, hit.text) for hit in found.hits[:SHOWN_LINES]],
        times=found.times,
    )


def _unknown(scanner: Scanner, found: Mapping[str, Found], signatures: Mapping[str, Signature]) -> Finding | None:
    """The first line that looks like an error and that nothing claims; None if there is none."""
    claimed = [hit for each in found.values() for hit in each.hits]
    hit = _first_free((mark for name, each in scanner.unknown.items() if name in STRONG for mark in each.hits), claimed)
    hit = hit or _first_free(scanner.unknown["traceback"].hits, claimed)
    if hit is None and found:
        told = any(signatures[name].generic for name in found)
        hit = _first_free(scanner.unknown["weak"].hits, claimed) if told else None
    if hit is None:
        hit = min((each.hits[0] for name, each in found.items() if signatures[name].quoted_alone), key=_place, default=None)
    if hit is None:
        return None
    who = f"rank {hit.rank}" if hit.rank is not None else "a process that the log does not name"
    return Finding(
        id=UNKNOWN,
        layer="unknown",
        severity="error",
        title="An error that is not among the known ones",
        plain=f"Something failed that doctor has no entry for; the first line that looks like an error is quoted, printed by {who}.",
        cause=f"Not known. The first error line, printed by {who}: {hit.text}",
        fix=["Read the log from the quoted line on", "provision doctor HOSTS   # what is wrong with the hosts themselves"],
        evidence=[Evidence(scanner.files[hit.file], hit.first, hit.text)],
    )


def _first_free(marks: Iterable[Hit], claimed: list[Hit]) -> Hit | None:
    return min((mark for mark in marks if not any(_overlap(mark, other) for other in claimed)), key=_place, default=None)


def _place(hit: Hit) -> tuple[int, int]:
    return hit.file, hit.first
