"""Streams logs and records where each known error shows. What explains what is decided in root_causes.py.

Only candidate lines (prefilter.py) are examined. A candidate is matched together with its neighbours, because messages take several
lines and are broken differently: first with the neighbours of the same rank, then with all. Where candidates are close together, each
pattern is searched once for all of them. A pattern that has matched often, and a word that was in many different lines, are no longer
looked for: so time grows with the log and hardly with what is in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, islice
from typing import BinaryIO, Literal, NamedTuple

from provision.catalog import Catalog
from provision.diagnosis.logs.lines import PART, Level, Line, blocks, clean, with_short_lines
from provision.diagnosis.logs.prefilter import Prefilter, WordSearch, reduced
from provision.diagnosis.logs.words import required_words
from provision.diagnosis.patterns import Match as Found
from provision.diagnosis.patterns import Pattern, latin1
from provision.diagnosis.signatures import ErrorShape, all_signatures, error_shapes, harmless, is_remark, shows, signs

LINES_BEFORE, LINES_AFTER = 12, 16  # lines around a candidate that a message may take
BYTES_AROUND = 1 << 13  # bytes of them on each side
LINES_AT_THE_END = 1000  # among which signs that it went well are looked for
LONGEST_SIGN = 1000  # bytes of such a line
KEPT_MATCHES = 100  # of one error; then it is no longer looked for
ORDINARY = "ordinary"  # lines that call nothing an error, and belong to no message of several lines
TRACEBACK = b"Traceback (most recent call last)"
LINES_OF_A_STACK = 80  # on each side of a line of it
OTHERS_ABOVE, OTHERS_BELOW = 3, 2  # so many lines that are no frames end a stack, read upwards or downwards
ANNOUNCED_LINES = 3  # that are quoted with the header that announces them
AT_ONCE = 500  # lines with words that are examined together
REPEATS = 60  # of a line that differs in digits only, after which it is no longer examined
# Lines with a word of patterns that are examined; then the word is no longer looked for. After `EARLY_LINES` with any, only new ones are.
LINES_OF_A_WORD, LINES_OF_A_LATE_WORD = 5_000, 50
EARLY_LINES = 20_000
ONE_LINE = 200  # bytes; longer lines count as several


@dataclass(frozen=True)
class Match:
    """Where an error shows: lines ``first`` to ``last`` (from 1) of file number ``file``. ``level`` as in `lines.Line`, or "remark".

    ``is_header``: the line announces what the next ones say, which is in ``text``, too. ``is_certain``: as in `ErrorShape`.
    """

    file: int
    first: int
    last: int
    text: str
    rank: str | None
    level: Level = ""
    is_header: bool = False
    is_certain: bool = False


@dataclass
class Matches:
    """The matches of one error that came first, at most `KEPT_MATCHES`."""

    first: list[Match] = field(default_factory=list)

    def add(self, match: Match) -> None:
        if not self.is_full and not any(match.file == other.file and match.first == other.first for other in self.first[-20:]):
            self.first.append(match)

    @property
    def is_full(self) -> bool:
        return len(self.first) >= KEPT_MATCHES


_FRAME = Pattern(
    r"[^\n]*Traceback \(most recent|File \"[^\n]+, line \d+|[ ^~]+$|at [\w.$/<>]+\(|(?:[a-z]\w*\.){2,}[A-Z]\w*(?:Exception|Error)\b"
    r"|Caused by: |\.\.\. \d+ (?:more|common)"
)
_LINK = Pattern(r"(?:During handling of|The above exception|The direct cause)[^\n]+:$")  # between two tracebacks
_BEGINS = Pattern(r"[\w:\[<(+]")
_Candidate = tuple[int, tuple[bytes, ...]]  # index of a line in its block, and the words of patterns in it


class Scanner:
    """Reads logs one after the other.

    Attributes:
        catalog: what its Xids mean.
        files: labels of the logs, in the order in which they were read.
        lines_of: how many lines each has.
        known: id of a signature → its matches.
        unknown: id of an error shape → its matches.
        worlds: id of a world that the logs show → its matches.
        went_well: id of a sign, or `ORDINARY` → file → those of its last lines that have it, and where each is last.
        is_complete: whether every line that might be an error was examined; False where there were very many.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._rules = _rules()
        self._of_word = {word: list(rules) for word, rules in self._rules.of_word.items()}  # those that are still looked for
        self._prefilter = Prefilter(self._rules.search)
        self._repeats: dict[bytes, int] = defaultdict(int)
        self._lines_of_word: Counter[bytes] = Counter()
        self._examined = 0
        self.files: list[str] = []
        self.lines_of: list[int] = []
        self.known: dict[str, Matches] = defaultdict(Matches)
        self.unknown: dict[str, Matches] = defaultdict(Matches)
        self.worlds: dict[str, Matches] = defaultdict(Matches)
        self._found = {"known": self.known, "unknown": self.unknown, "world": self.worlds}
        self._outcomes = [sign for sign in signs() if sign.kind == "outcome"]
        self.went_well: dict[str, dict[int, dict[bytes, int]]] = defaultdict(dict)
        self.is_complete = True

    def read(self, stream: BinaryIO, label: str) -> None:
        """Read one log to its end. Memory does not grow with its length."""
        self.files.append(label)
        carried = b""
        end: list[tuple[int, bytes]] = []  # its last lines, with their numbers
        before = 0  # lines of the file before the block
        fresh = 0  # index of the first line that has not been examined
        for data in blocks(stream):
            block, lines = with_short_lines(carried + data)
            numbers: Sequence[int] = range(before + 1, before + 1 + len(lines))  # in the file
            if PART in block:  # parts of lines have the number of the line
                numbers = list(accumulate((not line.startswith(PART) for line in lines), initial=before))[1:]
            # The last lines wait for the lines that follow them, unless there are none.
            done = len(lines) if not data else max(fresh, len(lines) - 1 - LINES_AFTER)
            reduced_lines = reduced(block).split(b"\n")
            candidates = [each for each in self._prefilter.candidates(reduced_lines) if fresh <= each[0] < done]
            if candidates:
                self._examine(_Block(lines, reduced_lines), candidates, numbers)
            kept = max(0, done - LINES_OF_A_STACK) if data else len(lines)
            begin = max(0, kept - LINES_AT_THE_END)
            end = [*end, *zip(numbers[begin:kept], lines[begin:kept], strict=True)][-LINES_AT_THE_END:]
            if not data:
                self.lines_of.append(numbers[-1] - (not lines[-1]))
                if self.known or self.unknown:
                    self._look_for_signs(end)
                return
            carried = b"\n".join(lines[kept:])
            before = numbers[kept - 1] if kept else before
            fresh = done - kept

    def _look_for_signs(self, end: Sequence[tuple[int, bytes]]) -> None:
        text = _Text({index: clean(line[:LONGEST_SIGN]) for index, (_, line) in enumerate(end)})
        shown = {each.id: {text.line_at(found.end() - 1) for one in each.patterns for found in text.all(one)} for each in self._outcomes}
        alarming = {text.line_at(found.start()) for pattern in error_shapes()[0].patterns for found in text.all(pattern)}
        calm = {index: line for index, line in text.lines.items() if line.level != "warning" and index not in alarming}
        shown["goes-on"].update(index for index, line in calm.items() if line.level == "info")
        shown[ORDINARY] = {index for index, line in calm.items() if _BEGINS.at(line.latin1, 0) and not end[index][1][:1].isspace()}
        opposite = {text.line_at(found.start()) for sign in self._outcomes for one in sign.unless for found in text.all(one)}
        for name, indexes in shown.items():
            self.went_well[name][len(self.files) - 1] = {text.lines[index].latin1: end[index][0] for index in sorted(indexes - opposite)}

    def _examine(self, block: _Block, candidates: Sequence[_Candidate], numbers: Sequence[int]) -> None:
        """Examine a block's lines with words, some at a time: what is found often in them is left out in the next."""
        looked_for = len(self._of_word)
        for begin in range(0, len(candidates), AT_ONCE):
            wanted = {
                index: still
                for index, words in candidates[begin : begin + AT_ONCE]
                if (still := [word for word in words if word in self._of_word]) and self._is_new(block.reduced_lines[index], still)
            }
            if wanted:
                self._match(block, wanted, numbers)
                self._forget_words()
        if len(self._of_word) < looked_for:
            self._prefilter = Prefilter(WordSearch(self._of_word))
            self._repeats.clear()

    def _is_new(self, line: bytes, words: Iterable[bytes]) -> bool:
        self._repeats[line] += 1
        if self._repeats[line] > REPEATS:
            self._prefilter.forget(line)
            del self._repeats[line]
            return False
        most = LINES_OF_A_LATE_WORD if self._examined > EARLY_LINES else LINES_OF_A_WORD
        if all(self._lines_of_word[word] >= most for word in words):
            self.is_complete = False
            return False
        count = 1 + len(line) // ONE_LINE
        self._lines_of_word.update(dict.fromkeys(words, count))
        self._examined += count
        return True

    def _forget_words(self) -> None:
        """Leave out words that are no longer looked for: of errors that were found often, and of too many lines."""
        most = LINES_OF_A_LATE_WORD if self._examined > EARLY_LINES else LINES_OF_A_WORD
        of = self._found
        full = {rule for rules in self._of_word.values() for rule in rules if rule.id in of[rule.kind] and of[rule.kind][rule.id].is_full}
        left = {
            word: still
            for word, rules in self._of_word.items()
            if self._lines_of_word[word] < most and (still := [rule for rule in rules if rule not in full])
        }
        self.is_complete &= all(self._lines_of_word[word] < most or full.issuperset(rules) for word, rules in self._of_word.items())
        self._of_word = left

    def _match(self, block: _Block, candidates: Mapping[int, Sequence[bytes]], numbers: Sequence[int]) -> None:
        """Match a block's candidate lines (index → words). ``numbers``: of the block's lines."""
        wanted: dict[_Rule, list[int]] = defaultdict(list)
        for index, words in candidates.items():
            begin, end = block.neighbours(index)
            near = b"\n".join(block.reduced_lines[begin:end])
            for rule in {rule for word in words for rule in self._of_word.get(word, ())}:
                if rule.is_possible(near, rule.words[1:]):  # it has a word of the first
                    wanted[rule].append(index)
        block.clean(sorted({index for indexes in wanted.values() for index in indexes}))
        found = [(rule, span) for rule, indexes in wanted.items() for span in block.spans(rule, indexes)]
        touched = sorted({index for _, span in found for index in span.candidates})
        harmless_rules = self._rules.harmless_in(block.lines.values()) if touched else []
        ignored = {index for rule in harmless_rules for span in block.spans(rule, touched) for index in span.candidates}
        claimed = {numbers[each] for rule, span in found if rule.kind == "known" for each in {*range(span.first, span.last + 1)} - ignored}
        certain = {span.quoted for rule, span in found if rule.shape and rule.shape.is_certain}
        for rule, span in sorted(found, key=lambda each: (each[1].candidates[0], each[0].number)):
            matches = self._found[rule.kind][rule.id]
            if matches.is_full or ignored.issuperset(span.candidates) or (rule.shape and numbers[span.quoted] in claimed):
                continue
            line, text, shape = block.lines[span.quoted], latin1(span.text), rule.shape
            if shape and ((line.level and not shape.at_any_level) or shows(shape.unless, text)):
                continue
            first, last = (span.quoted, span.quoted) if shape else (span.first, span.last)
            is_certain = not certain.isdisjoint(range(span.first, span.last + 1))
            kinds = ("overcome", "optional") if shape and not is_certain else ("overcome",)
            is_minor = is_remark(text, *kinds) or is_remark(block.below(span.last), "reaction")
            is_minor = is_minor or is_remark(block.stack(span.quoted), "caught", "announced")
            level: Level = "remark" if is_minor else line.level
            matches.add(Match(len(self.files) - 1, numbers[first], numbers[last], span.text, line.rank, level, span.is_header, is_certain))


class _Span(NamedTuple):
    """Lines (indexes in a block) that a pattern matches, the candidates among them, and the line to quote; `Match` has the rest."""

    first: int
    last: int
    candidates: list[int]
    quoted: int
    text: str
    is_header: bool


class _Block:
    """A block of a log: the lines near its candidates, cleaned, as the texts in which patterns are searched."""

    def __init__(self, raw: Sequence[bytes], reduced_lines: Sequence[bytes]) -> None:
        self._raw, self.reduced_lines = raw, reduced_lines
        self._starts = list(accumulate((len(line) + 1 for line in raw), initial=0))
        self._texts: dict[str | None, _Text] = {}  # rank → its lines
        self._neighbours: dict[int, tuple[int, int]] = {}
        self.lines: dict[int, Line] = {}

    def neighbours(self, index: int) -> tuple[int, int]:
        """Begin and end of the lines that a message with this line in it may take."""
        if index not in self._neighbours:  # many patterns ask for them
            begin = max(index - LINES_BEFORE, bisect_left(self._starts, self._starts[index] - BYTES_AROUND))
            end = min(index + LINES_AFTER, bisect_right(self._starts, self._starts[index + 1] + BYTES_AROUND) - 1)
            self._neighbours[index] = begin, end
        return self._neighbours[index]

    def clean(self, candidates: Iterable[int]) -> None:
        """Make the texts of these candidates and their neighbours."""
        near = _merged(map(self.neighbours, candidates))
        self.lines = {index: clean(self._raw[index]) for begin, end in near for index in range(begin, end)}
        self._all = _Text(self.lines)
        of_rank: dict[str | None, dict[int, Line]] = defaultdict(dict)
        for index, line in self.lines.items():
            of_rank[line.rank][index] = line
        self._texts = {rank: _Text(its_lines) if len(of_rank) > 1 else self._all for rank, its_lines in of_rank.items()}

    def stack(self, index: int) -> bytes:
        """The traceback, or Java's stack, that the line is in or announces, with the line above it; empty if there is none."""
        above, frames_above = self._frames(index, is_above=True)
        below, frames_below = self._frames(index, is_above=False)
        own = self.lines[index].latin1
        is_in_one = frames_above or frames_below or _FRAME.at(own, 0)
        return b"\n".join((*reversed(above), own, *below)) if is_in_one else b""

    def below(self, index: int) -> bytes:
        """The next line, in which the program may say what it does about it."""
        return next(iter(self._frames(index, is_above=False)[0]), b"")

    def _frames(self, of: int, *, is_above: bool) -> tuple[list[bytes], int]:
        """The lines of a stack on one side of a line, nearest first, with the next one; and how many they are. Of the line's rank only."""
        indexes = range(of - 1, -1, -1) if is_above else range(of + 1, len(self._raw))
        other_lines = OTHERS_ABOVE if is_above else OTHERS_BELOW
        left = 0 if is_above and TRACEBACK in self.lines[of].latin1 else other_lines - 1  # the line is one itself
        lines: list[bytes] = []
        frames = 0
        for index in indexes[:LINES_OF_A_STACK]:
            if not frames and index not in self.lines:  # none is near
                break
            line = self.lines.get(index) or clean(self._raw[index])
            if line.rank != self.lines[of].rank or self._raw[index].startswith(PART):  # updates and copies of others
                continue
            lines.append(line.latin1)
            if _LINK.at(line.latin1, 0) or (left and _FRAME.at(line.latin1, 0)):
                frames = len(lines)
                left = 0 if is_above and TRACEBACK in line.latin1 else other_lines
            elif line.latin1:
                left -= 1
                if left <= 0:
                    break
        return lines[: frames + 1], frames

    def spans(self, rule: _Rule, candidates: Sequence[int]) -> Iterator[_Span]:
        """The matches that touch these candidates: among the lines of the candidate's rank, else among all."""
        left = set(candidates)
        for rank, text in self._texts.items():
            of_rank = [index for index in candidates if self.lines[index].rank == rank]
            for span in self._spans_in(text, rule, of_rank):
                left.difference_update(span.candidates)
                yield span
        if left and len(self._texts) > 1:
            yield from self._spans_in(self._all, rule, sorted(left))

    def _spans_in(self, text: _Text, rule: _Rule, candidates: Sequence[int]) -> Iterator[_Span]:
        windows = [(index if rule.begins_on_candidate else begin, end) for index in candidates for begin, end in [self.neighbours(index)]]
        for begin, end in _merged(windows):
            at, behind = text.bounds(begin, end)
            while at < behind and (found := rule.search(text.text, at, behind)):
                start, stop, quoted = found
                first, last = text.line_at(start), text.line_at(max(start, stop - 1))
                at = max(stop, text.end_of_line(start)) + (start == stop)  # further matches on the line count as the same
                touched = candidates[bisect_left(candidates, first) : bisect_right(candidates, last)]
                if touched and (touched[0] == first or not rule.begins_on_candidate):
                    yield _Span(first, last, list(touched), *text.quote(quoted))


class _Text:
    """Lines as one text, and the index of each."""

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self.lines = lines
        self._indexes = list(lines)
        self._starts = list(accumulate((len(line.latin1) + 1 for line in lines.values()), initial=0))
        self.text = b"\n".join(line.latin1 for line in lines.values())

    def bounds(self, begin: int, end: int) -> tuple[int, int]:
        """Where the lines with an index from ``begin`` to ``end`` are."""
        first, behind = bisect_left(self._indexes, begin), bisect_left(self._indexes, end)
        return (self._starts[first], self._starts[behind] - 1) if first < behind else (0, 0)

    def all(self, pattern: Pattern) -> Iterator[Found[bytes]]:
        """The matches, one a line."""
        at = 0
        while found := pattern.first(self.text, at):
            yield found
            at = max(found.end(), self.end_of_line(found.start()))

    def end_of_line(self, offset: int) -> int:
        number = bisect_right(self._starts, offset)
        return self._starts[number] - 1 if number < len(self._starts) else len(self.text)

    def line_at(self, offset: int) -> int:
        return self._indexes[bisect_right(self._starts, offset) - 1]

    def quote(self, offset: int) -> tuple[int, str, bool]:
        """The index of the line there, what of it to quote (of a message of several lines that one), and whether it is a header."""
        number = bisect_right(self._starts, offset) - 1
        index = self._indexes[number]
        text, at = self.lines[index].text, offset - self._starts[number]
        begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        text = text[begin : end if end >= 0 else len(text)].strip()
        if not text.endswith(":"):
            return index, text, False
        following = filter(None, (self.lines[each].text for each in self._indexes[number + 1 : number + 2 + ANNOUNCED_LINES]))
        return index, " ".join((text, *islice(following, ANNOUNCED_LINES)))[:LONGEST_SIGN], True


def _merged(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows in the order of their beginnings, those that overlap as one."""
    merged: list[tuple[int, int]] = []
    last = -1  # the end of the last one
    for begin, end in windows:
        if begin > last:
            merged.append((begin, end))
            last = end
        elif end > last:
            merged[-1] = merged[-1][0], end
            last = end
    return merged


_Kind = Literal["known", "world", "unknown", "harmless"]


class _Rule:
    """A pattern, what it stands for, and the words without which it cannot match. ``shape``: of an unknown error."""

    def __init__(self, number: int, kind: _Kind, id: str, pattern: Pattern, shape: ErrorShape | None = None) -> None:
        self.number, self.kind, self.id, self.pattern, self.shape = number, kind, id, pattern, shape
        self.words = [tuple(word.encode() for word in group) for group in required_words(pattern)]
        self.begins_on_candidate = kind in ("world", "unknown")

    def is_possible(self, text: bytes, groups: Sequence[Sequence[bytes]]) -> bool:
        """Whether a reduced text has one word of each of these groups."""
        for group in groups:  # no generators: this is done for each candidate
            for word in group:
                if word in text:
                    break
            else:
                return False
        return True

    def search(self, text: bytes, begin: int, end: int) -> tuple[int, int, int] | None:
        """(begin, end, where to quote) of the first match."""
        if not (match := self.pattern.first(text, begin, end)):
            return None
        start, stop = match.span()
        quoted = match.start(1) if self.shape and match.groups() else start
        return start, stop, quoted if quoted >= 0 else start


class _Rules:
    """All rules of the data files. ``of_word``: the rules that need the word, apart from harmless ones; ``search`` finds these words."""

    def __init__(self) -> None:
        made: list[tuple[_Kind, str, Pattern, ErrorShape | None]] = []
        for signature in all_signatures().values():
            made += [("known", signature.id, pattern, None) for pattern in signature.patterns]
        made += [("unknown", shape.id, pattern, shape) for shape in error_shapes() for pattern in shape.patterns]
        worlds = (sign for sign in signs() if sign.kind not in ("outcome", "remark"))
        made += [("world", sign.id, pattern, None) for sign in worlds for pattern in sign.patterns]
        made += [("harmless", "", pattern, None) for entry in harmless() for pattern in entry.patterns]
        rules = [_Rule(number, *each) for number, each in enumerate(made)]
        self._harmless = [rule for rule in rules if rule.kind == "harmless"]
        self.of_word: dict[bytes, list[_Rule]] = defaultdict(list)
        for rule in rules:
            if rule.kind != "harmless":
                for word in rule.words[0]:
                    self.of_word[word].append(rule)
        self.search = WordSearch(self.of_word)
        self._harmless_words = WordSearch(word for rule in self._harmless for group in rule.words for word in group)

    def harmless_in(self, lines: Iterable[Line]) -> list[_Rule]:
        """The harmless rules whose words are in these lines."""
        words = {word for line in lines for word in self._harmless_words.all(reduced(line.latin1))}
        return [rule for rule in self._harmless if all(not words.isdisjoint(group) for group in rule.words)]


_rules = cache(_Rules)
