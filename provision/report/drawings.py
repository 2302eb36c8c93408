"""The geometry of a report's picture of steps over time. Pure; the page draws it.

A picture of many hosts stays readable because hosts that are alike are one entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from provision.base.text import duration, grouped
from provision.remote.timeline import RANK, State, StepTime

FOLD_FROM = 13  # hosts from which on those that are alike are one entry
MAX_ROWS = 40  # of the picture of steps; the rest is counted
GANTT_WIDTH, ROW_HEIGHT = 760, 22
_LETTER = 6.2  # width of a letter in bars, at their font size
_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)
_ONLY_RUN = ("survey", "guard", "pytorch", "job")  # steps that install nothing: that they changed nothing says nothing about the host

_Item = TypeVar("_Item")


def folded(items: Iterable[_Item], alike: Callable[[_Item], Hashable], count: int) -> list[list[_Item]]:
    """The items in groups of those that are alike, in the order of each group's first; each alone where ``count`` hosts need no folding."""
    if count < FOLD_FROM:
        return [[item] for item in items]
    return list(grouped((alike(item), item) for item in items).values())


class Bar(NamedTuple):
    """A step of a host. ``state``: as of a step, or ``ran``; ``label``: empty where it does not fit."""

    x: float
    width: float
    state: str
    label: str
    title: str


class Row(NamedTuple):
    """One host, or several that are alike; of these the bars are those of the slowest."""

    hosts: Sequence[str]
    slowest: str
    bars: Sequence[Bar]
    seconds: float
    state: State
    text: str


class Tick(NamedTuple):
    """A mark on an axis."""

    at: float
    text: str


class Step(NamedTuple):
    """A step over all hosts: on how many it ran, how long on the slowest, and its worst state."""

    name: str
    hosts: int
    changed: int
    seconds: float
    slowest: str
    state: str


class Gantt(NamedTuple):
    """Steps of hosts over time. ``left_out``: hosts in rows that are not shown."""

    rows: Sequence[Row]
    ticks: Sequence[Tick]
    left_out: int
    steps: Sequence[Step]


def gantt(steps: Sequence[StepTime], hosts: Sequence[str] = ()) -> Gantt | None:
    """The picture of a timeline, with these hosts first, in their order; failed ones and then the slowest first if there are many.

    None of an empty timeline.
    """
    there = {step.host for step in steps}
    of_host: dict[str, list[StepTime]] = {host: [] for host in hosts if host in there}
    for step in steps:
        of_host.setdefault(step.host, []).append(step)
    if not of_host:
        return None
    total = max(max(step.began + step.seconds for step in steps), 0.1)
    scale = GANTT_WIDTH / total
    groups = folded(of_host.items(), lambda item: tuple((step.stage, step.step, step.state) for step in item[1]), len(of_host))
    rows = [_row(group, scale) for group in groups]
    if len(rows) > MAX_ROWS:
        rows.sort(key=lambda row: (-RANK.index(row.state), -row.seconds))
    every = next((tick for tick in _TICKS if total / tick <= 8), _TICKS[-1])
    return Gantt(
        rows[:MAX_ROWS],
        [Tick(round(at * scale, 1), duration(at) if at else "0") for at in range(0, int(min(total, every * 60)) + 1, every)],
        sum(len(row.hosts) for row in rows[MAX_ROWS:]),
        list(_by_step(steps)),
    )


def _row(group: Sequence[tuple[str, list[StepTime]]], scale: float) -> Row:
    slowest, steps = max(group, key=lambda item: sum(step.seconds for step in item[1]))
    bars = []
    for step in steps:
        width = max(step.seconds * scale, 1.5)
        label = step.step if len(step.step) * _LETTER + 6 <= width else ""
        state = _shown(step.step, step.state)
        title = f"{step.step} ({step.stage}): {state}, {duration(step.seconds)}, from {duration(step.began)} on"
        bars.append(Bar(round(step.began * scale, 1), round(width, 1), state, label, title))
    seconds = sum(step.seconds for step in steps)
    state = max((step.state for step in steps), key=RANK.index)
    bad = [f"{step.step} {step.state}" for step in steps if step.state in ("failed", "unreachable")]
    longest = max(steps, key=lambda step: step.seconds)
    text = f"{len(steps)} steps in {duration(seconds)}, the longest {longest.step} with {duration(longest.seconds)}"
    return Row([name for name, _ in group], slowest, bars, seconds, state, "; ".join([text, *bad]))


def _shown(step: str, state: State) -> str:
    """``ran`` for what went well and changes nothing by its nature, else the state."""
    return "ran" if state == "ok" and step in _ONLY_RUN else state


def _by_step(steps: Sequence[StepTime]) -> Iterator[Step]:
    """Steps in the order of their first begin; a step that ran twice on a host counts with both times."""
    groups = grouped(((step.stage, step.step), step) for step in sorted(steps, key=lambda step: step.began))
    for (stage, name), group in groups.items():
        times: Counter[str] = Counter()
        for step in group:
            times[step.host] += step.seconds  # type: ignore[assignment]  # a counter of seconds
        slowest = max(times, key=lambda host: times[host])
        title = name if name == stage else f"{stage}: {name}"
        changed = len({step.host for step in group if step.state == "changed"})
        worst = max((step.state for step in group), key=RANK.index)
        yield Step(title, len(times), changed, times[slowest], slowest, _shown(name, worst))
