"""Patterns for text from outside, matched by RE2 in time that is linear in the text.

Python's own engine backtracks: a line of four kilobytes, written for it, can take hours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import re2

_Text = TypeVar("_Text", str, bytes, covariant=True)


class Match(Protocol[_Text]):
    """A match of RE2, which is as Python's."""

    def __getitem__(self, group: int) -> _Text: ...
    def groups(self) -> tuple[_Text | None, ...]: ...
    def span(self, group: int = 0) -> tuple[int, int]: ...
    def start(self, group: int = 0) -> int: ...
    def end(self, group: int = 0) -> int: ...


@dataclass(frozen=True)
class Pattern:
    """A pattern in RE2's syntax: Python's without look-around and back references, and at most 1000 repetitions.

    It is compiled when it is first used, as few of a thousand are in one log: that raises ValueError where RE2 refuses it.

    Args:
        source: the pattern as written; ASCII.
    """

    source: str

    @cached_property
    def _unicode(self) -> Any:
        return self._compiled(re2.Options())

    @cached_property
    def _latin1(self) -> Any:
        return self._compiled(latin1_options())

    def _compiled(self, options: re2.Options) -> Any:
        options.log_errors = False  # they are raised
        try:
            return re2.compile(self.source.encode("ascii"), options)
        except re2.error as error:
            raise ValueError(f"{error.args[0].decode()}: {self.source}") from error

    def first(self, text: bytes, begin: int = 0, end: int | None = None) -> Match[bytes] | None:
        """The first match between ``begin`` and ``end`` of a text in `latin1`."""
        found: Match[bytes] | None = self._latin1.search(text, begin, end)
        return found

    def at(self, text: bytes, begin: int) -> Match[bytes] | None:
        """The match that begins there in a text in `latin1`."""
        found: Match[bytes] | None = self._latin1.match(text, begin)
        return found

    def match(self, text: str) -> Match[str] | None:
        """The match at the beginning."""
        found: Match[str] | None = self._unicode.match(_encodable(text))
        return found

    def replace(self, replacement: str | Callable[[Match[str]], str], text: str) -> str:
        """The text with each match replaced."""
        replaced: str = self._unicode.sub(replacement, _encodable(text))
        return replaced


def latin1_options(memory: int = 8 << 20) -> re2.Options:
    """RE2's options for texts in `latin1`: one byte a character takes a fraction of the states of UTF-8. ``memory``: bytes for these."""
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = memory
    return options


def latin1(text: str) -> bytes:
    """A text with one byte for each character, for `Pattern.first`: patterns are ASCII, other characters become ``?``."""
    return text.encode("latin-1", "replace")


def _encodable(text: str) -> str:
    """The text with `?` for lone surrogates, as file names that are not UTF-8 have them: RE2 refuses them."""
    return text.encode(errors="replace").decode()
