"""What an update of the catalogue has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Update:
    """What an update found: rows by catalogue file, a line for each new fact, and why what else was looked for could not be had.

    Attributes:
        index_read: a package index, or a folder with wheels, answered.
        set_aside: files of the folder that were invalid, and where they are now.
    """

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    index_read: bool = False
