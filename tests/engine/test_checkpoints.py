"""Checkpoints: whole or not there, whatever happens while they are written; position and state as before, with other ranks, too."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow_but_last
from conftest import WORKERS


@pytest.fixture(scope="module")
def job(launch, tmp_path_factory):
    """(the folder that a job of two ranks has left, what the job reported)"""
    folder = tmp_path_factory.mktemp("job") / "made" / "here"
    return folder, launch("checkpoints.py", 2, 1, (str(folder), "save")).must_succeed().reports()


def test_a_checkpoint_is_written_in_the_background_and_its_failure_is_told(launch, tmp_path):
    folder = tmp_path / "made"
    done = launch("checkpoint_background.py", 2, 1, (str(folder),)).must_succeed()
    written = f"cannot be written on {socket.gethostname()} into {folder}: Input/output error"
    for rank, report in done.reports().items():
        expected = [f"invalid (0,): the checkpoint of step 4 {written}"] * 3
        assert report["said"] == [*expected, f"invalid (0,): the checkpoint of step 6 {written}" if rank == 0 else "nothing"]
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:012d}.checkpoint" for step in (1, 2, 3, 7)]


def test_a_checkpoint_that_cannot_be_written_at_the_end_of_the_process_is_told(tmp_path):
    script = """
import os, sys
import collective_core.torch as hvd
import torch
hvd.init()
def failing(*_):
    raise OSError(5, os.strerror(5))
os.replace = failing
hvd.Checkpoints(sys.argv[1], model=torch.nn.Linear(1, 1)).save(8)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    said = f"the checkpoint of step 8 cannot be written on {socket.gethostname()} into {tmp_path}: Input/output error"
    assert done.stderr == f"collective_core: {said}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "stranger"), slow_but_last((2, 3), (1, -1)))
def test_a_host_needs_memory_for_one_copy_of_what_is_restored(launch, tmp_path, hosts, stranger):
    """``stranger``: a rank that may not open what the first rank of its host holds, and has a copy of its own, which it says."""
    done = launch("checkpoint_memory.py", 4, hosts, (str(tmp_path), str(stranger)), own_interpreter=True)  # others' ends change shares
    reports = done.must_succeed().reports()
    copies = sum(report["needed"] for report in reports.values()) / reports[0]["content"]
    expected = hosts + (stranger >= 0)
    assert expected - 0.1 < copies < expected + 0.25, reports
    assert sum(report["left"] for report in reports.values()) < 0.25 * reports[0]["content"], "nothing keeps it"
    said = [len(reports[rank]["warned"]) for rank in range(4)]
    assert said == ([2, 0, 0, 0] if stranger >= 0 else [0] * 4)
    assert all(text.startswith("ranks 3 may not open") for text in reports[0]["warned"])


@pytest.fixture
def folder(job, tmp_path):
    """A copy of that folder."""
    return Path(shutil.copytree(job[0], tmp_path / "copy"))


def test_a_job_goes_on_as_if_it_had_not_been_interrupted(job):
    assert len(job[1]) == 2  # the worker itself compares


@pytest.mark.slow
def test_a_job_on_two_hosts_goes_on_as_if_it_had_not_been_interrupted(launch, tmp_path):
    launch("checkpoints.py", 3, 2, (str(tmp_path), "save")).must_succeed()


@pytest.mark.slow
def test_another_number_of_ranks_takes_the_samples_that_are_left(job, launch, folder):
    done = job[1][0]
    found = launch("checkpoints.py", 3, 1, (str(folder), "go on")).must_succeed().reports()
    # The last step is the one after the last checkpoint: its samples are taken again.
    assert found[0]["rest"] == sorted(set(range(24)) - set(done["taken"]))
    assert all(report["state"] == found[0]["state"] for report in found.values())
    assert found[0]["found"] == {"step": 4, "epoch": 0, "loss": 0.5}


@pytest.mark.parametrize(
    ("damage", "n"), slow_but_last(("its end", 1), ("its first line", 1), ("a line of another program", 1), ("one byte", 2))
)
def test_a_damaged_checkpoint_is_passed_over_and_named(launch, folder, damage, n):
    last = folder / "step-000000000004.checkpoint"
    content = bytearray(last.read_bytes())
    if damage == "one byte":
        content[-100] ^= 1
    elif damage == "its end":
        del content[-100:]
    elif damage == "its first line":
        content[:10] = b"0123456789"
    else:
        content = bytearray(b"[" * (1 << 20) + b"\n")
    last.write_bytes(content)
    reports = launch("checkpoints.py", n, 1, (str(folder), "go on")).must_succeed().reports()
    assert [report["found"]["step"] for report in reports.values()] == [3] * n
    assert [len(reports[rank]["passed_over"]) for rank in range(n)] == [1, 0][:n]
    assert str(last) in reports[0]["passed_over"][0]


RESTARTED = """
import sys
import collective_core.torch as hvd
import torch
hvd.init()
model = torch.nn.Linear(3, 1).double()
sampler = hvd.elastic.ElasticSampler(range(24), shuffle=False)
parts = {"model": model, "sampler": sampler}
folder, task = sys.argv[1:]
checkpoints = hvd.Checkpoints(folder, keep=2, **parts)
if task == "save":
    for step in (1, 2, 3):
        sampler.record_batch(step - 1, 2)
        torch.nn.init.constant_(model.weight, step)
        checkpoints.save(step, epoch=7)
elif task == "restore":
    found = checkpoints.restore()
    checkpoints.save(11)
    assert checkpoints.restore() == {"step": 11}, "what was saved since counts"
    print(found, model.weight[0, 0].item(), sampler.processed_num, flush=True)
else:
    def go(state):
        state.commit()
        return state.step, state.epoch, state.loss, model.weight[0, 0].item(), sampler.processed_num
    print(hvd.elastic.run(go)(hvd.elastic.TorchState(sampler=sampler, model=model, step=0, epoch=0, loss=0.25)), flush=True)
"""


def restarted(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """By our own launcher, two ranks; ``words``: its options, the program's folder, and what the program does."""
    *options, folder, task = map(str, words)
    command = [sys.executable, "-m", "collective_core.launch", "-np", "2", *options, "python", "-c", RESTARTED, folder, task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """What an earlier job has left: steps 2 and 3, the latter damaged."""
    folder = tmp_path_factory.mktemp("earlier")
    restarted(folder, "save")
    last = folder / "step-000000000003.checkpoint"
    last.write_bytes(last.read_bytes()[:-5])
    return folder


@pytest.mark.slow
def test_a_job_that_is_told_where_to_restart_takes_the_last_valid_checkpoint_with_the_samplers_position(earlier, tmp_path):
    done = restarted("--restart-from", earlier, tmp_path / "own", "restore")
    # Each of the two ranks has done two batches of two samples.
    expected = "{'step': 2, 'epoch': 7} 2.0 8"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {expected}" for rank in (0, 1)]
    assert f"[0] collective_core: goes on from {earlier}/step-000000000002.checkpoint (step 2)" in done.stderr
    assert f"{earlier}/step-000000000003.checkpoint is not used: it holds" in done.stderr
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step-000000000011.checkpoint"]


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("--min-np", "1")])
def test_an_elastic_state_begins_where_it_is_told_to(earlier, tmp_path, options):
    done = restarted(*options, "--restart-from", earlier, tmp_path, "elastic")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] (2, 7, 0.25, 2.0, 8)" for rank in (0, 1)]
    assert done.stderr.count("goes on from") == 1


@pytest.mark.parametrize("task", slow_but_last("restore", "elastic"))
def test_a_folder_without_a_valid_checkpoint_is_one_error(tmp_path, task):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "step-000000000001.checkpoint").write_bytes(b"nothing")
    done = restarted("--restart-from", damaged, tmp_path / "own", task, code=1)
    assert f"--restart-from {damaged}: no valid checkpoint on " in done.stderr
    assert "step-000000000001.checkpoint is not used: its first line is damaged" in done.stderr
    done = restarted("--restart-from", tmp_path / "gone", tmp_path / "own", task, code=1)
    assert "there is no such folder" in done.stderr
    assert not (tmp_path / "own").exists()


def test_wrong_use_and_a_full_disk_are_one_error_on_every_rank_and_nothing_is_lost(launch, folder):
    reports = launch("checkpoints.py", 2, 1, (str(folder), "wrong")).must_succeed().reports()
    refused = "holds another job's of the same or later steps (step-000000000004.checkpoint, step-000000000003.checkpoint)"
    expected = (
        "at least 1, not 0",
        "has no state_dict",
        refused,
        "not JSON serializable",
        "File name too long",
        "holds model, optimizer, sampler",
        "has 24",
        "-1",
    )
    for report in reports.values():
        for said, part in zip(report["said"][:-1], expected, strict=True):
            assert part in said, said
        assert "invalid: the checkpoint of step 9 cannot be written on" in report["said"][-1]
        assert "File too large" in report["said"][-1]
        assert report["files"] == ["step-000000000003.checkpoint", "step-000000000004.checkpoint"]


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_leaves_its_last_checkpoint(tmp_path):
    dice = random.Random(7)
    saved = 0
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-u", str(WORKERS / "checkpoints.py"), str(tmp_path), "for ever"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(WORKERS)},
        )
        assert process.stdout
        words = process.stdout.readline().split()
        assert words[0] == "begins"
        assert int(words[1]) in range(saved, saved + 3), "the last one that was reported, the one after it, or the one that was begun then"
        for _ in range(dice.randrange(1, 9)):
            saved = int(process.stdout.readline().split()[1])
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            if line.startswith("saved") and line.endswith("\n"):
                saved = int(line.split()[1])
        process.wait()
        assert len(list(tmp_path.glob(".*.part"))) <= 1, "drafts of processes that were killed pile up"


def test_a_checkpoint_that_was_just_saved_is_never_the_one_that_goes(tmp_path):
    """Also where the folder holds later steps: of a line that was given up, or damaged ones that were passed over."""
    script = """
import sys, torch
import collective_core.torch as hvd
hvd.init()
model = torch.nn.Linear(1, 1)
checkpoints = hvd.Checkpoints(sys.argv[1], keep=2, model=model)
for step in (4800, 4900, 5000, 100, 200, 300):
    checkpoints.save(step)
    assert checkpoints.restore()["step"] == step, step
broken = type("Broken", (), {"state_dict": lambda self: 1 / 0, "load_state_dict": print})()
try:
    hvd.Checkpoints(sys.argv[1], model=model, broken=broken).save(400)
except hvd.CollectiveError as error:
    assert "ZeroDivisionError" in str(error), error
else:
    raise AssertionError("nothing was said")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000200.checkpoint", "step-000000000300.checkpoint"]


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_nothing_unless_it_is_trusted(tmp_path):
    torch = pytest.importorskip("torch")
    from collective_core.torch import checkpoint, host_copy

    from collective_core import CollectiveError

    content = io.BytesIO()
    torch.save({"model": Touches(tmp_path / "ran")}, content)
    content.seek(0)
    with host_copy.new_file() as number:
        host_copy.fill(number, io.BufferedReader(content))
        with pytest.raises(CollectiveError, match="if you trust whoever wrote it"):
            checkpoint._load(number, False)
        assert not (tmp_path / "ran").exists()
        checkpoint._load(number, True)
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_another_jobs_checkpoints_are_deleted_only_on_request(tmp_path):
    script = """
import sys
import collective_core.torch as hvd
import torch
hvd.init()
model = torch.nn.Linear(1, 1)
def save(*steps, **options):
    checkpoints = hvd.Checkpoints(sys.argv[1], keep=1, model=model, **options)
    for step in steps:
        checkpoints.save(step)
def refused(step):
    try:
        save(step)
    except hvd.CollectiveError as error:
        return "overwrite=True" in str(error)
"""
    jobs = (
        ("save(100), save(200)", [200]),
        ("assert refused(10) and refused(200)", [200]),
        ("save(300, 310)", [200, 310]),  # what is earlier is left alone
        ("hvd.Checkpoints(sys.argv[1], model=model).restore(), save(250)", [250]),  # it was restored: one line
        ("save(10, 20, overwrite=True)", [20]),
    )
    for job, left in jobs:
        done = subprocess.run([sys.executable, "-c", f"{script}\n{job}", str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:012d}.checkpoint" for step in left], job


LEAVING = """
import sys
import collective_core.torch as hvd
import torch
from collective_core import job
hvd.init()
hvd.Checkpoints(sys.argv[1], model=torch.nn.Linear(1, 1 << 25)).save(1)
job._forget_launcher()  # as a worker does that leaves an elastic job
"""


@pytest.mark.slow
def test_a_worker_that_leaves_an_elastic_job_finishes_its_checkpoint(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVING, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001.checkpoint"]
