"""The geometry of a report's pictures: steps of hosts over time, hosts and their links. Pure; the page draws it.

A picture of many hosts stays readable because hosts that are alike are one entry.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from provision.base.text import duration, joined
from provision.bench import results
from provision.remote.timeline import State, StepTime
from provision.survey import Facts, hardware

FOLD_FROM = 13  # hosts from which on those that are alike are one entry
MAX_ROWS = 40  # of the picture of steps; the rest is counted
MAX_BOXES = 8  # of the topology
GANTT_WIDTH, ROW_HEIGHT = 760, 22
_LETTER = 6.2  # width of a letter in bars, at their font size
_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)
_WORST: tuple[State, ...] = ("ok", "changed", "failed", "unreachable")
_ONLY_RUN = ("survey", "guard", "pytorch", "job")  # steps that install nothing: that they changed nothing says nothing about the host

_Item = TypeVar("_Item")


def grouped(items: Iterable[_Item], alike: Callable[[_Item], Hashable], count: int, fold_from: int = FOLD_FROM) -> list[list[_Item]]:
    """The items in groups of those that are alike, in the order of each group's first; each alone where ``count`` hosts need no folding."""
    if count < fold_from:
        return [[item] for item in items]
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(alike(item), []).append(item)
    return list(groups.values())


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
    groups = grouped(of_host.items(), lambda item: tuple((step.stage, step.step, step.state) for step in item[1]), len(of_host))
    rows = [_row(group, scale) for group in groups]
    if len(rows) > MAX_ROWS:
        rows.sort(key=lambda row: (-_WORST.index(row.state), -row.seconds))
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
    state = max((step.state for step in steps), key=_WORST.index)
    bad = [f"{step.step} {step.state}" for step in steps if step.state in ("failed", "unreachable")]
    longest = max(steps, key=lambda step: step.seconds)
    text = f"{len(steps)} steps in {duration(seconds)}, the longest {longest.step} with {duration(longest.seconds)}"
    return Row([name for name, _ in group], slowest, bars, seconds, state, "; ".join([text, *bad]))


def _shown(step: str, state: State) -> str:
    """``ran`` for what went well and changes nothing by its nature, else the state."""
    return "ran" if state == "ok" and step in _ONLY_RUN else state


def _by_step(steps: Sequence[StepTime]) -> Iterator[Step]:
    """Steps in the order of their first begin; a step that ran twice on a host counts with both times."""
    groups: dict[tuple[str, str], list[StepTime]] = {}
    for step in sorted(steps, key=lambda step: step.began):
        groups.setdefault((step.stage, step.step), []).append(step)
    for (stage, name), group in groups.items():
        times: Counter[str] = Counter()
        for step in group:
            times[step.host] += step.seconds  # type: ignore[assignment]  # a counter of seconds
        slowest = max(times, key=lambda host: times[host])
        title = name if name == stage else f"{stage}: {name}"
        changed = len({step.host for step in group if step.state == "changed"})
        worst = max((step.state for step in group), key=_WORST.index)
        yield Step(title, len(times), changed, times[slowest], slowest, _shown(name, worst))


class Box(NamedTuple):
    """One host, or several that are alike, in the topology. ``gpus``: positions of GPUs; ``nvlink``: what joins them, empty if unknown."""

    x: float
    y: float
    width: float
    title: str
    lines: Sequence[str]
    gpus: Sequence[float]
    nvlink: str
    hosts: Sequence[str]


class Link(NamedTuple):
    """A link between two boxes. ``kind``: fast, fair or slow against the fastest one, or plain where nothing was measured."""

    x1: float
    y1: float
    x2: float
    y2: float
    kind: str
    label: str
    between: tuple[str, str]
    gbs: float


class Topology(NamedTuple):
    """Hosts and links. ``left_out``: hosts that are not drawn; ``hub``: the network in the middle, where links were not measured."""

    width: int
    height: int
    boxes: Sequence[Box]
    links: Sequence[Link]
    left_out: int
    hub: Box | None
    text: str


BOX_HEIGHT = 74
_WIDTH, _MARGIN = 860, 10.0  # of the picture at least; between boxes, and around them
_LABEL = 90.0  # width of a link's label


def topology(facts: Mapping[str, Facts], networks: Mapping[str, str], measured: Mapping[frozenset[str], float]) -> Topology | None:
    """The picture of these hosts; None without any.

    Args:
        networks: host → the network that it uses.
        measured: two hosts → gigabytes per second between them.
    """
    names = list(networks)
    if not names:
        return None
    groups = grouped(names, lambda name: (*_hardware(facts.get(name)), networks[name]), len(names), MAX_BOXES + 1)
    if len(groups) > MAX_BOXES:
        groups.sort(key=len, reverse=True)
    drawn, left_out = groups[:MAX_BOXES], sum(map(len, groups[MAX_BOXES:]))
    height = 90 if len(names) == 1 else 130 if len(drawn) <= 2 else 440
    middle = height / 2
    boxes = [_box(group, facts.get(group[0]), networks[group[0]], _slowest(group, group, measured)) for group in drawn]
    title = joined(list(dict.fromkeys(filter(None, networks.values()))) or ["network"])
    hub = Box(0.0, middle if len(drawn) != 1 else height - 18.0, 24 + 8.0 * len(title), title, (), (), "", ())
    has_hub = len(names) > 1 and not any(_links(boxes, measured))
    boxes = _around(boxes, 45.0 if len(drawn) == 1 else middle, hub.width if has_hub else _LABEL)
    width = max(_WIDTH, 2 * math.ceil(max(abs(box.x) + box.width / 2 for box in [*boxes, *([hub] if has_hub else [])]) + _MARGIN))
    boxes = [box._replace(x=round(width / 2 + box.x, 1)) for box in boxes]
    hub = hub._replace(x=width / 2)
    height = math.ceil(max(box.y for box in boxes) + BOX_HEIGHT / 2 + 6) if len(drawn) > 2 else height
    links = list(_links(boxes, measured))
    if has_hub:
        links = [Link(box.x, box.y, hub.x, hub.y, "plain", "", (box.title, title), 0.0) for box in boxes]
    text = f"{len(names)} hosts" if len(names) > 1 else "one host"
    if measured_links := [link for link in links if link.gbs]:
        slow = min(measured_links, key=lambda link: link.gbs)
        fastest = results.number(max(measured.values()))
        text += f"; the slowest link {slow.label} between {' and '.join(slow.between)}, the fastest {fastest} GB/s"
    elif has_hub:
        text += f" in {title}"
    return Topology(width, height, boxes, links, left_out, hub if has_hub else None, text)


def _around(boxes: Sequence[Box], middle: float, inside: float) -> list[Box]:
    """The boxes on an ellipse that is so wide that none covers another one, or what is in the middle, ``inside`` wide; ``x`` from there."""
    count = len(boxes)
    angles = [2 * math.pi * number / count - (math.pi if count == 2 else math.pi / 2) for number in range(count)]
    down = middle - BOX_HEIGHT / 2 - 6 if count > 2 else 0.0
    wide = _WIDTH / 2 - _MARGIN - max(box.width for box in boxes) / 2 if count > 1 else 0.0
    for number, (box, angle) in enumerate(zip(boxes, angles, strict=True)):
        others = [(math.cos(other), math.sin(other), each.width) for each, other in zip(boxes[:number], angles, strict=False)]
        for cos, sin, width in [*others, (0.0, 0.0, inside)] if count > 1 else ():
            apart = abs(math.cos(angle) - cos)
            if apart > 1e-6 and abs(math.sin(angle) - sin) * down < BOX_HEIGHT + _MARGIN:
                wide = max(wide, ((box.width + width) / 2 + _MARGIN) / apart)
    return [
        box._replace(x=wide * math.cos(angle), y=round(middle + down * math.sin(angle), 1))
        for box, angle in zip(boxes, angles, strict=True)
    ]


def _hardware(facts: Facts | None) -> tuple[str, str]:
    """(GPUs, what joins them), in words."""
    if facts is None or not facts.gpus:
        return ("", "")
    kinds = Counter((gpu.name or "GPU").removeprefix("NVIDIA ") for gpu in facts.gpus)
    domain = hardware.nvlink_domain(facts)
    joins = f"NVLink domain {domain[-8:]}" if domain else "NVSwitch" if facts.nvidia.pci_switches else ""
    return " + ".join(f"{count} × {name}" for name, count in kinds.items()), joins


def _box(group: Sequence[str], facts: Facts | None, network: str, inside: float | None) -> Box:
    """A box that has no place yet."""
    title = group[0] if len(group) == 1 else f"{group[0]} and {len(group) - 1} more"
    gpus, joins = _hardware(facts)
    lines = [gpus or "no GPU", f"slowest inside {results.number(inside)} GB/s" if inside else network]
    width = max(150.0, 20 + 8 * max(len(title), 0.85 * max(map(len, lines))))
    count = min(len(facts.gpus), 16) if facts else 0
    return Box(0.0, 0.0, round(width, 1), title, lines, [12.0 * at for at in range(count)], joins, list(group))


def _slowest(some: Sequence[str], others: Sequence[str], measured: Mapping[frozenset[str], float]) -> float | None:
    found = [measured[pair] for one in some for other in others if (pair := frozenset((one, other))) in measured]
    return min(found, default=None)


def _links(boxes: Sequence[Box], measured: Mapping[frozenset[str], float]) -> Iterator[Link]:
    fastest = max(measured.values(), default=0.0) or 1.0
    for number, one in enumerate(boxes):
        for other in boxes[number + 1 :]:
            gbs = _slowest(one.hosts, other.hosts, measured)
            if gbs is not None:
                kind = "slow" if gbs < fastest / 2 else "fair" if gbs < fastest * 0.8 else "fast"
                yield Link(one.x, one.y, other.x, other.y, kind, f"{results.number(gbs)} GB/s", (one.title, other.title), gbs)
