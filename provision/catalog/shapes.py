"""Shapes that data can have, and what is wrong with data that has another. A shape is a function: value → (path, complaint) pairs."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]
Wrong = Iterator[tuple[Path, str]]
Shape = Callable[[Any], Wrong]


def matching(pattern: str, what: str) -> Shape:
    """A text that the whole pattern matches; ``what`` says it in words."""
    compiled = re.compile(pattern)

    def check(value: Any) -> Wrong:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (), f"{value} must be in quotes: as numbers 12.10 and 12.1 are the same"
        elif not isinstance(value, str) or not compiled.fullmatch(value):
            yield (), f"{value!r} is no {what}"

    return check


text = matching(r"(?s).*\S.*", "text")
version = matching(r"\d+(\.\d+)+", "version such as 2.21.5")
release = matching(r"\d+(\.\d+)*(-[\w.+~]+)*", "version such as 2.21.5-1")
cuda = matching(r"\d+\.\d+", "CUDA such as 12.4")
number = matching(r"\d+(\.\d+)*", "number such as 450.80.02")
capability = matching(r"\d+\.\d(\+PTX)?", "compute capability such as 8.0")
sha256 = matching(r"[0-9a-f]{64}", "SHA-256: 64 small hexadecimal digits")
fingerprint = matching(r"[0-9A-F]{40}", "fingerprint: 40 hexadecimal digits")
url = matching(r"(https?://|\{base\}/)\S+", "address")
word = matching(r"\S+", "single word")


def whole(value: Any) -> Wrong:
    """A whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        yield (), f"{value!r} is no whole number"


def amount(value: Any) -> Wrong:
    """A number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        yield (), f"{value!r} is no number"


def flag(value: Any) -> Wrong:
    """true or false."""
    if not isinstance(value, bool):
        yield (), f"{value!r} is neither true nor false"


def date(value: Any) -> Wrong:
    """A day, 2026-11-21."""
    if not isinstance(value, datetime.date):
        yield (), f"{value!r} is no date such as 2026-11-21"


def regex(value: Any) -> Wrong:
    """A regular expression."""
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        yield (), f"{value!r} is no regular expression: {error}"


def optional(shape: Shape) -> Shape:
    """The shape, or null."""

    def check(value: Any) -> Wrong:
        if value is not None:
            yield from shape(value)

    return check


def listed(shape: Shape) -> Shape:
    """A list of things of one shape."""

    def check(value: Any) -> Wrong:
        if not isinstance(value, list):
            yield (), f"{value!r} is no list"
            return
        for index, each in enumerate(value):
            yield from _below(index, shape(each))

    return check


def mapping(key: Shape, value: Shape) -> Shape:
    """Keys of one shape, values of another."""

    def check(found: Any) -> Wrong:
        if not isinstance(found, Mapping):
            yield (), f"{found!r} is no mapping"
            return
        for name, each in found.items():
            for _, complaint in key(name):
                yield (name,), f"the key {complaint}"
            yield from _below(name, value(each))

    return check


def record(required: Mapping[str, Shape], also: Mapping[str, Shape] | None = None) -> Shape:
    """Named entries: all of ``required``, any of ``also``, and nothing else."""
    known = {**required, **(also or {})}

    def check(value: Any) -> Wrong:
        if not isinstance(value, Mapping):
            yield (), f"{value!r} is no mapping with " + ", ".join(required)
            return
        for name in value:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"is {close[0]!r} meant?" if close else "known are " + ", ".join(known)
                yield (name,), f"the key {name!r} is unknown; {hint}"
        for name in required:
            if name not in value:
                yield (), f"the key {name!r} is missing"
        for name, shape in known.items():
            if name in value:
                yield from _below(name, shape(value[name]))

    return check


def both(*shapes: Shape) -> Shape:
    """All of these shapes at once."""

    def check(value: Any) -> Wrong:
        for shape in shapes:
            yield from shape(value)

    return check


def _below(name: str | int, wrong: Wrong) -> Wrong:
    for path, complaint in wrong:
        yield (name, *path), complaint
