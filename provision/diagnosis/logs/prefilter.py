"""Finds the few lines of a log that any pattern can match, at hundreds of megabytes a second.

Logs repeat themselves: without digits, the lines of a training loop are all the same line. So a block is reduced (lower case, no
digits) and split, and only reduced lines that were never seen before are searched, for the words that patterns need, all at once. What
was found in a line is remembered, within bounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import re2

from provision.diagnosis.patterns import Match, Pattern, latin1_options

if sys.version_info >= (3, 11):
    from re import _parser as parser  # type: ignore[attr-defined]
else:  # pragma: no cover
    import sre_parse as parser

SHORTEST_WORD = 4
COMMON_LETTERS = frozenset(" etaoinrslcdmp")
# Words of ordinary log lines; a pattern that has no other literal text needs two of them next to each other.
COMMON_WORDS = frozenset((Path(__file__).parent / "common_words.txt").read_text(encoding="utf-8").split())

_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_DIGITS = b"0123456789"
_SPACES = ("[(IN, [(CATEGORY, CATEGORY_SPACE)])]", "[(IN, [(LITERAL, 32), (LITERAL, 9)])]")  # as Python's parser shows them
_KEPT_LINES = 100_000  # reduced lines whose words are remembered: some 20 MB
_KEPT_BYTES = 20 << 20

_Words = frozenset[str]


def reduced(text: bytes) -> bytes:
    """The text in lower case and without digits."""
    return text.translate(_LOWER, _DIGITS)


class WordSearch:
    """Searches texts for many words at once. It keeps no state."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self._words = sorted(set(words))
        self._any = re2.compile(b"|".join(map(re2.escape, self._words)) or b"[^\x00-\xff]", latin1_options())
        self._set = re2.Set.SearchSet(latin1_options())
        for word in self._words:
            self._set.Add(re2.escape(word))
        self._set.Compile()

    def first(self, text: bytes, begin: int) -> Match[bytes] | None:
        """The first word from ``begin`` on."""
        found: Match[bytes] | None = self._any.search(text, begin)
        return found

    def all(self, text: bytes) -> tuple[bytes, ...]:
        """All words in a text, also those within others, in alphabetical order."""
        return tuple(self._words[number] for number in sorted(self._set.Match(text) or ()))


class Prefilter:
    """The lines with words of patterns, and which words these are."""

    def __init__(self, search: WordSearch) -> None:
        self._search = search
        self._without: set[bytes] = set()  # reduced lines without any word
        self._without_bytes = 0
        self._words_of: dict[bytes, tuple[bytes, ...]] = {}

    def candidates(self, lines: Sequence[bytes]) -> Iterable[tuple[int, tuple[bytes, ...]]]:
        """Index and words of each (reduced) line with a word. Lines that are forgotten while this runs are left out from then on."""
        new = set(lines).difference(self._without).difference(self._words_of)
        if new:
            self._learn(new)
        if self._words_of.keys().isdisjoint(lines):
            return ()
        known = self._words_of
        return ((index, known[line]) for index, line in enumerate(lines) if line in known)

    def forget(self, line: bytes) -> None:
        """The (reduced) line is no longer a candidate, wherever it is repeated."""
        self._words_of.pop(line, None)
        self._without.add(line)

    def _learn(self, new: set[bytes]) -> None:
        if len(self._without) > _KEPT_LINES or self._without_bytes > _KEPT_BYTES:
            self._without.clear()
            self._without_bytes = 0
        if len(self._words_of) > _KEPT_LINES:
            self._words_of.clear()
        joined = b"\n".join(new)
        candidates, end = {}, -1
        while word := self._search.first(joined, end + 1):  # once a line: it may be long, and full of words
            begin = joined.rfind(b"\n", 0, word.start()) + 1
            end = joined.find(b"\n", word.end())
            end = end if end >= 0 else len(joined)
            line = joined[begin:end]
            candidates[line] = self._search.all(line)
        self._words_of.update(candidates)
        self._without |= new - candidates.keys()
        self._without_bytes += len(joined)


def required_words(pattern: Pattern) -> list[_Words]:
    """Sets of words: of each set, one word is in every text that matches. The first set is in the fewest texts that do not.

    The pattern is parsed by Python's parser of regular expressions, which knows all that RE2 does.

    Raises:
        ValueError: the pattern has no part that is literal enough.
    """
    candidates = _candidates(parser.parse(pattern.source))
    best = _best(candidates)
    if best is None:
        raise ValueError(f"the pattern has no literal word of {SHORTEST_WORD} letters or more: {pattern.source}")
    return [best, *(words for words in candidates if words != best and not any(" " in word for word in words))]


def _candidates(tree: Iterable[tuple[Any, Any]]) -> list[_Words]:
    """All such sets of words, in the order of the pattern."""
    found: list[_Words] = []
    literal = ""

    def end_literal() -> None:
        nonlocal literal
        found.extend(_words_of(literal))
        literal = ""

    for operation, value in tree:
        name = str(operation)
        if name == "LITERAL":
            literal += chr(value)
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1 and str(value[2]) in _SPACES:
            literal += " "
        elif _is_digits(name, value):
            continue  # reduced lines have none
        else:
            end_literal()
            if name == "SUBPATTERN":
                found.extend(_candidates(value[3]))
            elif name == "BRANCH":
                branches = [_best(_candidates(branch)) for branch in value[1]]
                if all(branches):
                    found.append(frozenset().union(*(branch for branch in branches if branch)))
            elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
                found.extend(_candidates(value[2]))
    end_literal()
    return found


def _is_digits(name: str, value: Any) -> bool:
    inner = value[2] if name in ("MAX_REPEAT", "MIN_REPEAT") else [(name, value)]
    return len(inner) == 1 and str(inner[0][0]) == "IN" and [str(each) for each in inner[0][1]] == ["(CATEGORY, CATEGORY_DIGIT)"]


def _words_of(literal: str) -> Iterable[_Words]:
    """Each word of a literal text, and the whole text, for logs that do not break it into lines."""
    plain = "".join(letter for letter in literal.lower() if not letter.isdigit())
    for word in {*plain.split(), plain.strip()}:
        if len(word) >= SHORTEST_WORD:
            yield frozenset({word})


def _best(candidates: Sequence[_Words]) -> _Words | None:
    """The set that is in the fewest texts; of equal ones the last: messages begin with more general words."""
    return max(reversed(candidates), key=lambda words: min(_rarity(word) for word in words), default=None)


def _rarity(word: str) -> float:
    """How few lines contain the word. One word is better than several: programs and people break lines differently."""
    rare = 0.0 if COMMON_LETTERS.issuperset(word[:-2]) else 2.5
    if " " in word:
        return rare + (5.2 if len(word) > 8 else 3)  # never as much as one word has: sets have no order
    return 1 if word in COMMON_WORDS else rare + min(len(word), 10)
