"""Streams logs and collects where each signature matches. What follows from what is decided elsewhere (judge.py).

A candidate line (prefilter.py) is looked at together with its neighbours, because programs print messages over several lines, and
people fold them: first with the neighbours of the same rank, then with all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import BinaryIO

from provision.doctor.logs.lines import Line, clean
from provision.doctor.logs.literals import required
from provision.doctor.logs.prefilter import Prefilter
from provision.doctor.logs.unknown import MARKERS
from provision.doctor.patterns import Pattern, letters
from provision.doctor.signatures import Signature

BLOCK = 1 << 20  # bytes read at once
BEHIND, AHEAD = 12, 16  # lines around a candidate that a message may take
NEAR = 1 << 13  # bytes of them on each side
LONGEST_LINE = 1 << 18  # bytes; what is longer is cut into lines of this size
KEPT_HITS = 100  # of one signature; all further ones are only counted
TRIES = 60  # looks at lines that are alike but for their digits, before they are taken to be what they were so far


@dataclass(frozen=True)
class Hit:
    """A match: lines ``first`` to ``last`` (from 1) of file number ``file``."""

    file: int
    first: int
    last: int
    text: str
    rank: str | None


@dataclass
class Found:
    """All that was seen of one signature."""

    hits: list[Hit] = field(default_factory=list)
    times: int = 0

    def add(self, hit: Hit) -> None:
        if self.hits and any(hit.file == other.file and hit.first == other.first for other in self.hits[-20:]):
            return
        self.times += 1
        if len(self.hits) < KEPT_HITS:
            self.hits.append(hit)


@dataclass(frozen=True)
class _Rule:
    pattern: Pattern
    kind: str  # signature, recovery, harmless, unknown
    id: str
    words: tuple[tuple[bytes, ...], ...]  # of each group one must stand near the candidate; the first is the one it was found by

    @classmethod
    def of(cls, pattern: Pattern, kind: str, name: str) -> _Rule:
        return cls(pattern, kind, name, tuple(tuple(word.encode() for word in group) for group in required(pattern)))

    def possible(self, near: bytes) -> bool:
        return all(any(word in near for word in group) for group in self.words)


class Scanner:
    """Feeds on logs one after the other and remembers what it found.

    Attributes:
        files: labels of the logs, in the order they were read.
        found: signature id → where.
        unknown: marker → where an error stands that no signature claims.
        recovered: signature id → last line (file, line) that says that it went well after all.
    """

    def __init__(self, signatures: Iterable[Signature], harmless: Sequence[Pattern]) -> None:
        rules = [_Rule.of(pattern, "harmless", "") for pattern in harmless]
        for signature in signatures:
            rules += [_Rule.of(pattern, "signature", signature.id) for pattern in signature.patterns]
            rules += [_Rule.of(pattern, "recovery", signature.id) for pattern in signature.recovered_by]
        rules += [_Rule.of(pattern, "unknown", name) for name, pattern in MARKERS.items()]
        self._rules: dict[bytes, list[_Rule]] = defaultdict(list)
        self._harmless = [rule for rule in rules if rule.kind == "harmless"]
        for rule in rules:  # the harmless first: they end the look at a line
            for word in rule.words[0]:
                self._rules[word].append(rule)
        self._order = {id(rule): number for number, rule in enumerate(rules)}
        self._prefilter = Prefilter(word.decode() for word in self._rules)
        self._tries: dict[bytes, int] = defaultdict(int)
        self.files: list[str] = []
        self.found: dict[str, Found] = defaultdict(Found)
        self.unknown: dict[str, Found] = defaultdict(Found)
        self.recovered: dict[str, tuple[int, int]] = {}

    def read(self, stream: BinaryIO, label: str) -> None:
        """Read one log to its end. Memory does not grow with its length."""
        self.files.append(label)
        carry = b""
        number = 1  # of the first line in the block
        fresh = 0  # index of the first line that has not been looked at
        while True:
            data = stream.read(BLOCK)
            block = _without_endless_lines(carry + data)
            raw = block.split(b"\n")
            # The last lines wait for what follows them; without more data they are looked at as they are.
            done = len(raw) if not data else max(fresh, len(raw) - 1 - AHEAD)
            reduced = self._prefilter.reduced(block)
            for index in self._prefilter.candidates(reduced):
                if fresh <= index < done:
                    self._look(raw, reduced, index, number)
            if not data:
                return
            keep = max(0, done - BEHIND)
            carry = b"\n".join(raw[keep:])
            number += keep
            fresh = done - keep

    def _look(self, raw: list[bytes], reduced: list[bytes], index: int, number: int) -> None:
        line = reduced[index]
        self._tries[line] += 1
        if self._tries[line] > TRIES:
            self._prefilter.forget(line)
            self._tries.pop(line)
            return
        begin, end = index - _fitting(reversed(raw[max(0, index - BEHIND) : index])), index + 1 + _fitting(raw[index + 1 : index + AHEAD])
        near = b"\n".join(reduced[begin:end])
        rules = {id(rule): rule for word in self._prefilter.words_in(line) for rule in self._rules[word] if rule.possible(near)}
        rules.update({id(rule): rule for rule in self._harmless if rule.possible(near)})  # also one that begins on another line
        if not rules:
            return
        lines = [clean(each) for each in raw[begin:end]]
        here = index - begin
        alike = [(at, line) for at, line in enumerate(lines) if line.rank == lines[here].rank]
        everything = list(enumerate(lines))
        windows = [_Window(alike, here)] + ([_Window(everything, here)] if len(alike) < len(everything) else [])
        for _, rule in sorted(rules.items(), key=lambda item: self._order[item[0]]):
            for window in windows:
                span = window.match(rule.pattern, only_here=rule.kind in ("unknown", "recovery"))
                if span is not None:
                    break
            else:
                continue
            if rule.kind == "harmless":
                return
            first, last = span
            shown: Line = lines[first]
            hit = Hit(len(self.files) - 1, number + begin + first, number + begin + last, shown.text, shown.rank)
            if rule.kind == "signature":
                self.found[rule.id].add(hit)
            elif rule.kind == "unknown":
                self.unknown[rule.id].add(hit)
            else:
                self.recovered[rule.id] = (hit.file, hit.first)


class _Window:
    """Neighbouring lines as one text, in which matches are looked for that touch the line in question."""

    def __init__(self, lines: Sequence[tuple[int, Line]], here: int) -> None:
        self._numbers = [at for at, _ in lines]
        texts = [letters(line.text) for _, line in lines]
        self._starts = [0, *accumulate(len(text) + 1 for text in texts[:-1])]
        self._text = b"\n".join(texts)
        position = self._numbers.index(here)
        self._begin = self._starts[position]
        self._end = self._begin + len(texts[position])

    def match(self, pattern: Pattern, *, only_here: bool) -> tuple[int, int] | None:
        """(first, last) line of the first match that touches the line, as indexes into all lines."""
        for first, behind in pattern.spans(self._text, self._begin if only_here else 0):
            if first > self._end:
                return None
            if behind > self._begin or first == self._begin:
                return self._line_at(first), self._line_at(max(first, behind - 1))
        return None

    def _line_at(self, offset: int) -> int:
        low, high = 0, len(self._starts) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._starts[middle] <= offset else (low, middle - 1)
        return self._numbers[low]


def _fitting(lines: Iterable[bytes]) -> int:
    """How many of the lines, from the first on, are near."""
    sizes = accumulate(len(line) + 1 for line in lines)
    return sum(1 for _ in takewhile(lambda size: size <= NEAR, sizes))


def _without_endless_lines(block: bytes) -> bytes:
    """A line without end, as binary files have, is cut, so that it cannot fill the memory."""
    tail = block.rfind(b"\n") + 1
    if len(block) - tail <= LONGEST_LINE:
        return block
    pieces = [block[at : at + LONGEST_LINE] for at in range(tail, len(block), LONGEST_LINE)]
    return block[:tail] + b"\n".join(pieces)
