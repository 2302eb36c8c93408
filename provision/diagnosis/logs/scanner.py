"""Streams logs and records where each known error shows. What explains what is decided in root_causes.py.

Only candidate lines (prefilter.py) are examined. A candidate is matched together with its neighbours, because messages take several
lines and are broken differently: first with the neighbours of the same rank, then with all. Where candidates are close together, each
pattern is searched once for all of them, so time grows with the log and not with the number of candidates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import BinaryIO, Literal, NamedTuple

from provision.diagnosis.logs.lines import Line, clean
from provision.diagnosis.logs.prefilter import Prefilter, WordSearch, reduced, required_words
from provision.diagnosis.patterns import Pattern
from provision.diagnosis.signatures import all_signatures, error_shapes, harmless

BLOCK = 1 << 20  # bytes read at once
LINES_BEFORE, LINES_AFTER = 12, 16  # lines around a candidate that a message may take
BYTES_AROUND = 1 << 13  # bytes of them on each side
LONGEST_LINE = 1 << 18  # bytes; what is longer is cut into lines of this size
KEPT_MATCHES = 100  # of one error; all further ones are only counted
REPEATS = 60  # of a line that differs in digits only, after which it is no longer examined


@dataclass(frozen=True)
class Match:
    """Where an error shows: lines ``first`` to ``last`` (from 1) of file number ``file``."""

    file: int
    first: int
    last: int
    text: str
    rank: str | None


@dataclass
class Matches:
    """All matches of one error; of many, ``first`` has those that came first."""

    first: list[Match] = field(default_factory=list)
    times: int = 0

    def add(self, match: Match) -> None:
        if any(match.file == other.file and match.first == other.first for other in self.first[-20:]):
            return
        self.times += 1
        if len(self.first) < KEPT_MATCHES:
            self.first.append(match)


class Scanner:
    """Reads logs one after the other.

    Attributes:
        files: labels of the logs, in the order in which they were read.
        known: id of a signature → its matches.
        unknown: id of an error shape → its matches.
        recovered: id of a signature → (file, line) of the last message that it went well after all.
    """

    def __init__(self) -> None:
        self._rules = _rules()
        self._prefilter = Prefilter(self._rules.search)
        self._repeats: dict[bytes, int] = defaultdict(int)
        self.files: list[str] = []
        self.known: dict[str, Matches] = defaultdict(Matches)
        self.unknown: dict[str, Matches] = defaultdict(Matches)
        self.recovered: dict[str, tuple[int, int]] = {}

    def read(self, stream: BinaryIO, label: str) -> None:
        """Read one log to its end. Memory does not grow with its length."""
        self.files.append(label)
        carried = b""
        number = 1  # of the first line in the block
        fresh = 0  # index of the first line that has not been examined
        while True:
            data = stream.read(BLOCK)
            block = _with_line_ends(carried + data)
            lines = block.split(b"\n")
            # The last lines wait for the lines that follow them, unless there are none.
            done = len(lines) if not data else max(fresh, len(lines) - 1 - LINES_AFTER)
            reduced_lines = reduced(block).split(b"\n")
            candidates = {
                index: words
                for index, words in self._prefilter.candidates(reduced_lines)
                if fresh <= index < done and self._is_new(reduced_lines[index])
            }
            if candidates:
                self._match(_Block(lines, reduced_lines), candidates, number)
            if not data:
                return
            kept = max(0, done - LINES_BEFORE)
            carried = b"\n".join(lines[kept:])
            number += kept
            fresh = done - kept

    def _is_new(self, line: bytes) -> bool:
        self._repeats[line] += 1
        if self._repeats[line] <= REPEATS:
            return True
        self._prefilter.forget(line)
        del self._repeats[line]
        return False

    def _match(self, block: _Block, candidates: Mapping[int, tuple[bytes, ...]], number: int) -> None:
        """Match a block's candidate lines (index → words). ``number`` is that of the block's first line."""
        wanted: dict[_Rule, list[int]] = defaultdict(list)
        for index, words in candidates.items():
            near = block.reduced_near(index)
            for rule in self._rules.with_words(words):
                if rule.is_possible(near):
                    wanted[rule].append(index)
        block.clean(sorted({index for indexes in wanted.values() for index in indexes}))
        found = [(rule, span) for rule, indexes in wanted.items() for span in block.spans(rule, indexes)]
        touched = sorted({index for _, span in found for index in span.candidates})
        harmless_rules = [rule for rule in self._rules.harmless if touched and rule.is_possible(block.reduced_text)]
        ignored = {index for rule in harmless_rules for span in block.spans(rule, touched) for index in span.candidates}
        for rule, span in sorted(found, key=lambda each: (each[1].candidates[0], each[0].number)):
            if not ignored.issuperset(span.candidates):
                line = block.lines[span.first]
                self._add(rule, Match(len(self.files) - 1, number + span.first, number + span.last, line.text, line.rank))

    def _add(self, rule: _Rule, match: Match) -> None:
        if rule.kind == "known":
            self.known[rule.id].add(match)
        elif rule.kind == "unknown":
            self.unknown[rule.id].add(match)
        else:
            self.recovered[rule.id] = (match.file, match.first)


class _Span(NamedTuple):
    """Lines (indexes in a block) that a pattern matches, and the candidates among them."""

    first: int
    last: int
    candidates: list[int]


class _Block:
    """A block of a log: the lines near its candidates, cleaned, as the texts in which patterns are searched."""

    def __init__(self, raw: Sequence[bytes], reduced_lines: Sequence[bytes]) -> None:
        self._raw, self._reduced = raw, reduced_lines
        self._starts = list(accumulate((len(line) + 1 for line in raw), initial=0))
        self._texts: dict[str | None, _Text] = {}  # rank → its lines
        self.lines: dict[int, Line] = {}

    def neighbours(self, index: int) -> tuple[int, int]:
        """Begin and end of the lines that a message with this line in it may take."""
        begin = max(index - LINES_BEFORE, bisect_left(self._starts, self._starts[index] - BYTES_AROUND))
        end = min(index + LINES_AFTER, bisect_right(self._starts, self._starts[index + 1] + BYTES_AROUND) - 1)
        return begin, end

    def reduced_near(self, index: int) -> bytes:
        begin, end = self.neighbours(index)
        return b"\n".join(self._reduced[begin:end])

    def clean(self, candidates: Iterable[int]) -> None:
        """Make the texts of these candidates and their neighbours."""
        for begin, end in _merged(map(self.neighbours, candidates)):
            self.lines.update((index, clean(self._raw[index])) for index in range(begin, end))
        self._all = _Text(self.lines)
        self.reduced_text = reduced(self._all.text)
        of_rank: dict[str | None, dict[int, Line]] = defaultdict(dict)
        for index, line in self.lines.items():
            of_rank[line.rank][index] = line
        self._texts = {rank: _Text(its_lines) if len(of_rank) > 1 else self._all for rank, its_lines in of_rank.items()}

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
        begun = -1  # the line on which the last match began; further ones on it count as the same
        for begin, end in _merged(windows):
            for first, last in text.spans(rule.pattern, begin, end):
                touched = candidates[bisect_left(candidates, first) : bisect_right(candidates, last)]
                if touched and first != begun and (touched[0] == first or not rule.begins_on_candidate):
                    begun = first
                    yield _Span(first, last, list(touched))


class _Text:
    """Lines as one text, and the index of each."""

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self._indexes = list(lines)
        self._starts = list(accumulate((len(line.latin1) + 1 for line in lines.values()), initial=0))
        self.text = b"\n".join(line.latin1 for line in lines.values())

    def spans(self, pattern: Pattern, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """(first, last) line of each match in the lines with an index from ``begin`` to ``end``."""
        first, behind = bisect_left(self._indexes, begin), bisect_left(self._indexes, end)
        if first < behind:
            for start, stop in pattern.spans(self.text, self._starts[first], self._starts[behind] - 1):
                yield self._line_at(start), self._line_at(max(start, stop - 1))

    def _line_at(self, offset: int) -> int:
        return self._indexes[bisect_right(self._starts, offset) - 1]


def _merged(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows in the order of their beginnings, those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in windows:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _with_line_ends(block: bytes) -> bytes:
    """The block with a line without end, as binary files have, cut, so that it cannot fill the memory."""
    tail = block.rfind(b"\n") + 1
    if len(block) - tail <= LONGEST_LINE:
        return block
    pieces = [block[at : at + LONGEST_LINE] for at in range(tail, len(block), LONGEST_LINE)]
    return block[:tail] + b"\n".join(pieces)


# --- what is searched -------------------------------------------------------------------------------------------------------------------


_Kind = Literal["known", "recovery", "unknown", "harmless"]


class _Rule:
    """A pattern, what it stands for, and the words without which it cannot match."""

    def __init__(self, number: int, kind: _Kind, id: str, pattern: Pattern) -> None:
        self.number, self.kind, self.id, self.pattern = number, kind, id, pattern
        self.words = [tuple(word.encode() for word in group) for group in required_words(pattern)]
        self.begins_on_candidate = kind in ("recovery", "unknown")

    def is_possible(self, text: bytes) -> bool:
        """Whether a reduced text has one word of each group."""
        for group in self.words:  # no generators: this is done for each candidate
            for word in group:
                if word in text:
                    break
            else:
                return False
        return True


class _Rules:
    """All rules of the data files."""

    def __init__(self) -> None:
        patterns: list[tuple[_Kind, str, Pattern]] = []
        for signature in all_signatures().values():
            patterns += [("known", signature.id, pattern) for pattern in signature.patterns]
            patterns += [("recovery", signature.id, pattern) for pattern in signature.recovered_by]
        patterns += [("unknown", shape.id, pattern) for shape in error_shapes() for pattern in shape.patterns]
        patterns += [("harmless", "", pattern) for pattern in harmless()]
        rules = [_Rule(number, *each) for number, each in enumerate(patterns)]
        self.harmless = [rule for rule in rules if rule.kind == "harmless"]
        self.search = WordSearch(word for rule in rules for word in rule.words[0])
        self._with_word: dict[bytes, list[_Rule]] = defaultdict(list)
        for rule in rules:
            for word in rule.words[0]:
                if rule.kind != "harmless":
                    self._with_word[word].append(rule)

    def with_words(self, words: Iterable[bytes]) -> set[_Rule]:
        """The rules, apart from the harmless ones, that need one of these words."""
        return {rule for word in words for rule in self._with_word.get(word, ())}


_rules = cache(_Rules)
