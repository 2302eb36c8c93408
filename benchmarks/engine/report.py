"""The figures as text. Pure: reads the document that ``--json`` prints."""

from __future__ import annotations

import html
import io
import json
import math
import statistics
from typing import Any, Sequence

from .options import UsageError

SCHEMA = 1
#: The side of `limit.c`: ranks that are threads of one process.
LIMIT = "machine's limit"
OURS = "collective_core"
#: What the sides of ``--train`` that sum nothing are called in the table.
NOT_COMMUNICATING = {"barrier": "none, but a barrier", "none": "no communication"}
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """S/t * 2(n-1)/n in GB/s, as nccl-tests define it: comparable with a link's speed whatever the number of ranks."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def spelled(size: int) -> str:
    """1048576 as "1 MiB"."""
    for unit, name in UNITS:
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def duration(microseconds: float) -> str:
    if microseconds >= 1000:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds:.{1 if microseconds >= 10 else 2}f} us"


def show(document: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(document) if as_json else text(document), flush=True)


def write(document: dict[str, Any], path: str) -> None:
    """The document into a file: of collectives as a page or a picture where its name ends in .html or .svg, else as JSON.

    Raises :class:`UsageError` when it cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page(document) if path.endswith(".html") else picture(document) if path.endswith(".svg") else json.dumps(document))
    except OSError as error:
        raise UsageError(f"--report {path}: {error.strerror}") from error


def text(document: dict[str, Any]) -> str:
    """The document as a table for people."""
    tables = {"train": training_table, "negotiation": negotiation_table, "overhead": overhead_table, "results": collective_table}
    lines = next(table for key, table in tables.items() if key in document)(document)
    lines += [f"missing: {name} ({reason})" for name, reason in document["missing"].items()]
    return "\n".join(lines)


def page(document: dict[str, Any]) -> str:
    """The document of collectives as a page: its picture and its table."""
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Benchmark</title>'
    style = "<style>body{font:16px/1.5 system-ui;margin:2rem auto;max-width:75rem;padding:0 1rem}svg{max-width:100%;height:auto}"
    style += "pre{overflow:auto}</style>"
    return f"{head}{style}<h1>Benchmark of the engine</h1>{picture(document)}<pre>{html.escape(text(document))}</pre>\n"


def picture(document: dict[str, Any]) -> str:
    """An SVG: time per call, and the same as a multiple of the machine's limit where that was measured, both over the size; medians with
    their quartiles."""
    import matplotlib
    from matplotlib.figure import Figure

    sides: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row in document["results"]:
        rounds = row["rounds_us"]
        quartiles = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else rounds * 3
        sides.setdefault((row["engine"], row["call"], row["memory"]), {})[row["bytes"]] = quartiles
    limit = next((points for (engine, _, _), points in sides.items() if engine == LIMIT), None)
    scales: list[dict[int, float]] = [dict.fromkeys({row["bytes"] for row in document["results"]}, 1.0)]
    scales += [{size: middle for size, (_, middle, _) in limit.items()}] if limit else []
    labels = ("time, µs", "multiple of the machine's limit")
    with matplotlib.rc_context({"svg.hashsalt": "", "font.size": 9}):
        figure = Figure(figsize=(6.4 * len(scales), 4.8), layout="constrained")
        for axes, scale, label in zip(figure.subplots(1, len(scales), squeeze=False)[0], scales, labels):
            for (engine, call, memory), points in sides.items():
                sizes = sorted(points)
                low, middle, high = zip(*(tuple(value / scale[size] for value in points[size]) for size in sizes))
                name = f"{engine}, {call}, {memory} memory" if engine == OURS else engine
                width, style = 2.2 if engine == OURS else 1, "--" if engine == LIMIT else "-"
                (line,) = axes.plot(sizes, middle, label=name, marker=".", linewidth=width, linestyle=style)
                axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15)
            axes.set(xscale="log", yscale="log", xlabel="size per rank", ylabel=label)
            axes.set_xticks(sizes, [spelled(size) for size in sizes], rotation=45)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def collective_table(document: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("size", "engine", "call", "memory", "time", "quartiles", "bus GB/s", "of limit", "against the faster peer")
    ]
    limit = document["limit_gbs"]
    for result in document["results"]:
        same = [r for r in document["results"] if r["bytes"] == result["bytes"]]
        ours = result["engine"] == OURS
        fastest = min((r["median_us"] for r in same if r["engine"] not in (OURS, LIMIT)), default=0.0)
        bus_limit = next((r["busbw_gbs"] for r in same if r["engine"] == LIMIT), limit)
        rows.append(
            (
                spelled(result["bytes"]),
                result["engine"],
                result["call"],
                result["memory"],
                duration(result["median_us"]),
                _quartiles(result["rounds_us"]),
                f"{result['busbw_gbs']:.2f}",
                f"{100 * result['busbw_gbs'] / bus_limit:.0f} %" if bus_limit else "",
                f"{fastest / result['median_us']:.2f} x" if ours and fastest else "",
            )
        )
    hosts = "1 host" if document["hosts"] == 1 else f"{document['hosts']} hosts"
    head = f"allreduce, float32 sum in place, {document['np']} ranks on {hosts}, median of {document['rounds']} rounds"
    if "round_trip_ns" in document:
        shared = f"{document['round_trip_ns']:.0f} ns of a cache line's round trip, {document['copy_gbs']:.1f} GB/s of copies"
        return [head, f"the machine's own limit: limit.c, with {shared} and {document['sum_gbs']:.1f} of sums", "", *columns(rows)]
    if "memory_gbs" in document:
        derived = f"from {document['memory_gbs']:.1f} GB/s of memory bandwidth, measured in the same rounds"
    else:
        derived = f"from {document['network_gbs_each_way']:.2f} GB/s over the network each way at once, measured in the same rounds"
    return [head, f"the machine's own limit: {limit:.2f} GB/s of bus bandwidth, {derived}", "", *columns(rows)]


def _quartiles(rounds: Sequence[float]) -> str:
    if len(rounds) < 2:
        return ""
    first, _, third = statistics.quantiles(rounds, n=4, method="inclusive")
    return f"{duration(first)} to {duration(third)}"


def microseconds(rounds: Sequence[float]) -> list[float]:
    return [round(seconds * 1e6, 3) for seconds in rounds]


def collective_row(engine: str, memory: str, call: str, size: int, ranks: int, rounds: Sequence[float]) -> dict[str, Any]:
    """One side of the collectives, whose calls for ``size`` bytes take so many seconds in each round."""
    seconds = statistics.median(rounds)
    return {
        "engine": engine,
        "op": "allreduce",
        "memory": memory,
        "call": call,
        "bytes": size,
        "np": ranks,
        "median_us": round(seconds * 1e6, 3),
        "busbw_gbs": round(bus_bandwidth(size, seconds, ranks), 4),
        "rounds_us": microseconds(rounds),
    }


def training_row(name: str, ranks: int, batch: int, rounds: Sequence[float]) -> dict[str, Any]:
    """One side of ``--train``, whose steps of ``batch`` samples per rank take so long in each round."""
    seconds = statistics.median(rounds)
    return {
        "engine": name,
        "np": ranks,
        "median_us": round(seconds * 1e6, 1),
        "steps_per_second": round(1 / seconds, 2),
        "samples_per_second": round(batch * ranks / seconds, 1),
        "rounds_us": microseconds(rounds),
    }


def training_table(document: dict[str, Any]) -> list[str]:
    alone = next(r["samples_per_second"] for r in document["results"] if r["engine"] == "none")
    rows: list[tuple[str, ...]] = [("engine", "step", "samples/s", "of not communicating")]
    for result in document["results"]:
        share = f"{result['samples_per_second'] / alone:.3f}"
        name = NOT_COMMUNICATING.get(result["engine"], result["engine"])
        rows.append((name, duration(result["median_us"]), f"{result['samples_per_second']:.0f}", share))
    head = f"training steps of {document['train']}: {document['parameters']} parameters"
    return [
        f"{head}, {document['np']} ranks, batch {document['batch']} per rank, median of {document['rounds']} rounds",
        "",
        *columns(rows),
    ]


def negotiation_table(document: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("ranks", "log2", "steps", "messages per rank", "bytes per rank", "processor time per rank", "time, all on this machine", "start")
    ]
    for world in document["negotiation"]:
        rows.append(
            (
                str(world["np"]),
                str(math.ceil(math.log2(world["np"]))),
                f"{world['steps']:g}",
                f"{world['messages']:g}",
                f"{world['bytes']:g}",
                duration(world["cpu_us"]),
                duration(world["wall_us"]),
                f"{world['start_s']:.2f} s",
            )
        )
    head = f"agreeing on an operation, every rank on a host of its own (TCP over loopback, {document['cores']} cores for all)"
    return [f"{head}, median of {document['rounds']} rounds of measurement", "", *columns(rows)]


def overhead_table(document: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("side", "step", "beside the plain one", "fastest round")]
    for row in document["overhead"]:
        rows.append((row["side"], duration(row["step_us"]), f"{100 * row['cost']:+.2f} %", duration(row["least_us"])))
    ours, gradients = document["engine_bytes"] / (1 << 20), document["gradient_bytes"] / (1 << 20)
    return [
        f"training steps of mnist on {document['np']} ranks, median of {document['rounds']} rounds",
        "",
        *columns(rows),
        "",
        f"init: {document['init_s']:.3f} s (slowest rank, median)",
        f"memory: {ours:.1f} MiB with {gradients:.1f} MiB of gradients in it, all ranks of the host together",
    ]


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows under each other; a rule below the first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
