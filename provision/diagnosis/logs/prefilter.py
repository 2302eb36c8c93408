"""Finds the few lines of a log that are worth a look, at hundreds of megabytes a second.

Logs repeat themselves: with digits taken out, the lines of a training loop are all the same line. So a block is reduced (lower case, no
digits), split, and only reduced lines that were never seen before are searched, for the words that patterns need, all at once. A line's
verdict is kept, within bounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from provision.diagnosis.patterns import Words

_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_DIGITS = b"0123456789"
_KEPT_LINES = 100_000  # reduced lines whose verdict is kept: some 20 MB
_KEPT_BYTES = 20 << 20


class Prefilter:
    """Lines with any of the words, and which words these are."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self._words = Words(words)
        self._seen: set[bytes] = set()
        self._seen_bytes = 0
        self._words_of: dict[bytes, tuple[bytes, ...]] = {}

    def reduced(self, block: bytes) -> list[bytes]:
        """The lines of a block in lower case and without digits."""
        return block.translate(_LOWER, _DIGITS).split(b"\n")

    def candidates(self, lines: list[bytes]) -> Iterable[tuple[int, tuple[bytes, ...]]]:
        """Indexes of the (reduced) lines that hold words, with these; a line that is forgotten meanwhile comes no more."""
        new = set(lines).difference(self._seen).difference(self._words_of)
        if new:
            self._look_at(new)
        if self._words_of.keys().isdisjoint(lines):
            return ()
        known = self._words_of
        return ((index, known[line]) for index, line in enumerate(lines) if line in known)

    def forget(self, line: bytes) -> None:
        """The line is no candidate any more, wherever it comes again."""
        self._words_of.pop(line, None)
        self._seen.add(line)

    def _look_at(self, new: set[bytes]) -> None:
        if len(self._seen) > _KEPT_LINES or self._seen_bytes > _KEPT_BYTES:
            self._seen.clear()
            self._seen_bytes = 0
        if len(self._words_of) > _KEPT_LINES:
            self._words_of.clear()
        joined = b"\n".join(new)
        candidates, end = {}, -1
        while word := self._words.first(joined, end + 1):  # once a line: it may be long, and full of words
            begin = joined.rfind(b"\n", 0, word.start()) + 1
            end = joined.find(b"\n", word.end())
            end = end if end >= 0 else len(joined)
            line = joined[begin:end]
            candidates[line] = self._words.within(line)
        self._words_of.update(candidates)
        self._seen |= new - candidates.keys()
        self._seen_bytes += len(joined)
