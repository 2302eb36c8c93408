"""Several controllers, and controllers that end: hosts are locked for one at a time, and nothing goes on without its controller."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hosts import good, marked_processes, provision, root, running

from provision.sandbox import Sandbox


@pytest.fixture(scope="module")
def cluster(ready_sandbox) -> Sandbox:
    return ready_sandbox("ready")


def test_second_controller_is_told_who_has_the_lock(cluster):
    with running("smoke", str(cluster.inventory), "--epochs", "1", "--np", "3") as first:
        first.wait_for("Survey")
        second = provision("up", str(cluster.inventory))
        assert second.returncode == 1
        assert f"pid {first.process.pid}" in second.stderr
        assert "`provision smoke`" in second.stderr
        trained = first.finish()
    assert trained.returncode == 0, trained.stderr
    assert "3 ranks on 2 hosts, 1 epoch" in trained.stdout


@pytest.mark.slow
def test_a_controller_on_another_machine_is_named_too(cluster):
    lock = '{"run": "20260101-000000-abcdef", "owner": "ann on laptop (pid 7)", "since": "this morning"}'
    root(cluster.hosts[1], f"echo '{lock}' > /run/provision.lock")
    try:
        result = provision("up", str(cluster.inventory))
    finally:
        root(cluster.hosts[1], "rm /run/provision.lock")
    assert result.returncode == 1
    assert "ann on laptop (pid 7) has been working on this host since this morning" in result.stdout
    assert root(cluster.hosts[0], "ls /run/provision.lock* 2>/dev/null || true") == ""


def test_killed_installation_does_not_lock_out_the_next(cluster):
    with running("up", str(cluster.inventory), "--no-smoke", "--full") as run:
        run.wait_for("python: Install Python packages")
        children = [int(child) for child in Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()]
        os.kill(run.process.pid, signal.SIGKILL)
        for child in children:  # Ansible, in a session of its own; it would go on to the end and give the lock back
            os.killpg(child, signal.SIGKILL)
    assert root(cluster.hosts[0], "cat /run/provision.lock")
    good(provision("up", str(cluster.inventory), "--no-smoke"))
    assert root(cluster.hosts[0], "ls /run/provision.lock* 2>/dev/null || true") == ""


@pytest.mark.slow
def test_ctrl_c_in_training_leaves_nothing_running_anywhere(cluster):
    with running("smoke", str(cluster.inventory), "--epochs", "500") as run:
        run.wait_for("Train Epoch")
        assert marked_processes(cluster)
        run.process.send_signal(signal.SIGINT)
        ended = run.finish(timeout=60)
    assert ended.returncode == 1
    assert "nothing of this run is left running" in ended.stderr
    assert "Traceback" not in ended.stderr.split("interrupted:")[-1]
    assert marked_processes(cluster) == []


@pytest.mark.slow
def test_a_controller_that_is_killed_leaves_no_training_behind(cluster):
    with running("smoke", str(cluster.inventory), "--epochs", "500") as run:
        run.wait_for("Train Epoch")
        os.kill(run.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (left := marked_processes(cluster)) and time.monotonic() < deadline:
            time.sleep(0.5)
    assert left == []
