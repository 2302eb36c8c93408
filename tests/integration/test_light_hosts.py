"""What measures `provision up` by the number of hosts (`benchmarks/light_hosts.py`), on few: it runs, and what it reads is there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import missing

from benchmarks import light_hosts


@pytest.mark.slow
def test_many_light_hosts_are_a_few_lines_and_a_file_of_events_each(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"):
        missing("light hosts need root and openssh-server")
    with light_hosts.light_hosts(tmp_path, 30, bad=0.1, pace=0.05) as sshd:
        found = light_hosts.measure(tmp_path, sshd)
    report = json.loads((tmp_path / "state/runs/latest/report.json").read_text())
    assert sorted(line["host"] for line in report["hosts"] if line["state"] == "installed") == sorted(
        f"node{number}" for number in range(1, 31) if number not in (1, 11, 21)
    ), found.lines
    assert {failure["host"] for failure in report["failures"]} == {"node1", "node11", "node21"}
    assert len(found.lines) < 60, found.lines
    assert len(list((tmp_path / "state/runs/latest/site/artifacts/ansible/job_events").iterdir())) == 27
    assert 0 < found.processor / 30 < 2
