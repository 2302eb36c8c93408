"""What the engine says while it builds, pulls or pushes, as events: its fragments put together into steps, lines and layers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_STEP = re.compile(r"Step (\d+)/(\d+) : (.*)", re.DOTALL)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NOISE = re.compile(r"\s*---> (Running in )?[0-9a-f]{12}|Removing intermediate container [0-9a-f]+|Successfully (built|tagged) .*")


@dataclass(frozen=True)
class Step:
    """A step of the Dockerfile begins."""

    number: int
    total: int
    instruction: str


@dataclass(frozen=True)
class Cached:
    """The step that began last was taken from the cache."""


@dataclass(frozen=True)
class Line:
    """A line that a step printed."""

    text: str


@dataclass(frozen=True)
class Layer:
    """How far a layer is on its way; ``done`` and ``total`` are bytes, 0 where they are not known."""

    name: str
    status: str
    done: int
    total: int


@dataclass(frozen=True)
class Failed:
    """The engine gave up."""

    why: str


@dataclass(frozen=True)
class Made:
    """The image is there, under this id."""

    image: str


Event = Step | Cached | Line | Layer | Failed | Made


def events(said: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """The events in what the engine says, in its order."""
    rest = ""
    for entry in said:
        if "stream" in entry:
            *whole, rest = (rest + _ANSI.sub("", str(entry["stream"]))).replace("\r\n", "\n").replace("\r", "\n").split("\n")
            # The name of a step may hold line ends of its own: it is one fragment.
            if step := _STEP.fullmatch(_ANSI.sub("", str(entry["stream"])).strip("\n")):
                rest = ""
                yield Step(int(step[1]), int(step[2]), " ".join(step[3].split()))
                continue
            for line in whole:
                yield from _of_line(line)
        elif "status" in entry and entry.get("id"):
            detail = entry.get("progressDetail") or {}
            yield Layer(str(entry["id"]), str(entry["status"]), int(detail.get("current") or 0), int(detail.get("total") or 0))
        elif "status" in entry:
            yield Line(str(entry["status"]))
        elif "error" in entry or "errorDetail" in entry:
            if rest:
                yield from _of_line(rest)
                rest = ""
            yield Failed(_ANSI.sub("", str(entry.get("error") or entry["errorDetail"].get("message", ""))))
        elif isinstance(entry.get("aux"), Mapping) and "ID" in entry["aux"]:
            yield Made(str(entry["aux"]["ID"]))
    if rest:
        yield from _of_line(rest)


def _of_line(line: str) -> Iterator[Event]:
    if line.strip() == "---> Using cache":
        yield Cached()
    elif line.strip() and not _NOISE.fullmatch(line):
        yield Line(line)
