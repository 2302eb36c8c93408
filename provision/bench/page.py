"""The measurements as one page that opens from disk: a matrix of the pairs, and charts drawn as SVG; nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jinja2

from provision import __version__
from provision.base.terminal import neutral
from provision.bench.results import Change, Measurements

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 64, 40, 16
COLOURS = ("#1f5f8b", "#c1571b", "#3d7a3d", "#7a3d74", "#8a6d1a", "#4a4a4a", "#1b8a8f", "#a8324a")


def render(measurements: Measurements, changes: Sequence[Change]) -> str:
    """The page's HTML."""
    return _template().render(
        version=__version__,
        when=measurements.when,
        hosts=measurements.hosts,
        matrix=_matrix(measurements),
        allreduce=_chart(
            [(f"{run.np} ranks", [(result.bytes, result.busbw_gbs) for result in run.results]) for run in measurements.ranks], "GB/s"
        ),
        training=_chart(
            [
                ("with communication", [(run.np, run.samples_per_second) for run in measurements.training]),
                ("without", [(run.np, run.alone) for run in measurements.training]),
            ],
            "samples/s",
        ),
        runs=measurements.ranks,
        trainings=measurements.training,
        changes=[str(change) for change in changes],
        size=size,
    )


def size(count: float) -> str:
    """A number of bytes in words: ``1 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"


class _Cell(NamedTuple):
    """A pair of hosts. ``share``: of the fastest pair."""

    gbs: float
    us: float
    limit: float
    share: float


def _matrix(measurements: Measurements) -> list[tuple[str, list[_Cell | None]]]:
    """A row for each host: its name, and its cells to all hosts, None for itself and what was not measured."""
    fastest = max((pair.results[-1].busbw_gbs for pair in measurements.pairs), default=0.0) or 1.0
    cells = {}
    for pair in measurements.pairs:
        smallest, largest = pair.results[0], pair.results[-1]
        cells[frozenset(pair.hosts)] = _Cell(largest.busbw_gbs, smallest.median_us, pair.limit_gbs, largest.busbw_gbs / fastest)
    names = [host.name for host in measurements.hosts]
    return [(one, [cells.get(frozenset((one, other))) for other in names]) for one in names] if cells else []


def _chart(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], unit: str) -> dict[str, Any] | None:
    """Coordinates of curves over a logarithmic axis; None without any point."""
    points = [point for _, line in series for point in line]
    if not points:
        return None
    least, most = math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points))
    top = max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - least) / ((most - least) or 1.0)
        return round(LEFT + across * (WIDTH - LEFT - 16), 1), round(HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP), 1)

    lines = []
    for number, (name, line) in enumerate(series):
        placed = [place(x, y) for x, y in line]
        text = " ".join(f"{x},{y}" for x, y in placed)
        lines.append({"name": name, "colour": COLOURS[number % len(COLOURS)], "points": placed, "text": text})
    marks = [{"y": place(points[0][0], top * share)[1], "text": f"{top * share:.3g}"} for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    along = [{"x": place(x, 0.0)[0], "value": x} for x in sorted({x for x, _ in points})]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "floor": HEIGHT - BOTTOM,
        "unit": unit,
        "lines": lines,
        "up": marks,
        "along": along,
    }


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("provision.bench", ".")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_shown
    )
    return environment.get_template("page.html.j2")


def _shown(value: Any) -> Any:
    """Text without characters that reorder a page; what a macro has drawn is HTML."""
    return neutral(value) if type(value) is str else value
