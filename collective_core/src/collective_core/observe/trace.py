"""Draws a timeline: rows for Chrome or Perfetto (chrome://tracing, ui.perfetto.dev) and a table, from what the ranks have recorded.

A timeline that comes to a good end is drawn by itself, another one by ``python -m collective_core.trace TIMELINE``.
"""

from __future__ import annotations

import json
from typing import Any, Iterator, Sequence

from collective_core.observe import recorder
from collective_core.observe.timeline_file import Part


def rows(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """The rows of the trace in Chrome's JSON format: a process per rank, times in microseconds from the beginning. Pure.

    An operation is ``wait`` until all ranks are there, then has its own name while data moves.
    """
    zero = min(part.at(part.head.begin) for part in parts)
    for part in parts:
        rank = part.head.rank
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} ({part.head.host_name})"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for event in part.events:
            agreed = event.agreed or event.ended
            yield _row("wait", part, event, event.started, agreed, zero)
            if event.ended > agreed:
                yield _row(f"{event.kind} {event.name}", part, event, agreed, event.ended, zero)


def _row(name: str, part: Part, event: recorder.Event, begin: int, end: int, zero: float) -> dict[str, Any]:
    start = part.at(begin) - zero
    facts = {"tensor": event.name, "bytes": event.bytes, "type": event.dtype, "number": event.number, "result": event.state}
    where = {"pid": part.head.rank, "tid": event.process_set}
    return {"ph": "X", **where, "name": name, "cat": event.kind, "ts": start, "dur": part.at(end) - zero - start, "args": facts}


def table(parts: Sequence[Part]) -> str:
    """Where the time of every rank went, in seconds. Pure.

    exposed: the program waited for collectives; compute: the rest. communication: data moved; hidden: of that, while the
    program computed. for others: from a rank's own arrival to that of the last rank. The slowest rank waits least for others.
    """
    lines: list[tuple[str, ...]] = [("rank", "host", "total", "compute", "communication", "hidden", "exposed", "for others")]
    patience = []
    for part in parts:
        head, moved, waited = part.head, 0, 0
        for event in part.events:
            moved += event.ended - event.agreed if event.agreed else 0
            waited += (event.agreed or event.ended) - event.started
        total, moving, for_others = (head.end - head.begin) / 1e9, moved / 1e9, waited / 1e9
        exposed = min(head.waited / 1e9, total)
        hidden = max(0.0, min(moving, moving + for_others - exposed))
        numbers = (total, total - exposed, moving, hidden, exposed, for_others)
        lines.append((str(head.rank), head.host_name, *(f"{number:.3f}" for number in numbers)))
        patience.append(for_others)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    texts = ["  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in lines]
    slowest = parts[patience.index(min(patience))].head
    if len(parts) > 1:
        texts.append(f"slowest rank: {slowest.rank} (host {slowest.host_name}); the others waited up to {max(patience):.3f} s")
    lost = sum(part.head.lost for part in parts)
    if lost:
        texts.append(f"{lost} operations are not in the timeline: there were more than could be collected")
    return "\n".join(texts)


def write(path: str, parts: Sequence[Part]) -> None:
    """Writes the trace, row by row: it may be larger than memory. Raises OSError."""
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, row in enumerate(rows(parts)):
            file.write(("," if number else "") + "\n" + json.dumps(row))
        file.write("\n]}\n")
