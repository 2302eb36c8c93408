"""Patterns that are looked for in text from outside. RE2 matches them, whose time grows with the length of the text and no faster.

Python's own engine tries the ways to match one after the other: a line of four kilobytes, written for it, can take it hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import Any

import re2


@dataclass(frozen=True)
class Pattern:
    """A pattern in RE2's syntax: Python's without look-around and back references, and at most 1000 of one thing.

    Args:
        source: what it was written as; ASCII.
    """

    source: str

    def __post_init__(self) -> None:
        self._text  # noqa: B018  a mistake in it is raised here

    @cached_property
    def _text(self) -> Any:
        return self._compiled(re2.Options())

    @cached_property
    def _letters(self) -> Any:
        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1  # one byte a letter: a fraction of the states
        return self._compiled(options)

    def _compiled(self, options: Any) -> Any:
        options.log_errors = False  # they are raised
        try:
            return re2.compile(self.source.encode("ascii"), options)
        except re2.error as error:
            raise ValueError(f"{error.args[0].decode()}: {self.source}") from error

    def spans(self, text: bytes, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """(first, behind the last) letter of each match between ``begin`` and ``end``, in a text of `letters`."""
        return map(methodcaller("span"), self._letters.finditer(text, begin, end))

    def at(self, text: bytes, begin: int) -> Any:
        """The match that begins there in a text of `letters`, as Python's, or None."""
        return self._letters.match(text, begin)

    def match(self, text: str) -> Any:
        """The match at the beginning, as Python's, or None."""
        return self._text.match(_encodable(text))

    def replace(self, put: str | Callable[[Any], str], text: str) -> str:
        """The text with ``put`` in the place of each match."""
        replaced: str = self._text.sub(put, _encodable(text))
        return replaced


class Words:
    """Words that are looked for all at once."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self._words = sorted(set(words))
        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1
        self._any = re2.compile(b"|".join(map(re2.escape, self._words)), options)
        self._set = re2.Set.SearchSet(options)
        for word in self._words:
            self._set.Add(re2.escape(word))
        self._set.Compile()

    def first(self, text: bytes, begin: int) -> Any:
        """The first word from ``begin`` on, as Python's match, or None."""
        return self._any.search(text, begin)

    def within(self, text: bytes) -> tuple[bytes, ...]:
        """All that stand in a text, also those within others, in alphabetical order."""
        return tuple(self._words[number] for number in sorted(self._set.Match(text) or ()))


def _encodable(text: str) -> str:
    """The text with `?` for lone surrogates, as names of files have them that are no UTF-8: RE2 takes none."""
    return text.encode(errors="replace").decode()


def letters(text: str) -> bytes:
    """A text with one byte for each letter, for `Pattern.spans`: no pattern asks for others than ASCII's."""
    return text.encode("latin-1", "replace")
