"""The last document of every cluster, kept in the state folder for the next comparison."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provision.base import downloads, paths
from provision.bench.measurement import SCHEMA
from provision.inventory import Inventory
from provision.inventory.last_run import identity


def last(inventory: Inventory) -> dict[str, Any] | None:
    """What was measured last; None where nothing was, or it cannot be read any more."""
    try:
        document: dict[str, Any] = json.loads(_place(inventory).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("schema") == SCHEMA else None


def keep(inventory: Inventory, document: Mapping[str, Any]) -> None:
    """In the place of the one before."""
    place = _place(inventory)
    place.parent.mkdir(parents=True, exist_ok=True)
    downloads.store(place, (json.dumps(document, indent=1) + "\n").encode())


def _place(inventory: Inventory) -> Path:
    # Some of the hosts are another cluster: `--limit` must not take the whole one's place.
    words = [identity(inventory), *sorted(host.name for host in inventory.hosts)]
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    return paths.home() / "bench" / f"{name}.json"
