"""The known errors, as data: signatures/LAYER.yaml, what follows from other errors (consequences.yaml), and what is harmless."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from provision.base.errors import UsageError
from provision.diagnosis.findings import Severity
from provision.diagnosis.patterns import Pattern

FOLDER = Path(__file__).parent
LAYERS = ("driver", "cuda", "nccl", "mpi", "hwloc", "linker", "build", "python", "torch", "engine", "ssh", "network", "os", "data")


@dataclass(frozen=True)
class Signature:
    """A known error; the fields are those of signatures.schema.json.

    Args:
        generic: it names no cause at all and only ever follows from another error (consequences.yaml).
        quoted_alone: a generic one that, alone in a log, is quoted as an unknown error.
    """

    id: str
    layer: str
    severity: Severity
    title: str
    plain: str
    cause: str
    fix: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    probe: str = ""
    over: frozenset[str] = frozenset()
    consequence_of: frozenset[str] = frozenset()
    recovered_by: tuple[Pattern, ...] = ()
    generic: bool = False
    quoted_alone: bool = False


def compiled(pattern: str) -> Pattern:
    """A pattern as the data files write it: any case, a space stands for any white space, line ends included."""
    return Pattern("(?im)" + pattern.replace(" ?", r"\s*").replace(" ", r"\s+"))


@cache
def all_signatures() -> dict[str, Signature]:
    """id → signature, in the order of layers and files."""
    found: dict[str, Signature] = {}
    files = sorted((FOLDER / "signatures").glob("*.yaml"), key=lambda path: LAYERS.index(path.stem))
    for file in files:
        for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
            found[entry["id"]] = _signature(entry, file.stem)
    for entry in yaml.safe_load((FOLDER / "consequences.yaml").read_text(encoding="utf-8")):
        quoted = entry.get("alone") == "unknown"
        filled = {"severity": "note", "cause": entry["plain"], "fix": ["Read what stands above it in the log"], **entry}
        found[entry["id"]] = _signature(filled, entry["layer"], generic=True, quoted_alone=quoted)
    return found


@cache
def conditions() -> dict[str, Signature]:
    """id → what hosts can suffer from and no program prints in a known form."""
    entries = yaml.safe_load((FOLDER / "conditions.yaml").read_text(encoding="utf-8"))
    return {entry["id"]: _signature({"patterns": [], **entry}, entry["layer"]) for entry in entries}


@cache
def harmless() -> tuple[Pattern, ...]:
    """Patterns of lines that look alarming and mean nothing."""
    entries = yaml.safe_load((FOLDER / "harmless.yaml").read_text(encoding="utf-8"))
    return tuple(compiled(pattern) for entry in entries for pattern in entry["patterns"])


def named(name: str) -> Signature:
    """The signature of that id; UsageError with the nearest ids if there is none."""
    import difflib

    known = {**all_signatures(), **conditions()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise UsageError(f"no known error has the id {name}", hint=("perhaps " + ", ".join(near)) if near else "provision doctor list")


def _signature(entry: dict[str, Any], layer: str, *, generic: bool = False, quoted_alone: bool = False) -> Signature:
    return Signature(
        id=entry["id"],
        layer=layer,
        severity=entry["severity"],
        title=entry["title"],
        plain=entry["plain"],
        cause=entry["cause"],
        fix=tuple(entry["fix"]),
        patterns=tuple(compiled(pattern) for pattern in entry["patterns"]),
        probe=entry.get("probe", ""),
        over=frozenset(entry.get("over", ())),
        consequence_of=frozenset(entry.get("consequence_of", ())),
        recovered_by=tuple(compiled(pattern) for pattern in entry.get("recovered_by", ())),
        generic=generic,
        quoted_alone=quoted_alone,
    )
