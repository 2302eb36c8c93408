"""Hosts whose answers are files: a fake ssh prints them, and an address without a file cannot be reached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provision.cli import main
from provision.survey.document import BEGIN, END

_SSH = """#!/bin/sh
for word; do address=$last; last=$word; done
[ -e {folder}/$address ] || {{ echo "ssh: connect to host $address port 22: No route to host" >&2; exit 255; }}
printf '%s' "$last" > {folder}/$address.script
cat {folder}/$address
"""

ACTIVITY: dict[str, Any] = {
    "uptime": 90_000.5,
    "load": 3.25,
    "cores": 16,
    "memory": {"total": 64 << 30, "available": 40 << 30},
    "disk": {"path": "/opt/provision", "total": 500 << 30, "available": 100 << 30},
    "locked": None,
    "jobs": [],
}
GPU: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-8a2e",
    "name": "NVIDIA H100 80GB HBM3",
    "utilization": 97.0,
    "memory_used": 72790 << 20,
    "memory_total": 81559 << 20,
    "temperature": 39.0,
    "power": 145.3,
}
JOB: dict[str, Any] = {"run": "20261126-170000-abc123", "ranks": 8, "age": 7500.0, "program": "train.py"}
INSTALLED: dict[str, Any] = {"prefix": "/opt/provision", "manifest": None, "files": {}}


class Hosts:
    """An inventory of such hosts."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        program = folder / "ssh"
        program.write_text(_SSH.format(folder=folder))
        program.chmod(0o755)
        self.file = folder / "hosts.ini"
        lines = [f"{name} ansible_host={name}.example ansible_ssh_executable={program}" for name in names]
        self.file.write_text("\n".join(lines) + "\n")

    def __str__(self) -> str:
        return str(self.file)

    def answer(self, name: str, document: Mapping[str, Any] | str | None = None, **sections: Any) -> None:
        """What a host says: these sections in place of those of one with an installation that is not there."""
        usual = {"activity": ACTIVITY, "gpu_load": {"gpus": [], "error": None}, "installed": INSTALLED, "drift": None, "errors": {}}
        text = document if isinstance(document, str) else json.dumps({**usual, **(document or {}), **sections})
        (self.folder / f"{name}.example").write_text(f"a banner\n{BEGIN}\n{text}\n{END}\n")

    def script(self, name: str) -> str:
        """The command that a host got last."""
        return (self.folder / f"{name}.example.script").read_text()


def end_of(*words: str) -> int:
    """The exit code of ``provision WORDS…`` within this process."""
    return main.guarded(lambda: main.app(args=list(words), prog_name="provision"), debug=False)
