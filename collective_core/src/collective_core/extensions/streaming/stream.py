"""A stream of records that all ranks train on together, each step on records that no other step had.

    stream = hvd.data.Stream(hvd.data.Directory("clicks"), batch_size=256)
    for batch in stream:                                     # on every rank as often
        x, y = parse(batch.records)                          # of this rank; maybe none
        loss = criterion(model(x), y).sum() * batch.scale    # so that the average over ranks is that over records
        ...
        state.commit()                                       # TorchState(model, optimizer, stream=stream)

Each step begins with one exchange, in which the ranks say how many records they have and to where these reach. Every rank so knows the
positions of all partitions after each step: they are the stream's state, the same on every rank and for any number of ranks, and what a
step that was not committed had read is read again.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from collective_core import arrays
from collective_core.common.elastic_states import HostsUpdatedInterrupt
from collective_core.elastic import worker
from collective_core.errors import CollectiveError
from collective_core.extensions.streaming.source import Positions, Source
from collective_core.runtime import launchers, membership

SCHEMA = 1
READER = 0  # the rank that finds partitions, and that reads where it hands out the records
#: Seconds between looks where nothing comes, the first and the longest.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.1


class Batch(NamedTuple):
    """This rank's ``records`` of a step, in which all ranks together have ``total``.

    ``scale``: what to multiply the sum of this rank's losses by, so that the average over the ranks is the mean over all records.
    """

    records: list[bytes]
    total: int
    scale: float


class Stream:
    """Batches of at most ``batch_size`` records per rank, until the source ends or some rank calls ``end``. Iterating is collective.

    ``shard``: ``"partition"``: each rank reads partitions of its own, every n-th of n ranks. ``"record"``: rank 0 reads, and deals out what
    there is in equal parts. The default is the source's. A rank whose partitions have no records gets a batch of none: it takes part in
    the step like the others. ``linger_seconds``: for how long a step waits for ranks whose batches are not full, once there are records.

    In an elastic job ranks may change while it waits for records, as they may in ``commit``: iterate within ``elastic.run``.

    ``state_dict`` and ``load_state_dict`` make it a part of ``TorchState`` and of ``Checkpoints``: then the records of committed (or
    saved) steps are never read again, and all others are. Raises ValueError for settings that cannot be.
    """

    def __init__(self, source: Source, batch_size: int, shard: str | None = None, linger_seconds: float = 0.1) -> None:
        self._shard = source.shard if shard is None else shard
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if self._shard not in ("partition", "record"):
            raise ValueError(f'shard is "partition" or "record", not {shard!r}')
        if source.only_rank_0 and self._shard != "record":
            raise ValueError(f'{source.kind} can only be read by rank 0: shard="record"')
        self._source, self._batch_size, self._linger = source, batch_size, linger_seconds
        self._positions: Positions = {}  # behind the last step, of all partitions
        self._first: Positions = {}  # where the stream began: what a state from before that goes back to
        self._count = 0  # records of all steps
        self._is_ending = False
        self._has_state = False  # whether somebody may go back
        self._forget_ahead()

    def _forget_ahead(self) -> None:
        """Drops what was read for a step that was not given."""
        self._pending: list[bytes] = []
        self._ahead: Positions = {}  # behind the pending records
        self._since: float | None = None  # when some rank had records, and not all had enough
        self._is_compared = False
        self._found: tuple[Positions, Sequence[str]] = {}, ()  # by rank 0: partitions that have come and gone
        self._discovered_at = -float("inf")
        self._owned_by: tuple[int, int] | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        if not self._has_state:
            self.release()
        pause = SHORTEST_PAUSE
        while True:
            reports = _exchange(self._report())
            self._check(reports)
            reader, total = reports[READER], sum(report["count"] for report in reports)
            if any(report["end"] for report in reports):
                self._is_ending = False
                self._forget_ahead()
                raise StopIteration
            if total and (reader["due"] or all(report["ready"] for report in reports)):
                return self._give(reports, total)
            if total and self._since is None:
                self._since = time.monotonic()
            if not total:
                self._advance(reports)
                if not reader["new"] and all(report["ended"] for report in reports):
                    self._forget_ahead()
                    raise StopIteration
                if any(report["change"] for report in reports):
                    self._forget_ahead()
                    raise HostsUpdatedInterrupt
            if not reader["same"] and (total or not reader["new"]):
                time.sleep(pause)
                pause = SHORTEST_PAUSE if total else min(2 * pause, LONGEST_PAUSE)

    def end(self) -> None:
        """Ends the stream on all ranks before their next step. Any rank may call it."""
        self._is_ending = True

    def state_dict(self) -> dict[str, Any]:
        """The positions behind the last batch that was given, the same on all ranks. Plain values."""
        self._has_state = True
        return {"schema": SCHEMA, "source": self._source.kind, "records": self._count, "positions": dict(self._positions)}

    def release(self) -> None:
        """What was given so far is not asked for again: call it after a commit, whose state must be the oldest that may be loaded.

        TorchState does so by itself. Only StandardInput keeps what was given, from the first ``state_dict`` on.
        """
        self._source.release(self._positions)

    elastic_saved = release

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind such positions, with any number of ranks. Raises ValueError for what cannot be positions of this source."""
        positions, count = state.get("positions"), state.get("records")
        if state.get("schema") != SCHEMA or not isinstance(positions, dict) or type(count) is not int or count < 0:
            raise ValueError(f"this is not a state of a stream, or one of another version: {str(dict(state))[:200]}")
        if state.get("source") != self._source.kind:
            raise ValueError(f"the state is one of a stream of {state.get('source')!r}; this one reads {self._source.kind!r}")
        for partition, position in positions.items():
            self._source.validate(partition, position)
        self._positions, self._count, self._has_state = dict(positions), count, True
        self._forget_ahead()

    def close(self) -> None:
        """Closes files and connections. Not collective; a stream that is read again opens them."""
        self._source.close()
        self._forget_ahead()

    def _report(self) -> dict[str, Any]:
        """What this rank tells the others. It reads only after all have been found to have the same stream."""
        report: dict[str, Any] = {"count": 0, "ready": False, "ended": False, "ahead": {}, "end": self._is_ending}
        report["change"] = launchers.is_elastic() and worker.shall_change()
        report.update(new={}, gone=[], due=False, same="", first={}, about=self._about(), error="")
        if not self._is_compared:
            report["same"], report["first"] = self._fingerprint(), self._first
            return report
        try:
            report["ready"], report["ended"] = self._read()
            report["count"], report["ahead"] = len(self._pending), self._ahead
            if membership.rank() == READER:
                now = time.monotonic()
                if report["ended"] or now >= self._discovered_at + self._source.discovery_interval:
                    self._found = self._source.discover(self._positions)
                    self._discovered_at = now
                report["new"], report["gone"] = self._found
                report["due"] = self._linger <= 0 or (self._since is not None and now >= self._since + self._linger)
        except Exception as error:  # noqa: BLE001 - the others wait for a word, whatever it is
            report["error"] = str(error) if isinstance(error, (ValueError, CollectiveError)) else f"{type(error).__name__}: {error}"
        return report

    def _read(self) -> tuple[bool, bool]:
        """Fills the pending records; whether they are all that this rank can have in this step, and whether no more will come."""
        size, rank = membership.size(), membership.rank()
        if self._shard == "record" and rank != READER:
            return True, True
        share = (0, 1) if self._shard == "record" else (rank, size)
        wanted = self._batch_size * (size if self._shard == "record" else 1)
        if self._owned_by != share:
            self._owned, self._owned_by = list(self._positions)[share[0] :: share[1]], share
        at = {name: self._ahead.get(name, self._positions[name]) for name in self._owned}
        records, ahead, ended = self._source.read(at, wanted - len(self._pending)) if len(self._pending) < wanted else ([], {}, False)
        self._pending += records
        self._ahead.update(ahead)
        return ended or len(self._pending) == wanted or not self._owned, ended

    def _check(self, reports: list[dict[str, Any]]) -> None:
        """Raises on all ranks what is wrong on one."""
        failed = [rank for rank, report in enumerate(reports) if report["error"]]
        if failed:
            self._forget_ahead()
            raise CollectiveError(f"the stream cannot be read by rank {failed[0]}: {reports[failed[0]]['error']}", "invalid", failed)
        if len({report["same"] for report in reports}) > 1:
            self._is_compared = False
            other = next(rank for rank, report in enumerate(reports) if report["same"] != reports[0]["same"])
            text = f"rank 0 has {reports[0]['about']}; rank {other} has {reports[other]['about']}"
            raise CollectiveError(f"the ranks' streams differ: {text}. Load the same state on all ranks", "mismatch", (other,))
        self._is_compared = True
        for report in reports:
            if not self._positions and not self._count:
                self._positions = report["first"]

    def _give(self, reports: list[dict[str, Any]], total: int) -> Batch:
        records = self._pending if self._shard == "partition" else _deal_out(self._pending)
        self._count += total
        self._advance(reports)
        return Batch(records, total, membership.size() / total)

    def _advance(self, reports: list[dict[str, Any]]) -> None:
        """All ranks note the positions that all have reached, and the partitions that have come and gone: nothing is pending now."""
        for report in reports:
            self._positions.update(report["ahead"])
        for name in reports[READER]["gone"]:
            self._positions.pop(name, None)
        if not self._positions and not self._count:
            self._first = reports[READER]["new"]
        self._positions.update(reports[READER]["new"])
        if reports[READER]["gone"] or reports[READER]["new"]:
            self._owned_by = None
        self._pending, self._ahead, self._since, self._found = [], {}, None, ({}, ())

    def _about(self) -> str:
        return f"{self._source.kind}, batch_size={self._batch_size}, shard={self._shard}, at record {self._count}"

    def _fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([self._about(), list(self._positions.items())]).encode()).hexdigest()


def _exchange(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's report, by rank."""
    text = np.frombuffer(json.dumps(report).encode(), dtype=np.uint8)
    everyone, lengths = arrays.allgather_with_rows(text, "stream.reports")
    return [json.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(lengths)[:-1])]


def _deal_out(records: list[bytes]) -> list[bytes]:
    """Of the reader's records those that are this rank's: a run of them, as long as the others' or one longer."""
    size, begin = membership.size(), 0
    parts, splits = [], []
    for rank in range(size):
        count = arrays.scattered_rows(len(records), rank, size)
        mine = records[begin : begin + count]
        lengths = np.array([count, *map(len, mine)], dtype=np.int64).tobytes()
        parts.append(lengths + b"".join(mine))
        begin += count
        splits.append(len(parts[-1]))
    is_reader = membership.rank() == READER
    sent = np.frombuffer(b"".join(parts) if is_reader else b"", dtype=np.uint8)
    received, _ = arrays.alltoall(sent, splits if is_reader else [0] * size, "stream.records")
    content = received.tobytes()
    count = int(np.frombuffer(content, np.int64, 1)[0])
    lengths_of = np.frombuffer(content, np.int64, count, offset=8).tolist()
    found, begin = [], 8 * (count + 1)
    for length in lengths_of:
        found.append(content[begin : begin + length])
        begin += length
    return found
