"""What every rank did when: a file for Chrome or Perfetto (chrome://tracing, ui.perfetto.dev), and a table.

The engine records every operation anyway (csrc/recorder.h); a thread collects the records twice a second. When the timeline
ends, rank 0 gathers those of all ranks and corrects their clocks. One row per rank: ``wait`` until all ranks are there, then
the collective's own name while data moves.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, NamedTuple, Sequence

import numpy as np

from collective_core import _native, arrays, context, recorder
from collective_core.errors import CollectiveError, is_fatal

#: Seconds between two looks at the engine's ring of records, which holds 8192.
COLLECT_INTERVAL = 0.5
#: Exchanges that the clocks are compared with: the best one counts.
CLOCK_ROUNDS = 16
#: The operation in which the ranks meet before they shut down: ranks that still do other things read it in their error.
THE_END = "shutdown"


class Clock(NamedTuple):
    """How far this rank's clock is ahead of rank 0's, in nanoseconds, at a moment of its own."""

    at: int
    offset: float


class Part(NamedTuple):
    """One rank's timeline."""

    host_name: str
    clocks: tuple[Clock, Clock]
    begin: int  # nanoseconds of this rank's clock
    end: int
    waited: int  # nanoseconds in which the program waited for collectives
    lost: int  # events that were overwritten before they were collected
    events: list[recorder.Event]

    def corrected(self, moment: int) -> float:
        """A moment of this rank's clock in microseconds of rank 0's. The drift between both comparisons is taken as even."""
        first, last = self.clocks
        share = (moment - first.at) / (last.at - first.at) if last.at > first.at else 0.0
        return (moment - (first.offset + share * (last.offset - first.offset))) / 1e3


def offset_of(enters: Sequence[Sequence[int]], leaves: Sequence[Sequence[int]], rank: int) -> float:
    """How far ``rank``'s clock is ahead of rank 0's, from when both entered and left the same exchanges.

    Nobody leaves an exchange before everybody has entered it, which bounds the offset from both sides. Pure.
    """
    least = max(theirs - mine for theirs, mine in zip(enters[rank], leaves[0]))
    most = min(theirs - mine for theirs, mine in zip(leaves[rank], enters[0]))
    return (least + most) / 2


def _compare_clocks(call: str) -> Clock:
    """``call``: what every rank has to call now. Ranks that do other things read it in their errors, too."""
    enters, leaves = [], []
    for number in range(CLOCK_ROUNDS):
        enters.append(time.monotonic_ns())
        arrays.barrier(f"{call}(), which every rank must call ({number})")
        leaves.append(time.monotonic_ns())
    everyone = arrays.allgather(np.array([[enters, leaves]], dtype=np.int64), f"{call}: clocks")
    rank = context.rank()
    offset = 0.0 if rank == 0 else offset_of(everyone[:, 0].tolist(), everyone[:, 1].tolist(), rank)
    return Clock(time.monotonic_ns(), offset)


class Timeline:
    """The timeline of this rank while it is on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._rank = context.rank()
        self._host = context.current().peers[self._rank].host_name
        self._first = _compare_clocks("start_timeline")
        _, self._next, self._waited = recorder.take(1 << 62)
        self._events: list[recorder.Event] = []
        self._lost = 0
        self._begin = time.monotonic_ns()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._collect_until_stopped, name="collective_core timeline", daemon=True)
        self._thread.start()

    def _collect_until_stopped(self) -> None:
        while not self._stop.wait(COLLECT_INTERVAL):
            self._collect()

    def _collect(self) -> int:
        events, following, waited = recorder.take(self._next)
        if events:
            self._lost += events[0].number - self._next
        self._events += events
        self._next = following
        return waited

    def stop(self) -> Part:
        """Ends the recording. Returns this rank's part, with a clock that was compared at the beginning only."""
        self._stop.set()
        self._thread.join()
        waited = self._collect() - self._waited
        return Part(self._host, (self._first, self._first), self._begin, time.monotonic_ns(), waited, self._lost, self._events)

    def gather(self, part: Part) -> list[Part] | None:
        """All ranks' parts on rank 0, with corrected clocks. Collective."""
        part = part._replace(clocks=(self._first, _compare_clocks("stop_timeline")))
        mine = np.frombuffer(json.dumps(part).encode(), dtype=np.uint8)
        lengths = arrays.allgather(np.array([mine.size]), "timeline.lengths")
        everyone = arrays.allgather(mine, "timeline.parts")
        if self._rank != 0:
            return None
        ends = np.cumsum(lengths)
        return [_part_of(json.loads(everyone[end - n : end].tobytes())) for end, n in zip(ends, lengths)]

    def save_alone(self, part: Part) -> None:
        """Writes this rank's part to a file of its own."""
        path = f"{self.path}.rank{self._rank}"
        with open(path, "w") as file:
            json.dump(chrome_document([part], self._rank), file)
        print(f"timeline: {path} (of rank {self._rank} alone, because the ranks did not come to its end together)", file=sys.stderr)


def _part_of(document: Any) -> Part:
    host, clocks, begin, end, waited, lost, events = document
    first, last = (Clock(*clock) for clock in clocks)
    return Part(host, (first, last), begin, end, waited, lost, [recorder.Event(*event) for event in events])


def chrome_document(parts: Sequence[Part], first_rank: int = 0) -> dict[str, Any]:
    """The trace in Chrome's JSON format: a process per rank, times in microseconds from the beginning. Pure."""
    zero = min(part.corrected(part.begin) for part in parts)
    rows: list[dict[str, Any]] = []
    for rank, part in enumerate(parts, first_rank):
        rows.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} ({part.host_name})"}})
        rows.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})

        def add(name: str, begin: int, end: int, of: recorder.Event, rank: int = rank, part: Part = part) -> None:
            start = part.corrected(begin) - zero
            facts = {"tensor": of.name, "bytes": of.bytes, "type": of.dtype, "number": of.number, "result": of.state}
            row = {"ph": "X", "pid": rank, "tid": of.process_set, "name": name, "cat": of.kind, "ts": start}
            rows.append({**row, "dur": part.corrected(end) - zero - start, "args": facts})

        for event in part.events:
            agreed = event.agreed or event.ended
            add("wait", event.started, agreed, event)
            if event.ended > agreed:
                add(f"{event.kind} {event.name}", agreed, event.ended, event)
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def table(parts: Sequence[Part]) -> str:
    """Where the time of every rank went, in seconds. Pure.

    exposed: the program waited for collectives; compute: the rest. communication: data moved; hidden: of that, while the
    program computed. for others: from a rank's own arrival to that of the last rank. The slowest rank waits least for others.
    """
    head = ("rank", "host", "total", "compute", "communication", "hidden", "exposed", "for others")
    rows, patience = [], []
    for rank, part in enumerate(parts):
        total = (part.end - part.begin) / 1e9
        exposed = min(part.waited / 1e9, total)
        moving = sum(e.ended - e.agreed for e in part.events if e.agreed) / 1e9
        for_others = sum((e.agreed or e.ended) - e.started for e in part.events) / 1e9
        patience.append(for_others)
        hidden = max(0.0, min(moving, moving + for_others - exposed))
        numbers = (total, total - exposed, moving, hidden, exposed, for_others)
        rows.append((str(rank), part.host_name, *(f"{number:.3f}" for number in numbers)))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths)) for row in (head, *rows)]
    slowest = patience.index(min(patience))
    if len(parts) > 1:
        lines.append(f"slowest rank: {slowest} (host {parts[slowest].host_name}); the others waited up to {max(patience):.3f} s")
    lost = sum(part.lost for part in parts)
    if lost:
        lines.append(f"{lost} operations are not in the timeline: there were more than could be collected")
    return "\n".join(lines)


_active: Timeline | None = None
_unfinished: tuple[Timeline, Part] | None = None  # stopped, but not gathered


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001 - Horovod's parameter; there are no cycles
    """Begins to record what all ranks do; rank 0 will write it to ``file_path``. Collective.

    Raises ValueError if a timeline is on already.
    """
    global _active
    context.current()
    if _active is not None:
        raise ValueError(f"a timeline is on already, for {_active.path}: call stop_timeline() first")
    _active = Timeline(file_path)


def stop_timeline() -> None:
    """Ends the timeline: rank 0 writes the file and prints the table. Collective; does nothing if none is on."""
    global _active, _unfinished
    if _active is None:
        return
    timeline, _active = _active, None
    part = timeline.stop()
    _unfinished = timeline, part
    parts = timeline.gather(part)
    _unfinished = None
    if parts is None:
        return
    with open(timeline.path, "w") as file:
        json.dump(chrome_document(parts), file)
    print(f"timeline: {timeline.path}\n{table(parts)}", file=sys.stderr)


def end_with_engine(patience: float) -> bool:
    """Before a shutdown in good order: a timeline that nobody stopped. Waits so many seconds for the other ranks to come.

    False if they did not, or one has died: then nothing more may be waited for.
    """
    if _active is None:
        return True
    handle = 0
    try:
        handle = _native.submit(_native.operation(_native.BARRIER, THE_END, "uint8", (), 0), _native.ALONE)
        together = arrays.wait(handle, seconds=patience)
        if together:
            stop_timeline()
        return together
    except CollectiveError as error:
        print(f"timeline: not all ranks came to its end: {error}", file=sys.stderr)
        return not is_fatal(error)
    finally:
        _native.release(handle)


def save_alone() -> None:
    """After a shutdown: a timeline that was not gathered. Waits for nobody."""
    global _active, _unfinished
    timeline, _active = _active, None
    if timeline is not None:
        _unfinished = timeline, timeline.stop()
    unfinished, _unfinished = _unfinished, None
    if unfinished is not None:
        unfinished[0].save_alone(unfinished[1])
