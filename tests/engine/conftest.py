"""Launching worker scripts as real ranks: `mpirun` from the interpreter's own environment, many cases per launch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WORKERS = Path(__file__).parent / "workers"
#: Seconds: a launch takes two to ten on a busy machine with two cores; a hang must not block the suite.
LAUNCH_LIMIT = 120

pytest.importorskip("collective_core", reason="the engine is not installed: pip install ./collective_core")


@dataclass
class Outcome:
    returncode: int
    stdout: str
    stderr: str

    def reports(self) -> dict[int, dict[str, Any]]:
        """What each rank reported with common.report, by rank."""
        found = [json.loads(line.split("REPORT ", 1)[1]) for line in self.stdout.splitlines() if "REPORT " in line]
        return {entry["rank"]: entry for entry in found}

    def must_succeed(self) -> Outcome:
        assert self.returncode == 0, f"exit {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


def find_mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


@pytest.fixture(scope="session")
def launch():
    """launch(worker, n, hosts=1, arguments=(), env={}, keep_going=False) -> Outcome.

    `hosts` > 1 divides the ranks over so many pretended hosts, which talk TCP over loopback. `keep_going`: mpirun does not end
    the other ranks when one dies.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.fail("there is no mpirun beside this Python or on PATH; `make engine` sets everything up", pytrace=False)

    def run(worker, n, hosts=1, arguments=(), env=None, keep_going=False, limit=LAUNCH_LIMIT):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "COLLECTIVE_"))}
        environment.update({"TEST_HOSTS": str(hosts), "OMP_NUM_THREADS": "1", **(env or {})})
        environment["PYTHONPATH"] = os.pathsep.join([str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])])
        if hosts > 1:
            environment.setdefault("COLLECTIVE_ADDRESS", "127.0.0.1")
        options = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
        if keep_going:
            options += ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
        command = [mpirun, *options, "-np", str(n), sys.executable]
        command += ["-m", worker] if not worker.endswith(".py") else [str(WORKERS / worker)]
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=limit)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run
