"""Finds the few lines of a log that any pattern can match, at hundreds of megabytes a second.

Logs repeat themselves: without digits, the lines of a training loop are all the same line. So a block is reduced (lower case, no
digits) and split, and only reduced lines that were never seen before are searched, for the words that patterns need, all at once. What
was found in a line is remembered, within bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import re2

from provision.diagnosis.patterns import Match, latin1_options

_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_KEPT_LINES = 100_000  # reduced lines whose words are remembered: some 20 MB
_KEPT_BYTES = 20 << 20
_MEMORY = 16 << 20  # bytes for the states of a search for all words


def reduced(text: bytes) -> bytes:
    """The text in lower case and without digits."""
    return text.translate(_LOWER, b"0123456789")


class WordSearch:
    """Searches texts for many words at once. It keeps no state."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self._words = sorted(set(words))
        self._any = re2.compile(b"|".join(map(re2.escape, self._words)) or b"[^\x00-\xff]", latin1_options(_MEMORY))
        self._set = re2.Set.SearchSet(latin1_options(_MEMORY))
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
        joined = b"\n".join((*new, b""))
        candidates, end = {}, -1
        while word := self._search.first(joined, end + 1):  # once a line: it may be long, and full of words
            begin = joined.rfind(b"\n", 0, word.start()) + 1
            end = joined.find(b"\n", word.end())
            candidates[joined[begin:end]] = self._search.all(joined[begin:end])
        self._words_of.update(candidates)
        self._without |= new - candidates.keys()
        self._without_bytes += len(joined)
