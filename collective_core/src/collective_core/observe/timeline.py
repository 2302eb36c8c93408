"""Timeline of what every rank did when: recorded while the job runs, drawn at the end (trace.py).

The engine records every operation anyway (csrc/base/recorder.h). While a timeline is on, a thread appends the records to this
rank's own file (timeline_file.py), so that what a killed rank has recorded stays. Starting and stopping wait for nobody: every
exchange tells the ranks which of them record, and where at a time all have, rank 0 merges their parts at the end; a rank that
records alone draws its own.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import tempfile
import threading
import time
import zlib
from typing import Sequence

import numpy as np

from collective_core import _native, arrays
from collective_core.errors import CollectiveError, is_fatal
from collective_core.observe import clocks, recorder, timeline_file, trace
from collective_core.observe.timeline_file import Copies, Head, Writer
from collective_core.runtime import launchers, membership, operations

#: Seconds between two looks at the engine's ring of records; when many are new there, it is looked at earlier.
COLLECT_INTERVAL = 0.5
#: Bytes that rank 0 receives at a time of parts that it cannot read as files, from all ranks together; of a rank at least so many.
PIECES, MIN_PIECE = 16 << 20, 1 << 16
#: The operation in which the ranks meet before they shut down: ranks that still do other things read it in their error.
THE_END = "shutdown"


class Timeline:
    """The timeline of this rank: recorded until :meth:`end`, then finished or kept."""

    def __init__(self, path: str) -> None:
        who = membership.current()
        self.path, self.rank = path, who.rank
        self.of_all = False  # at a time, all ranks have recorded: then all of them will finish it together
        self._generation = launchers.generation
        job = zlib.crc32(repr([(peer.host_id, peer.pid) for peer in who.peers]).encode())
        _, self._next, self._waited = _native.events(1 << 62, None, 0)
        now, clock = time.monotonic_ns(), clocks.at_start
        host = who.peers[who.rank].host_name
        head = Head(os.urandom(16), job, who.rank, self._generation, clock, clock, now, now, 0, 0, host)
        try:
            self._prefix = self._prefix_of_part(host)
            self._file = Writer(timeline_file.path_of(self._prefix, who.rank, self._generation), head)
        except OSError as error:
            raise CollectiveError(f"timeline {path}: {error.strerror}: {error.filename}", "invalid") from error
        # Not from the heap, where a block of this size makes the C library give back and fetch the program's own again and again.
        memory = mmap.mmap(-1, recorder.RING * recorder.EVENT_BYTES)
        self._buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._complained = self._ended = False
        _native.begin_timeline()
        self._thread = threading.Thread(target=self._collect_until_ended, name="collective_core timeline", daemon=True)
        self._thread.start()

    def _prefix_of_part(self, host: str) -> str:
        """What the name of this rank's part begins with. Only rank 0 needs the timeline's folder."""
        folder = os.path.dirname(self.path) or "."
        if self.rank == 0 or os.path.isdir(folder):
            return self.path
        prefix = os.path.join(tempfile.gettempdir(), f"{os.path.basename(self.path)}.{os.getpid()}")
        print(f"timeline: rank {self.rank} (host {host}) records in {prefix}.*, because {folder} is not there", file=sys.stderr)
        return prefix

    def _collect_until_ended(self) -> None:
        while _native.await_events(self._next, COLLECT_INTERVAL):
            self._collect()

    def _collect(self) -> None:
        count, following, waited = _native.events(self._next, self._buffer, recorder.RING)
        lost = following - self._next - count
        self._next = following
        head = self._file.head._replace(end=time.monotonic_ns(), waited=waited - self._waited, lost=self._file.head.lost + lost)
        try:
            self._file.append(memoryview(self._buffer)[: count * recorder.EVENT_BYTES], head)
        except OSError as error:
            self._file.head = head._replace(lost=head.lost + count)  # which is written with the next events, if they can be
            if not self._complained:
                print(f"timeline: rank {self.rank} cannot write {self._file.path}: {error.strerror}", file=sys.stderr)
            self._complained = True

    def end(self, patience: float) -> bool:
        """Ends the recording when all that was submitted is done; False if it was not, within so many seconds: then it goes on."""
        if self._ended:
            return True
        of_all = _native.end_timeline(patience)
        if of_all is None:
            return False
        self._ended, self.of_all = True, of_all
        self._thread.join()
        self._collect()
        return True

    def finish(self) -> None:
        """Draws the timeline. Collective if it is of all ranks. If that fails, the parts stay.

        Raises OSError, and :class:`CollectiveError` as the collectives do.
        """
        if not self.of_all:
            self._file.close()
            return self._draw([self._file.path], self.path if self.rank == 0 else f"{self.path}.rank{self.rank}")
        paths = self._bring_together()
        return self._draw(paths, self.path) if self.rank == 0 else None

    def _draw(self, paths: Sequence[str], target: str) -> None:
        parts = [timeline_file.read(path) for path in paths]
        trace.write(target, parts)
        print(f"timeline: {target}\n{trace.table(parts)}", file=sys.stderr)
        for path in paths:
            os.unlink(path)

    def _bring_together(self) -> list[str]:
        """The files of all ranks' parts, where rank 0 can read them; only rank 0's answer counts. Collective."""
        self._file.write_head(self._file.head._replace(last=clocks.compare("stop_timeline")))
        self._file.close()  # on a file server: now others can read it
        length = os.path.getsize(self._file.path)
        facts = np.concatenate([np.frombuffer(self._file.head.token, dtype=np.int64), [length]])
        everyone = arrays.allgather(facts[None], "stop_timeline(), which every rank must call")
        paths = [timeline_file.path_of(self.path, rank, self._generation) for rank in range(len(everyone))]
        here = np.array([_is_part(path, facts[:2].tobytes()) for path, facts in zip(paths, everyone)])
        absent = np.flatnonzero(~arrays.broadcast(here, 0, "timeline.places")).tolist()
        if absent:
            self._send(absent, everyone[:, 2].tolist())
            paths = [timeline_file.path_of(self.path, r, self._generation, r in absent) for r in range(len(everyone))]
        return paths

    def _send(self, absent: Sequence[int], lengths: Sequence[int]) -> None:
        """The parts of the ranks ``absent`` go to rank 0, piece by piece. Collective."""
        most = max(MIN_PIECE, PIECES // len(absent))
        mine = [timeline_file.path_of(self.path, rank, self._generation, True) for rank in absent] if self.rank == 0 else []
        copies = Copies(mine)
        with open(self._file.path, "rb") as part:
            for _ in range(-(-max(lengths[rank] for rank in absent) // most)):
                piece = np.frombuffer(part.read(most) if self.rank in absent else b"", dtype=np.uint8)
                data, rows = arrays.alltoall(piece, [piece.size] + [0] * (len(lengths) - 1), "timeline.parts")
                ends = np.cumsum(rows)
                copies.add(data[ends[rank] - rows[rank] : ends[rank]].data for rank in absent)
        copies.close()
        unsupported_reason = f"timeline {self.path}: {copies.problem}; the parts stay on their hosts" if copies.problem else ""
        operations.run(_native.operation(_native.BARRIER, "timeline.received", "uint8", (), 0, unsupported_reason=unsupported_reason))
        if self.rank in absent:
            os.unlink(self._file.path)

    def keep(self) -> None:
        """Leaves this rank's part as it is, and says what to do with it."""
        self._file.close()
        draws = f"python -m collective_core.trace {self._prefix}"
        print(f"timeline: rank {self.rank} leaves {self._file.path}; {draws} draws it", file=sys.stderr)


def _is_part(path: str, token: bytes) -> bool:
    try:
        return timeline_file.read(path).head.token == token
    except (OSError, CollectiveError):
        return False


_active: Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001 - Horovod's parameter; there are no cycles
    """Begins to record what this rank does. Waits for nobody. Where all ranks call it, the timeline shows all of them, in rank 0's
    ``file_path``; where only some do, each one shows itself: rank 0 in ``file_path``, rank 2 in ``file_path.rank2``.

    Does nothing if this timeline is on already. Raises ValueError if another one is, :class:`CollectiveError` (kind ``invalid``) if the
    file cannot be written.
    """
    global _active
    membership.current()
    if _active is not None and _active.path == os.fspath(file_path):
        return
    if _active is not None:
        raise ValueError(f"a timeline is on already, for {_active.path}: call stop_timeline() first")
    _active = Timeline(os.fspath(file_path))


def stop_timeline() -> None:
    """Ends the timeline: rank 0 writes the file and prints the table. Does nothing if none is on.

    Collective where all ranks have recorded at a time; else it waits for nobody but for what this rank has submitted. Raises
    :class:`CollectiveError` if the file cannot be written or not all ranks come; then what they recorded stays beside the file.
    """
    global _active
    if _active is None:
        return
    _active.end(math.inf)
    timeline, _active = _active, None
    _finish(timeline)


def _finish(timeline: Timeline) -> None:
    try:
        timeline.finish()
    except OSError as error:
        timeline.keep()
        raise CollectiveError(f"timeline {timeline.path}: {error}", "invalid") from error
    except CollectiveError:
        timeline.keep()
        raise


def end_with_engine(patience: float) -> bool:
    """Before a shutdown in good order: a timeline that nobody stopped. Waits so many seconds for the other ranks to come.

    False if they did not, or one has died: then nothing more may be waited for.
    """
    global _active
    if _active is None:
        return True
    handle = 0
    try:
        if not _active.end(patience):
            return False
        if _active.of_all:
            handle = _native.submit(_native.operation(_native.BARRIER, THE_END, "uint8", (), 0), _native.ALONE)
            if not operations.wait(handle, seconds=patience):
                return False
        timeline, _active = _active, None
        _finish(timeline)
        return True
    except CollectiveError as error:
        fatal = is_fatal(error)
        print(f"timeline: {'not all ranks came to its end: ' if fatal else ''}{error}", file=sys.stderr)
        return not fatal
    finally:
        _native.release(handle)


def keep() -> None:
    """After a shutdown: of a timeline that was not finished, this rank's part stays. Waits for nobody."""
    global _active
    timeline, _active = _active, None
    if timeline is not None:
        timeline.end(math.inf)
        timeline.keep()
