"""From matches in logs to findings: root causes first, their symptoms below, unknown errors as unknown. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from provision.base.problems import SEVERITIES, Severity
from provision.diagnosis import xids
from provision.diagnosis.findings import UNKNOWN, Evidence, Finding
from provision.diagnosis.logs.scanner import ORDINARY, Match, Matches, Scanner
from provision.diagnosis.patterns import Pattern, latin1
from provision.diagnosis.signatures import SAYS, Signature, Symptom, all_signatures, error_shapes, fitting

SHOWN_LINES = 5  # of evidence per finding
SHOWN_UNKNOWN = 3  # lines that say most about an unknown error, the best first
STEPS, MANY_STEPS = 5, 100  # that a run takes behind an error that is certain, or where a launcher reports its end, if it overcame it
_DETAIL = Pattern(r"[\d/'\"`<]")  # a number, path or name in a sentence
#: What a program's own code raises, seldom because another rank has failed.
_OWN = Pattern(
    r"(?:Attribute|FileNotFound|Import|Index|IsADirectory|Key|ModuleNotFound|Name|NotADirectory|Permission|Type|UnboundLocal|Value|ZeroDivision)"
    r"Error: "
)
_OVERCOME = "nothing in the log says that it failed because of this: it is only warned of, or the run went on or ended well"


def findings(scanner: Scanner, worlds: Container[str] | None = None) -> list[Finding]:
    """The findings of all logs: root causes, worst first, then their symptoms. ``worlds``: where steps have to fit, else the logs'."""
    signatures, worlds = all_signatures(), scanner.worlds if worlds is None else worlds
    found = _without_superseded(scanner.known)
    errors = {name: matches for name, matches in found.items() if not isinstance(signatures[name], Symptom)}
    made = {name: _finding(scanner, signatures[name], matches, worlds) for name, matches in errors.items()}
    cause_of = _root_causes(errors)
    causes = {name for name in errors if name not in cause_of and signatures[name].may_be_root_cause}
    outcome = _Outcome(scanner, {name: found[name] for name in found.keys() - (errors.keys() - causes)})
    overcome = {name for name in errors if all(outcome.overcame(match, made[name].severity) for match in errors[name].first)}
    symptoms = [match for name in found.keys() - errors.keys() for match in found[name].first if not outcome.overcame(match)]
    named = [errors[name].first[0] for name in errors.keys() - overcome]
    warned_of = {name for name in errors if all(match.level in ("warning", "remark") for match in errors[name].first)}
    unknown = None if causes - overcome - warned_of else _unknown(scanner, outcome, named, symptoms)
    second = None if unknown or not causes else _of_another_rank(scanner, outcome, found)
    if second:
        made[UNKNOWN] = second
    if unknown:
        made[UNKNOWN] = unknown
        cause_of |= {name: UNKNOWN for name in errors if "any" in signatures[name].symptom_of}
    if unknown and unknown.severity == "error":
        overcome -= warned_of
    made |= {name: replace(made[name], severity="note", observed=_OVERCOME) for name in overcome}
    roots = [finding for name, finding in made.items() if name not in cause_of]
    roots.sort(key=lambda each: (scanner.files.index(each.evidence[0].file), each.evidence[0].line))
    roots.sort(key=lambda each: (SEVERITIES.index(each.severity), each is second, not unknown and each.id in warned_of))
    if roots:
        for name in found.keys() - errors.keys():
            made[name] = _finding(scanner, signatures[name], found[name], worlds)
            cause_of[name] = roots[0].id
    ordered = []
    for root in roots:
        consequences = [replace(made[name], caused_by=cause) for name, cause in cause_of.items() if cause == root.id]
        ordered += [root, *sorted(consequences, key=lambda each: each.evidence[0].line)]
    return ordered


class _Outcome:
    """How each log ended. A sign that it went well counts where nothing certain of ``failures`` is behind it."""

    def __init__(self, scanner: Scanner, failures: Mapping[str, Matches]) -> None:
        certain = [scanner.unknown[shape.id] for shape in error_shapes() if shape.is_certain]
        behind = [match for matches in (*failures.values(), *certain) for match in matches.first if not match.level]
        self._end = {file: max((each.first for each in behind if each.file == file), default=0) for file in range(len(scanner.files))}
        symptoms = (matches for name, matches in failures.items() if isinstance(all_signatures()[name], Symptom))
        self._reported = {match.file for matches in symptoms for match in matches.first}
        self._well = scanner.went_well

    def overcame(self, match: Match, severity: Severity = "error") -> bool:
        """Whether the run ended well behind a match, or went on, far where more says that it failed; or warned of it, not last of all."""
        is_warned_of = match.level == "remark" or (match.level == "warning" and self.behind(ORDINARY, match) > 0)
        if self.behind("ended-well", match) or (not self._end[match.file] and (is_warned_of or severity != "error")):
            return True
        is_far = match.level == "info" or match.file in self._reported
        return self.behind("goes-on", match) >= (MANY_STEPS if is_far else STEPS if match.is_certain else 1)

    def behind(self, sign: str, match: Match) -> int:
        """How many different lines with a sign are behind a match and the last failure."""
        lines = self._well[sign].get(match.file, {}) if sign in self._well else {}
        return sum(line > match.last and line >= self._end[match.file] for line in lines.values())


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
        if first := [match for match in matches.first if not any(_claims(rival, match) for rival in rivals)]:
            kept[name] = Matches(first)
    return kept


def _claims(rival: Matches, match: Match) -> bool:
    """Whether an error shows on the match's lines. Of one that was no longer looked for, that is not known: it is assumed."""
    overlaps = (match.file == each.file and match.first <= each.last and each.first <= match.last for each in rival.first)
    return any(overlaps) or (rival.is_full and _place(match) > _place(rival.first[-1]))


def _root_causes(errors: Mapping[str, Matches]) -> dict[str, str]:
    """Error → its root cause, for those that another error in the logs explains: the first of several."""
    signatures = all_signatures()

    def explains(other: Signature, symptom_of: frozenset[str]) -> bool:
        return other.id in symptom_of or (other.may_be_root_cause and not symptom_of.isdisjoint(("any", other.layer)))

    causes = {
        name: [other for other in errors if other != name and explains(signatures[other], signatures[name].symptom_of)] for name in errors
    }
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


def _finding(scanner: Scanner, signature: Signature, matches: Matches, worlds: Container[str]) -> Finding:
    found = Finding.of(signature, evidence=_evidence(scanner, *matches.first[:SHOWN_LINES]), times=len(matches.first))
    lines = [match.text for match in matches.first]
    severity, steps = xids.judged(lines, scanner.catalog) if signature.id == xids.ANY else (found.severity, ())
    return replace(found, severity=severity, fix=(*steps, *fitting(found.fix, worlds)))


def _evidence(scanner: Scanner, *matches: Match) -> tuple[Evidence, ...]:
    return tuple(Evidence(scanner.files[match.file], match.first, match.text) for match in matches)


def _unknown(scanner: Scanner, outcome: _Outcome, named: Sequence[Match], symptoms: Sequence[Match]) -> Finding | None:
    """The line that says what went wrong, of those that look like an error and that nothing claims; None if there is none.

    Args:
        named: where the known errors begin that may have another cause; only what is certain, or a sentence before them, is one.
        symptoms: what else says that the run failed. Where nothing does, it is a note.
    """
    begin = min(map(_place, named), default=None)
    shape_of = {
        (*_place(match), match.text): (error_shapes()[0] if match.level in ("warning", "remark") else shape, match)
        for shape in error_shapes()
        for match in scanner.unknown[shape.id].first
    }
    left = [(shape, match) for shape, match in shape_of.values() if not outcome.overcame(match)]
    candidates = []
    for shape, match in left:
        says = "status" if match.is_header and shape.says in ("reason", "sentence") else shape.says
        if shape.is_certain or (_place(match) < begin and says not in ("status", "word") if begin else says != "word" or symptoms):
            candidates.append((SAYS.index(says), says == "sentence" and not _DETAIL.first(latin1(match.text)), _place(match), match))
    candidates = candidates or [(0, False, _place(match), match) for match in symptoms if not named]
    if not candidates:
        return None
    match, *others = list({each[-1].text: each[-1] for each in sorted(candidates, key=lambda each: each[:3])}.values())[:SHOWN_UNKNOWN]
    at_the_end = (  # so are, it is assumed, those of which no more were looked for
        shape for shape, match in left if outcome.behind(ORDINARY, match) <= shape.behind or scanner.unknown[shape.id].is_full
    )
    failed = named or symptoms or any(shape.says != "word" for shape in at_the_end) or any(shape.is_certain for shape, _ in left)
    what = "An error that is not among the known ones" if failed else "It looks like an error, and nothing says that something failed"
    return _quoted(scanner, "error" if failed else "note", what, match, *others)


def _of_another_rank(scanner: Scanner, outcome: _Outcome, known: Mapping[str, Matches]) -> Finding | None:
    """The first exception of a program's own code by a rank without a known error: fixing what is known does not fix it."""
    ranks = {match.rank for matches in known.values() for match in matches.first} | {None}
    shapes = (shape.id for shape in error_shapes() if shape.is_certain and shape.says == "exception")
    certain = (match for id in shapes for match in scanner.unknown[id].first if match.rank not in ranks and not match.level)
    left = sorted((each for each in certain if _OWN.first(latin1(each.text)) and not outcome.overcame(each)), key=_place)
    return _quoted(scanner, "error", "Another error, of another rank, that is not among the known ones", left[0]) if left else None


def _quoted(scanner: Scanner, severity: Severity, what: str, match: Match, *others: Match) -> Finding:
    by = f", printed by rank {match.rank}" if match.rank is not None else ""
    return Finding(
        severity=severity,
        what=what,
        id=UNKNOWN,
        layer="unknown",
        summary=f"The doctor does not know it; the line that says most about it is quoted{by}.",
        cause=f"Not known. The error's line{by}: {match.text}",
        fix=("Read the log around the quoted line", "provision doctor HOSTS   # what is wrong with the hosts themselves"),
        evidence=_evidence(scanner, match, *others),
    )


def _place(match: Match) -> tuple[int, int]:
    return match.file, match.first
