"""Text of the program as Markdown, for the pages that are made from it."""

from __future__ import annotations

import re
from collections.abc import Callable

_CODE = re.compile(r"(``.*?``|`[^`]*`)")


def plain(text: str) -> str:
    """Prose in which Markdown sees no markup but code."""
    return outside_code(text, lambda part: re.sub(r"([\\`*_<>\[\]])", r"\\\1", part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what is no code changed."""
    return "".join(part if number % 2 else change(part) for number, part in enumerate(_CODE.split(text)))
