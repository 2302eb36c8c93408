"""The figures as text. Pure: reads the document that ``--json`` prints."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any, Sequence

from .options import UsageError

SCHEMA = 1
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
    """The document as JSON into a file. Raises :class:`UsageError` when it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
    except OSError as error:
        raise UsageError(f"--report {path}: {error.strerror}") from error


def text(document: dict[str, Any]) -> str:
    """The document as a table for people."""
    tables = {"train": training_table, "negotiation": negotiation_table, "overhead": overhead_table, "results": collective_table}
    lines = next(table for key, table in tables.items() if key in document)(document)
    lines += [f"missing: {name} ({reason})" for name, reason in document["missing"].items()]
    return "\n".join(lines)


def collective_table(document: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("size", "engine", "call", "memory", "time", "bus GB/s", "of limit", "against the faster peer")]
    limit = document["limit_gbs"]
    for result in document["results"]:
        peers = [r for r in document["results"] if r["bytes"] == result["bytes"] and r["engine"] != "collective_core"]
        ours = result["engine"] == "collective_core"
        fastest = min((r["median_us"] for r in peers), default=0.0)
        rows.append(
            (
                spelled(result["bytes"]),
                result["engine"],
                result["call"],
                result["memory"],
                duration(result["median_us"]),
                f"{result['busbw_gbs']:.2f}",
                f"{100 * result['busbw_gbs'] / limit:.0f} %" if limit else "",
                f"{fastest / result['median_us']:.2f} x" if ours and fastest else "",
            )
        )
    hosts = "1 host" if document["hosts"] == 1 else f"{document['hosts']} hosts"
    head = f"allreduce, float32 sum in place, {document['np']} ranks on {hosts}, median of {document['rounds']} rounds"
    if "memory_gbs" in document:
        derived = f"from {document['memory_gbs']:.1f} GB/s of memory bandwidth, measured in the same rounds"
    else:
        derived = f"from {document['network_gbs_each_way']:.2f} GB/s over the network each way at once, measured in the same rounds"
    return [head, f"the machine's own limit: {limit:.2f} GB/s of bus bandwidth, {derived}", "", *columns(rows)]


def microseconds(rounds: Sequence[float]) -> list[float]:
    return [round(seconds * 1e6, 3) for seconds in rounds]


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
