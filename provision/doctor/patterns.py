"""Patterns that are looked for in text from outside. RE2 matches them, whose time grows with the length of the text and no faster.

Python's own engine tries the ways to match one after the other: a line of four kilobytes, written for it, can take it hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
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

    def spans(self, text: bytes, begin: int = 0) -> Iterator[tuple[int, int]]:
        """(first, behind the last) letter of each match from ``begin`` on, in a text of `letters`."""
        for found in self._letters.finditer(text, begin):
            yield found.span()

    def found_in(self, text: str) -> bool:
        """Whether it matches anywhere."""
        return self._text.search(_encodable(text)) is not None

    def match(self, text: str) -> Any:
        """The match at the beginning, as Python's, or None."""
        return self._text.match(_encodable(text))

    def replace(self, put: str | Callable[[Any], str], text: str) -> str:
        """The text with ``put`` in the place of each match."""
        replaced: str = self._text.sub(put, _encodable(text))
        return replaced


def _encodable(text: str) -> str:
    """The text with `?` for lone surrogates, as names of files have them that are no UTF-8: RE2 takes none."""
    return text.encode(errors="replace").decode()


def letters(text: str) -> bytes:
    """A text with one byte for each letter, for `Pattern.spans`: no pattern asks for others than ASCII's."""
    return text.encode("latin-1", "replace")
