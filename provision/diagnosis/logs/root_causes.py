"""From matches in logs to findings: root causes first, their symptoms below, unknown errors as unknown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from provision.base.problems import SEVERITIES
from provision.diagnosis import xids
from provision.diagnosis.findings import UNKNOWN, Evidence, Finding
from provision.diagnosis.logs.scanner import Match, Matches, Scanner
from provision.diagnosis.signatures import Signature, Symptom, all_signatures, error_shapes

SHOWN_LINES = 5  # of evidence per finding
LINES_TO_TRACEBACK = 4  # after a message that announces it
_NEVER = (-1, -1)  # before every place in a log
_TRACEBACK = ("exception", "traceback")  # ids of error shapes
_ONLY_WARNED_OF = "the log only warns of it, and nothing in it says that something failed: a retry may have gone well"


def findings(scanner: Scanner) -> list[Finding]:
    """The findings of all logs that the scanner read: root causes, worst first, each followed by its symptoms."""
    signatures = all_signatures()
    found = {
        name: matches
        for name, matches in _without_superseded(scanner.known).items()
        if scanner.recovered.get(name, _NEVER) <= _place(matches.first[-1])
    }
    errors = {name: matches for name, matches in found.items() if not isinstance(signatures[name], Symptom)}
    made = {name: _finding(scanner, signatures[name], matches) for name, matches in errors.items()}
    cause_of = _root_causes(errors)
    warned_of = {name for name in errors if signatures[name].is_retried and all(match.is_lesser for match in errors[name].first)}
    causes = {name for name in errors if name not in cause_of and signatures[name].may_be_root_cause}
    unknown = None if causes - warned_of else _unknown(scanner, found, only_certain=bool(causes))
    if unknown:
        made[UNKNOWN] = unknown
        cause_of |= {name: UNKNOWN for name in errors if "any" in signatures[name].symptom_of}
    elif len(found) == len(warned_of) and not _decisive(scanner, ("certain", "likely")):
        made |= {name: replace(made[name], severity="warning", observed=_ONLY_WARNED_OF) for name in causes}
    roots = [finding for name, finding in made.items() if name not in cause_of]
    roots.sort(key=lambda each: (SEVERITIES.index(each.severity), scanner.files.index(each.evidence[0].file), each.evidence[0].line))
    if roots:
        for name in found.keys() - errors.keys():
            made[name] = _finding(scanner, signatures[name], found[name])
            cause_of[name] = roots[0].id
    ordered = []
    for root in roots:
        symptoms = [replace(made[name], caused_by=cause) for name, cause in cause_of.items() if cause == root.id]
        ordered += [root, *sorted(symptoms, key=lambda each: each.evidence[0].line)]
    return ordered


def _without_superseded(known: Mapping[str, Matches]) -> dict[str, Matches]:
    """Without matches on lines that a more specific error claims, too."""
    signatures = all_signatures()
    kept: dict[str, Matches] = {}
    for name, matches in known.items():
        is_symptom = isinstance(signatures[name], Symptom)
        rivals = [
            theirs
            for other, theirs in known.items()
            if name in signatures[other].supersedes or (is_symptom and not isinstance(signatures[other], Symptom))
        ]
        first = [match for match in matches.first if not any(_claims(rival, match) for rival in rivals)]
        if first:
            kept[name] = Matches(first)
    return kept


def _claims(rival: Matches, match: Match) -> bool:
    """Whether an error shows on the match's lines. Of one that was no longer looked for, that is not known: it is assumed."""
    overlaps = (match.file == each.file and match.first <= each.last and each.first <= match.last for each in rival.first)
    return any(overlaps) or (rival.is_full and _place(match) > _place(rival.first[-1]))


def _root_causes(errors: Mapping[str, Matches]) -> dict[str, str]:
    """Error → its root cause, for those that another error in the logs explains: the first of several."""
    signatures = all_signatures()
    causes: dict[str, list[str]] = {}
    for name in errors:
        symptom_of = signatures[name].symptom_of
        causes[name] = [
            other
            for other in errors
            if other != name
            and (
                other in symptom_of
                or (signatures[other].may_be_root_cause and ("any" in symptom_of or signatures[other].layer in symptom_of))
            )
        ]
    cause_of: dict[str, str] = {}
    for name in errors:
        root, path = name, {name}
        while causes[root]:
            cause = min((each for each in causes[root] if each not in path), key=lambda each: _place(errors[each].first[0]), default=None)
            if cause is None:
                break
            root = cause
            path.add(root)
        if root != name and not causes[root]:
            cause_of[name] = root
    return cause_of


def _finding(scanner: Scanner, signature: Signature, matches: Matches) -> Finding:
    found = Finding.of(signature, evidence=_evidence(scanner, *matches.first[:SHOWN_LINES]), times=matches.times)
    if signature.id != xids.ANY:
        return found
    severity, steps = xids.judged(match.text for match in matches.first)
    return replace(found, severity=severity, fix=(*steps, *found.fix))


def _evidence(scanner: Scanner, *matches: Match) -> tuple[Evidence, ...]:
    return tuple(Evidence(scanner.files[match.file], match.first, match.text) for match in matches)


def _unknown(scanner: Scanner, found: Mapping[str, Matches], *, only_certain: bool) -> Finding | None:
    """The line that says what went wrong, of those that look like an error and that nothing claims; None if there is none.

    ``only_certain``: none but the surest kind counts, for there is a known error that explains the others.
    """
    symptoms = {name: matches.first[0] for name, matches in found.items() if isinstance(all_signatures()[name], Symptom)}
    match = _decisive(scanner, ("certain",) if only_certain else ("certain", "likely", *(["possible"] if symptoms else [])))
    if match is None and not only_certain:  # a symptom is not a cause, but a sign that something is wrong
        match = min(symptoms.values(), key=_place, default=None)
    if match is None:
        return None
    by = f", printed by rank {match.rank}" if match.rank is not None else ""
    return Finding(
        severity="error",
        what="An error that is not among the known ones",
        id=UNKNOWN,
        layer="unknown",
        summary=f"Something failed that doctor does not know; the line that says most about it is quoted{by}.",
        cause=f"Not known. The error's line{by}: {match.text}",
        fix=("Read the log around the quoted line", "provision doctor HOSTS   # what is wrong with the hosts themselves"),
        evidence=_evidence(scanner, match),
    )


def _decisive(scanner: Scanner, certainties: Sequence[str]) -> Match | None:
    """The first line of the surest kind; of a message with a traceback, the exception's."""
    for certainty in certainties:
        shapes = [shape.id for shape in error_shapes() if shape.certainty == certainty]
        first = min((match for shape in shapes for match in scanner.unknown[shape].first), key=_place, default=None)
        if first:
            return _exception_below(scanner, first) or first
    return None


def _exception_below(scanner: Scanner, match: Match) -> Match | None:
    """The exception of the traceback that follows at once; the first of a chain."""
    exceptions, tracebacks = (
        [each for each in scanner.unknown[shape].first if each.file == match.file and each.rank == match.rank] for shape in _TRACEBACK
    )
    if match in exceptions or not any(match.first <= each.first <= match.last + LINES_TO_TRACEBACK for each in tracebacks):
        return None
    return min((each for each in exceptions if each.first > match.last), key=_place, default=None)


def _place(match: Match) -> tuple[int, int]:
    return match.file, match.first
