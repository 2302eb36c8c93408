"""Sources of a stream: partitions, each an ordered sequence of records, and positions in them."""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Sequence

#: Where a partition has been read to: plain values, as JSON has them. Of what form, its source says.
Position = Any
#: The position in each partition, by its name.
Positions = Dict[str, Position]


class Read(NamedTuple):
    """Some records, in order, and the positions behind them of the partitions that were read. ``ended``: there will be no more."""

    records: list[bytes]
    positions: Positions
    ended: bool


class Source:
    """The interface. No method may block for long: other ranks wait. Errors are ValueError, OSError or CollectiveError, and say what to do.

    ``kind`` is kept with the positions, so that those of another kind of source are refused. ``shard``: how a stream divides the records
    by default, ``"partition"`` or ``"record"``; ``"record"`` alone where only rank 0 can read.
    """

    kind = ""
    shard = "partition"
    only_rank_0 = False
    #: Seconds between calls of :meth:`discover`, at least.
    discovery_interval = 0.5

    def discover(self, known: Mapping[str, Position]) -> tuple[Positions, Sequence[str]]:
        """On rank 0: new partitions with their first positions, in order, and known ones that were read wholly and are gone."""
        raise NotImplementedError

    def read(self, positions: Mapping[str, Position], most: int) -> Read:
        """At most ``most`` records behind ``positions``; fewer where there are no more now."""
        raise NotImplementedError

    def validate(self, partition: str, position: Position) -> None:
        """Raises ValueError for what cannot be a position of this source."""
        raise NotImplementedError

    def release(self, positions: Mapping[str, Position]) -> None:
        """What is before ``positions`` is not asked for again."""

    def close(self) -> None:
        """Closes files and connections; a later ``read`` opens them again."""
