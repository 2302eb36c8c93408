"""Types of plain data: what JSON and YAML documents hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Document: TypeAlias = Mapping[str, Json]
