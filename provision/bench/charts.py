"""Coordinates of the page's drawings: curves with their quartiles, and heat maps of host pairs. Pure; the template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from provision.bench.results import Figure, Pair, Ranks, number

COLOURS = 8  # of curves, in the page's style; then dashed again
_LINE = 15  # pixels between two lines of text
_LETTER = 6.6  # pixels, the width of a letter of an average name
_BOLD = 8.0  # the same of a curve's name
_DATE = 40.0  # half of a date's width
_CELL = 54, 32  # pixels of a heat map's cell: four digits fit
# Of the best pair's figure → class of the cell, from the best to the worst.
SHARES = (0.9, 0.75, 0.5, 0.25, 0.0)
_SMALLEST = 1e-9  # of figures that an axis shows as another one than 0
SLOW = 0.5  # of the fastest pair; slower ones are named


class Series(NamedTuple):
    """A curve: its name, and its figures by their place along the axis."""

    name: str
    points: Sequence[tuple[float, Figure]]


class Axes(NamedTuple):
    """The axes of a chart.

    Attributes:
        along, up: their titles.
        marks: ticks along the axis.
        doubling: whether the axis along is logarithmic: each doubling is as wide as another.
        top: where the axis up ends at least.
        target: a value to reach; 0 without one.
    """

    along: str
    up: str
    marks: Mapping[float, str]
    doubling: bool = True
    top: float = 0.0
    target: float = 0.0


class _Point(NamedTuple):
    x: float
    y: float
    low: float
    high: float
    text: str


class _Curve(NamedTuple):
    name: str
    colour: int
    dashed: bool
    points: list[_Point]
    label_y: float

    @property
    def path(self) -> str:
        return " ".join(f"{point.x},{point.y}" for point in self.points)


class _Tick(NamedTuple):
    at: float
    text: str


class Chart(NamedTuple):
    """Curves in a frame, in pixels.

    Attributes:
        up, along: ticks of the two axes, whose titles name quantity and unit.
        target: a value to reach, as a line across; None without one.
        named: whether the curves' names stand at their ends.
    """

    title: str
    width: int
    height: int
    left: float
    right: float
    top: float
    floor: float
    x_title: str
    y_title: str
    up: list[_Tick]
    along: list[_Tick]
    curves: list[_Curve]
    target: _Tick | None
    named: bool


def chart(title: str, series: Sequence[Series], axes: Axes, *, size: tuple[int, int] = (680, 320), named: bool = True) -> Chart | None:
    """A chart, with the curves' names at their ends where they are ``named``; None without any point."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return None
    width, height = size
    left, ceiling, floor = 62.0, 28.0, height - 48.0
    right = width - (16 + _BOLD * max(len(each.name) for each in drawn) if named else _DATE)
    scale: Callable[[float], float] = math.log2 if axes.doubling else float
    begin, end = (scale(pick(x for each in drawn for x, _ in each.points)) for pick in (min, max))
    ticks = nice_ticks(max(axes.top, *(figure.high or figure.median for each in drawn for _, figure in each.points)))

    def across(x: float) -> float:
        return round(left + (scale(x) - begin) / ((end - begin) or 1.0) * (right - left), 1)

    def upward(y: float) -> float:
        return round(floor - min(max(y / ticks[-1], 0.0), 1.0) * (floor - ceiling), 1)

    curves = []
    for index, each in enumerate(drawn):
        points = [
            _Point(
                across(x),
                upward(figure.median),
                upward(figure.low if figure.low is not None else figure.median),
                upward(figure.high if figure.high is not None else figure.median),
                spelled(figure),
            )
            for x, figure in each.points
        ]
        curves.append(_Curve(each.name, index % COLOURS, index >= COLOURS, points, points[-1].y))
    return Chart(
        title=title,
        width=width,
        height=height,
        left=left,
        right=right,
        top=ceiling,
        floor=floor,
        x_title=axes.along,
        y_title=axes.up,
        up=[_Tick(upward(tick), f"{tick:,g}") for tick in ticks],
        along=[_Tick(across(x), text) for x, text in axes.marks.items()],
        curves=_apart(curves, ceiling),
        target=_Tick(upward(axes.target), f"{axes.target:,g}") if axes.target else None,
        named=named,
    )


def nice_ticks(most: float) -> list[float]:
    """Four to six round numbers from 0 to ``most`` or the next round number; to 1 where that is nothing."""
    rough = (most if most > _SMALLEST else 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [float(f"{step * count:.6g}") for count in range(math.ceil(rough * 5 / step * 0.999) + 1)]


def spelled(figure: Figure) -> str:
    """``48.2 (46.9–51)``: a median and its quartiles."""
    quartiles = "" if figure.low is None or figure.high is None else f" ({number(figure.low)}–{number(figure.high)})"
    return number(figure.median) + quartiles


def percent(share: Figure | None) -> str:
    """``97 % (93–101)``: a share and its quartiles; ``-`` where it is unknown."""
    if share is None:
        return "-"
    quartiles = "" if share.low is None or share.high is None else f" ({100 * share.low:.0f}–{100 * share.high:.0f})"
    return f"{100 * share.median:.0f} %{quartiles}"


def share_of_limit(run: Pair | Ranks) -> str:
    """``80 %``, or ``reached``; ``-`` where the limit is unknown."""
    share = run.of_limit
    return "reached" if share == 1 else percent(None if share is None else Figure(share))


def _apart(curves: Sequence[_Curve], top: float) -> list[_Curve]:
    """The curves with their names moved so far that none covers another: from the lowest up, and with no room from the top down."""
    placed: dict[str, float] = {}
    free = math.inf
    for curve in sorted(curves, key=lambda curve: curve.label_y, reverse=True):
        free = min(curve.label_y, free - _LINE)
        placed[curve.name] = free
    free = top
    for name, at in sorted(placed.items(), key=lambda each: each[1]):
        placed[name] = max(at, free)
        free = placed[name] + _LINE
    return [curve._replace(label_y=placed[curve.name]) for curve in curves]


class _Cell(NamedTuple):
    x: float
    y: float
    shade: int
    text: str
    title: str


class HeatMap(NamedTuple):
    """A figure of all pairs of hosts. ``rows``, ``columns``: the hosts' names and where they stand; ``best``: the best pair's figure."""

    title: str
    unit: str
    width: float
    height: float
    left: float
    top: float
    cell: tuple[int, int]
    rows: list[_Tick]
    columns: list[_Tick]
    cells: list[_Cell]
    best: str


def heat_map(
    title: str, unit: str, hosts: Sequence[str], pairs: Mapping[frozenset[str], Figure], *, less_is_better: bool
) -> HeatMap | None:
    """The heat map; None without any pair. A cell is the darker the worse its figure is next to the best pair's."""
    if not pairs:
        return None
    across, down = _CELL
    longest = _LETTER * max(map(len, hosts))
    left, top = 14 + longest, 18 + 0.72 * longest
    medians = [figure.median for figure in pairs.values()]
    best = min(medians) if less_is_better else max(medians)
    cells = []
    for row, one in enumerate(hosts):
        for column, other in enumerate(hosts):
            figure = pairs.get(frozenset((one, other))) if one != other else None
            if figure is not None:
                share = (best / figure.median if less_is_better else figure.median / (best or 1.0)) if figure.median else 0.0
                shade = next(index for index, least in enumerate(SHARES) if share >= least)
                said = f"{one} – {other}: {spelled(figure)} {unit}"
                cells.append(_Cell(left + column * across, top + row * down, shade, number(figure.median), said))
    return HeatMap(
        title=title,
        unit=unit,
        width=left + across * len(hosts) + 0.72 * longest,
        height=top + down * len(hosts) + 4,
        left=left,
        top=top,
        cell=_CELL,
        rows=[_Tick(top + down * (index + 0.5), name) for index, name in enumerate(hosts)],
        columns=[_Tick(left + across * (index + 0.5), name) for index, name in enumerate(hosts)],
        cells=cells,
        best=f"{number(best)} {unit}",
    )
