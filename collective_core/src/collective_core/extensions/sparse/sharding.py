"""Sharding of the rows and columns of a table over ranks: arithmetic that no framework is needed for.

Rows are renumbered, so that each rank holds a contiguous range of *positions*. Row-wise, row i is on rank i mod n, as in parameter
servers: ids that are drawn with a skew (the frequent ones first, say) are spread evenly. Table-wise, all rows are on one rank. Column-wise,
every rank holds a range of columns of all rows.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

ROW_WISE, TABLE_WISE, COLUMN_WISE = "row_wise", "table_wise", "column_wise"
SHARDINGS = (ROW_WISE, TABLE_WISE, COLUMN_WISE)


class Placement(NamedTuple):
    """Rank r of ``size`` holds positions ``row_bounds[r]`` to ``row_bounds[r + 1]``, and the columns ``column_ranges[r]`` (first, end)."""

    sharding: str
    rows: int
    columns: int
    size: int
    row_bounds: tuple[int, ...]
    column_ranges: tuple[tuple[int, int], ...]

    def position(self, ids: Any) -> Any:
        """Positions of rows; ``ids``: a number or an array or tensor of integers."""
        if self.sharding != ROW_WISE or self.size == 1:
            return ids
        return ids % self.size * self.row_bounds[1] + ids // self.size

    def rows_of(self, rank: int) -> range:
        """The rows that a rank holds, in the order in which it holds them."""
        if self.sharding == ROW_WISE:
            return range(rank, self.rows, self.size)
        return range(self.rows if self.sharding == COLUMN_WISE else self.row_bounds[rank + 1] - self.row_bounds[rank])

    def columns_of(self, rank: int) -> slice:
        return slice(*self.column_ranges[rank])

    def shape(self, rank: int) -> tuple[int, int]:
        """Rows and columns of a rank's shard."""
        first, end = self.column_ranges[rank]
        return len(self.rows_of(rank)), end - first


def even_bounds(count: int, size: int) -> tuple[int, ...]:
    """``size`` ranges of 0..count that are as even as can be, the first ones longer by one."""
    return tuple(part * (count // size) + min(part, count % size) for part in range(size + 1))


def place(sharding: str, rows: int, columns: int, size: int, owner: int = 0) -> Placement:
    """The placement of a table over ``size`` ranks; ``owner``: the rank that holds a table-wise one.

    Raises ValueError for what is impossible.
    """
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding={sharding!r} is unknown; choose from {', '.join(SHARDINGS)}")
    if rows < 1 or columns < 1:
        raise ValueError(f"a table needs at least one row and one column, not {rows} x {columns}")
    if not 0 <= owner < size:
        raise ValueError(f"owner={owner} is not one of {size} ranks")
    all_columns = ((0, columns),) * size
    if sharding == COLUMN_WISE:
        if columns < size:
            raise ValueError(f"{columns} columns cannot be divided over {size} ranks; use row_wise")
        bounds = even_bounds(columns, size)
        return Placement(sharding, rows, columns, size, (0,) + (rows,) * size, tuple(zip(bounds, bounds[1:])))
    if sharding == TABLE_WISE:
        return Placement(sharding, rows, columns, size, (0,) * (owner + 1) + (rows,) * (size - owner), all_columns)
    # The last ranks may hold a row less than their range of positions, which keeps the arithmetic to one division.
    per_rank = -(-rows // size)
    return Placement(sharding, rows, columns, size, tuple(rank * per_rank for rank in range(size + 1)), all_columns)


def common_rows(one: range, other: range) -> range:
    """The rows in both of two ranges with steps."""
    step = one.step * other.step // gcd(one.step, other.step)
    end = min(one.stop, other.stop)
    first = next((row for row in one[: step // one.step + other.start] if row >= other.start and row in other), end)
    return range(first, end, step)


def common_columns(one: tuple[int, int], other: tuple[int, int]) -> range:
    return range(max(one[0], other[0]), min(one[1], other[1]))


def part_of(whole: range, part: range) -> slice:
    """Where the numbers of ``part``, which is not empty and within ``whole``, are in it."""
    first = whole.index(part[0])
    step = max(part.step // whole.step, 1)
    return slice(first, first + (len(part) - 1) * step + 1, step)
