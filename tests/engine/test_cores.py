"""How many threads each rank computes with, whoever starts it: its part of the cores that its host gives the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from collective_core.runtime import cores
from conftest import find_mpirun

from collective_core import Runner, _native

OWN = min(len(os.sched_getaffinity(0)), cores.quota(os.getpid()))
# Spaces: mpirun may pass the ends of two ranks' lines on together.
SAY = "import os; os.write(1, (' ' + os.environ['OMP_NUM_THREADS'] + ' ').encode())"  # at once: of print, unbuffered, each word is a write


@pytest.fixture(autouse=True)
def nobody_has_said_how_many(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def threads():
    return os.environ["OMP_NUM_THREADS"]


@pytest.mark.parametrize("np", [1, 2])
def test_ranks_divide_the_cores(np):
    assert Runner(np=np).run(threads) == [str(max(1, int(OWN / np)))] * np
    assert Runner(np=np, min_np=1).run(elastic_threads) == [str(max(1, int(OWN / np)))] * np


def elastic_threads():
    import collective_core.torch as hvd

    hvd.init()
    return hvd.elastic.run(lambda _: os.environ["OMP_NUM_THREADS"])(hvd.elastic.ObjectState(step=0))


def test_what_somebody_has_said_stays(monkeypatch):
    assert Runner(np=1, env={"OMP_NUM_THREADS": "7"}).run(threads) == ["7"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert Runner(np=2).run(threads) == ["5", "5"]


@pytest.mark.parametrize(("np", "binding"), [(1, "none"), (2, "none"), (2, "core")])
def test_under_mpirun(np, binding):
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", binding, "-np", str(np)]
    done = subprocess.run(
        [find_mpirun(), *options, sys.executable, cores.__file__, sys.executable, "-c", SAY], capture_output=True, text=True, timeout=60
    )
    expected = 1 if binding == "core" else max(1, int(OWN / np))
    assert done.stdout.split() == [str(expected)] * np, done.stderr


def test_what_a_rank_has_started_finds_what_started_the_rank():
    inner = f"import runpy; print(runpy.run_path({cores.__file__!r})['launcher']())"
    outer = f"import os, subprocess, sys; print(os.getppid(), flush=True); subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    command = [find_mpirun(), "--allow-run-as-root", "-np", "1", sys.executable, "-c", outer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    by_outer, by_inner = done.stdout.split()
    assert by_inner == by_outer, done.stderr


def test_a_program_that_is_not_there():
    done = subprocess.run([sys.executable, cores.__file__, "no-such-program"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (127, "no-such-program cannot be started: No such file or directory\n")


@pytest.fixture
def system(tmp_path):
    """``system(cgroup, mountinfo, {file: text})``: what a machine says of process 7's control groups."""

    def make(memberships: str, mounts: str, files: dict[str, str]) -> Path:
        for name, text in {"proc/7/cgroup": memberships, "proc/7/mountinfo": mounts, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


V2 = "31 23 0:26 {} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = """33 32 0:29 {} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 32 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
"""


def v1(quota):
    return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("memberships", "mounts", "files", "expected"),
    [
        # Version 2: in a container, which sees its own group as the root; and a service in a slice with a narrower limit.
        ("0::/\n", V2.format("/"), {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", V2.format("/"), {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.0),
        ("0::/a/b\n", V2.format("/"), {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/docker/x\n", V2.format("/docker/x"), {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/job_12/x\n", V2.format("/job_1"), {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/../other\n", V2.format("/"), {"cpu.max": "max 100000\n"}, float("inf")),
        # Version 1.
        ("4:cpuset:/\n3:cpu,cpuacct:/docker/x\n", V1.format("/docker/x"), v1(50000), 0.5),
        ("3:cpu,cpuacct:/x\n", V1.format("/"), {f"x/{name}": text for name, text in v1(-1).items()}, float("inf")),
        ("", "", {}, float("inf")),
    ],
)
def test_the_quota_of_a_control_group(system, memberships, mounts, files, expected):
    top = "sys/fs/cgroup" if "cgroup2" in mounts else "sys/fs/cgroup/cpu,cpuacct"
    root = system(memberships, mounts, {f"{top}/{name}": text for name, text in files.items()})
    assert _native.library().cc_core_quota(7, str(root).encode()) == expected


def test_a_quota_is_divided_too_and_a_rank_has_at_least_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cores, "quota", lambda _: 6.5)
    assert [cores.share(ranks) for ranks in (1, 2, 3, 4, 100)] == [6, 3, 2, 1, 1]
