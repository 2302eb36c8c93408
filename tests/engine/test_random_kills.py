"""A rank is killed at fifty random moments: never a hang, never an error that does not name it, nothing left behind."""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from leftovers import MARK, files, processes_marked
from test_launchers import SHARED, clean, free_port, reports

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "workers" / "random_kill.py"
SEEDS = 50
#: Of them with PyTorch, which takes seconds to start.
TRAINING = (11, 23, 35, 47)
#: Seconds in which a death must be noticed by ranks that are at work.
NOTICE = 2.0
#: By which the jobs' processes are known.
KILLS = f"random-kills-{os.getpid()}"
AT_ONCE = 4
#: Seconds of a phase within which the victim's moment lies; on a quiet machine the start takes half of one.
LATEST = {"start": 1.0, "work": 0.4, "training": 0.4}
#: Seconds for which a rank waits for one that never comes, and, while all import PyTorch, for one that comes late.
START_TIMEOUT, LATE_START = 6, 30
#: Seconds in which all survivors must have ended, with what a busy machine takes to start Python.
LIMIT = START_TIMEOUT + 50


@dataclass
class Job:
    """How one job ended: exit codes by rank, what the ranks reported, what they said besides."""

    victim: int
    phase: str
    codes: list[int]
    reports: dict[int, dict[str, Any]]
    died_at: float
    said: str


def environment(rank: int, n: int, hosts: int, port: int, start_timeout: int) -> dict[str, str]:
    return clean(
        COLLECTIVE_RANK=str(rank),
        COLLECTIVE_SIZE=str(n),
        COLLECTIVE_STORE=f"127.0.0.1:{port}",
        COLLECTIVE_SECRET=SHARED,
        COLLECTIVE_HOST_ID=f"host{rank * hosts // n}-{port}",
        COLLECTIVE_ADDRESS="127.0.0.1",
        COLLECTIVE_START_TIMEOUT=str(start_timeout),
        OMP_NUM_THREADS="1",
        **{MARK: KILLS},
    )


def run(seed: int) -> Job:
    chosen = random.Random(seed)
    n, port = chosen.choice([2, 3, 4]), free_port()
    hosts, victim = chosen.choice([1, 2]), chosen.randrange(n)
    phase = "training" if seed in TRAINING else "work" if seed % 2 else "start"
    timeout = LATE_START if phase == "training" else START_TIMEOUT
    words = [sys.executable, str(WORKER), str(seed), str(victim), phase, str(chosen.uniform(0.0, LATEST[phase]))]
    processes = [
        subprocess.Popen(words, env=environment(rank, n, hosts, port, timeout), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(n)
    ]
    deadline, outputs = time.monotonic() + LIMIT, []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            outputs.append((out, err + f"hung for {LIMIT} s\n"))
    codes = [process.returncode for process in processes]
    told = reports([out for out, _ in outputs])
    died_at = told.pop(victim, {}).get("died_at", math.nan)
    return Job(victim, phase, codes, told, died_at, "\n".join(err for _, err in outputs))


@pytest.fixture(scope="module")
def jobs():
    before = files()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = list(pool.map(run, range(SEEDS)))
    assert not processes_marked(KILLS)
    assert files() <= before
    return done


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_rank_that_is_killed_at_any_moment_is_named(jobs, seed):
    job = jobs[seed]
    assert job.codes == [-9 if rank == job.victim else 0 for rank in range(len(job.codes))], job.said
    assert set(job.reports) == set(range(len(job.codes))) - {job.victim}, job.said
    for entry in job.reports.values():
        assert entry["kind"] in ("peer_lost", "timeout"), entry
        assert job.victim in entry["ranks"], entry
        if job.phase != "start" or entry["done"]:
            assert entry["ranks"] == [job.victim], entry


def test_deaths_are_noticed_in_time(jobs):
    """Half of them within the time: several jobs at once share the processors here, so some ranks have to wait for their turn."""
    at_work = [job for job in jobs if job.phase != "start"]
    died = [job for job in at_work if job.reports and not math.isnan(job.died_at)]
    assert len(died) > len(at_work) * 3 // 4, "so few that the victims have not come to work"
    took = [max(entry["raised_at"] for entry in job.reports.values()) - job.died_at for job in died]
    assert statistics.median(took) < NOTICE, sorted(took)
