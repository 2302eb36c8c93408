"""The figures as one page that opens from disk: a matrix of the pairs, and curves, drawn here; nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2

from provision import __version__
from provision.base.terminal import neutral
from provision.bench.comparison import Change

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 64, 40, 16
COLOURS = ("#1f5f8b", "#c1571b", "#3d7a3d", "#7a3d74", "#8a6d1a", "#4a4a4a", "#1b8a8f", "#a8324a")


def render(document: Mapping[str, Any], changes: Sequence[Change]) -> str:
    """The page's HTML."""
    return _template().render(
        version=__version__,
        when=document["when"],
        hosts=document["hosts"],
        matrix=matrix(document),
        sums=_chart([(f"{run['np']} ranks", [(r["bytes"], r["busbw_gbs"]) for r in run["results"]]) for run in document["ranks"]], "GB/s"),
        training=_chart(
            [
                ("with communication", [(run["np"], run["samples_per_second"]) for run in document["training"]]),
                ("without", [(run["np"], run["alone"]) for run in document["training"]]),
            ],
            "samples/s",
        ),
        runs=document["ranks"],
        trainings=document["training"],
        changes=[str(change) for change in changes],
        spelled=spelled,
    )


def spelled(size: float) -> str:
    """1048576 as ``1 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size:g} B"


def matrix(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each host: its cells to all hosts, None for itself and what was not measured; ``share`` is of the fastest pair."""
    known = {}
    for pair in document["pairs"]:
        last, first = pair["results"][-1], pair["results"][0]
        known[frozenset(pair["hosts"])] = {"gbs": last["busbw_gbs"], "us": first["median_us"], "limit": pair["limit_gbs"]}
    fastest = max((cell["gbs"] for cell in known.values()), default=0.0)
    names = [host["name"] for host in document["hosts"]]
    rows = []
    for one in names:
        cells = [known.get(frozenset((one, other))) if one != other else None for other in names]
        rows.append({"name": one, "cells": [cell and {**cell, "share": cell["gbs"] / fastest if fastest else 0.0} for cell in cells]})
    return rows if known else []


def _chart(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], unit: str) -> dict[str, Any] | None:
    """Curves over a logarithmic axis, as what an SVG needs; None without any point."""
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
    """Text without what would change the order of letters on the page; what a macro has drawn is HTML."""
    return neutral(value) if type(value) is str else value
