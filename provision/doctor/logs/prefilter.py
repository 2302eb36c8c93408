"""Finds the few lines of a log that are worth a look, at hundreds of megabytes a second.

Logs repeat themselves: with digits taken out, the lines of a training loop are all the same line. So a block is reduced (lower case, no
digits), split, and only reduced lines that were never seen before are searched, for the words that patterns need, with one combined
expression. A line's verdict is kept, within bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_DIGITS = b"0123456789"
_KEPT_LINES = 100_000  # reduced lines whose verdict is kept: some 20 MB
_KEPT_BYTES = 20 << 20
# From frequent to rare in logs: the search jumps from one possible first letter to the next, so rare ones make it fast.
_FREQUENCY = " etaoinrslcdpmuhgfbyw.-:=/,_[]()vk'\"<>jxqz"
_ONE_MORE = 0.05  # what one more word from a letter costs, beside what it costs to look at every such letter


class Prefilter:
    """Lines with any of the words."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = sorted({word.encode() for word in words})
        self._any = re.compile(_trie(self._words))
        self._seen: set[bytes] = set()
        self._seen_bytes = 0
        self._words_of: dict[bytes, tuple[bytes, ...]] = {}

    def reduced(self, block: bytes) -> list[bytes]:
        """The lines of a block in lower case and without digits."""
        return block.translate(_LOWER, _DIGITS).split(b"\n")

    def candidates(self, lines: list[bytes]) -> Iterable[int]:
        """Indexes of the (reduced) lines that hold a word; one that is forgotten meanwhile comes no more."""
        new = set(lines).difference(self._seen).difference(self._words_of)
        if new:
            self._look_at(new)
        if self._words_of.keys().isdisjoint(lines):
            return ()
        known = self._words_of
        return (index for index, line in enumerate(lines) if line in known)

    def words_in(self, line: bytes) -> tuple[bytes, ...]:
        """Which words stand in a reduced line that is a candidate."""
        found = self._words_of.get(line)
        if not found:
            found = tuple(word for word in self._words if word in line)
            self._words_of[line] = found
        return found

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
        candidates, end = set(), -1
        while match := self._any.search(joined, end + 1):  # once a line: it may be long, and full of words
            begin = joined.rfind(b"\n", 0, match.start()) + 1
            end = joined.find(b"\n", match.end())
            end = end if end >= 0 else len(joined)
            candidates.add(joined[begin:end])
        self._words_of.update(dict.fromkeys(candidates, ()))
        self._seen |= new - candidates
        self._seen_bytes += len(joined)


def _tails(words: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Each word, and what of it is searched for: from a rare letter on, and from few different letters in all."""
    starts: set[str] = set()
    # Words without a rare letter choose first: their letters cost most, and then serve others, too.
    for text in sorted((word.decode("utf-8", "replace") for word in words), key=lambda text: (-min(map(_often, text)), text)):
        costs = [_often(letter) * (_ONE_MORE if letter in starts else 1) for letter in text[: max(1, len(text) - 2)]]
        best = costs.index(min(costs))
        starts.add(text[best])
        yield text.encode(), text[best:].encode()


def _often(letter: str) -> float:
    """How often a letter stands in logs, by its place among the others; the most frequent has 1."""
    return 0.87 ** (_FREQUENCY.find(letter) if letter in _FREQUENCY else len(_FREQUENCY))


@dataclass
class _Node:
    """One letter of the tails: what follows it, and the words whose tails end here."""

    below: dict[int, _Node] = field(default_factory=dict)
    words: list[bytes] = field(default_factory=list)

    def expression(self) -> bytes:
        """Alternatives that begin alike are tried once; where a tail ends, a look back sees whether it is the whole word."""
        parts = [b"(?<=" + re.escape(word) + b")" for word in self.words]
        parts += [re.escape(bytes([letter])) + node.expression() for letter, node in sorted(self.below.items())]
        return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"


def _trie(words: Iterable[bytes]) -> bytes:
    """One expression that matches any of the words, each from where `_tails` lets it begin."""
    root = _Node()
    for word, tail in _tails(words):
        node = root
        for letter in tail:
            node = node.below.setdefault(letter, _Node())
        node.words.append(word)
    return root.expression()
