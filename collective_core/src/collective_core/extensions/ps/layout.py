"""Layout of arrays over servers: arithmetic that every worker and server does alike.

A dense array of some size is cut into one range of elements per server, a smaller one is on one server, chosen by its name. Row i of a
table is on server i mod n.
"""

from __future__ import annotations

import zlib
from typing import Any

from collective_core.extensions.sparse.sharding import even_bounds

#: Elements from which on an array is cut: below, another message costs more than the bytes.
FEWEST_TO_CUT = 1 << 12


def bounds_of(name: str, length: int, servers: int) -> tuple[int, ...]:
    """Server s holds the elements from ``bounds[s]`` to ``bounds[s + 1]``."""
    if length >= FEWEST_TO_CUT:
        return even_bounds(length, servers)
    owner = zlib.crc32(name.encode()) % servers
    return (0,) * (owner + 1) + (length,) * (servers - owner)


def server_of(ids: Any, servers: int) -> Any:
    """Of each row of a table."""
    return ids % servers


def row_at_server(ids: Any, servers: int) -> Any:
    """The number of each row on the server that holds it."""
    return ids // servers


def rows_of(server: int, rows: int, servers: int) -> range:
    """The rows that a server holds, in their order there."""
    return range(server, rows, servers)
