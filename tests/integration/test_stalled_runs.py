"""`provision run` watches its job: one that stalls is named, ended or started again, and healthy ones raise no alarm."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import missing
from hosts import Running, provision, running, wait_until

from provision.base import paths
from provision.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine/bin/python"
PROGRAM = Path(__file__).parent / "watched_job.py"
STANDS = next(number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# STANDS"))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program, which waits for a FIFO that nothing is written into."""
    if not PYTHON.exists():
        missing("no engine in .venv-engine: make setup")
    shutil.copy(PROGRAM, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(shape: str, *options: str, after: str = "2", seconds: int = 6) -> list[str]:
    here = ["--hosts", "localhost", "--python", str(PYTHON), "-np", "2"]
    return ["run", *here, "--stall-after", after, *options, "watched_job.py", shape, str(seconds)]


def end(run: Running) -> tuple[int, str]:
    """(exit code, all that it has said)"""
    said, _ = run.process.communicate(timeout=120)
    return run.process.returncode, "".join(run.said) + said


def test_a_stall_is_named_and_a_long_evaluation_is_not(work: Path) -> None:
    with ExitStack() as stack:
        stalled, healthy = (
            stack.enter_context(running(*each)) for each in (words("fifo", "--on-stall", "kill"), words("evaluation", seconds=6))
        )
        code, said = end(stalled)
        assert (code, said.count("provision: the job has stalled since")) == (124, 1), said
        assert f"rank 1 on localhost waits in openat of {work}/data on " in said
        assert f" at watched_job.py:{STANDS}; rank 0 waits for it in allreduce '" in said
        last = [line for line in said.splitlines() if line and not line.startswith(" ")][-1]
        assert last.startswith("the job has stalled, and was ended (--on-stall kill): rank 1 on localhost waits in openat")
        code, said = end(healthy)
        assert code == 0, said
        assert "provision:" not in said
        assert "done 0" in said


def test_options_are_checked_before_anything_is_started(work: Path) -> None:
    for options, message in (
        (words("fifo", after="soon"), "invalid --stall-after soon: expected seconds"),
        (words("fifo", "--on-stall", "restart"), "--on-stall restart: all ranks are started again by --max-restarts N alone"),
    ):
        done = provision(*options)
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.slow
def test_a_stall_is_recorded_shown_in_the_status_and_its_end_is_said(work: Path) -> None:
    with running(*words("fifo")) as run:
        run.wait_for("provision: the job has stalled since")
        folder = max(paths.runs().glob("2*"))
        record = folder / "stalls.json"
        assert record.stat().st_mode & 0o777 == 0o600
        shown = provision("status", "localhost").stdout
        assert f"→ provision doctor --job {folder.name}" in shown
        assert "stalled since" in shown
        (work / "data").open("w").close()  # somebody writes at last
        run.wait_for("provision: the job goes on, after ")
        code, said = end(run)
        assert code == 0, said
        (stall,) = json.loads(record.read_text())["stalls"]
        assert stall["verdict"]["suspects"] == [1]
        assert stall["seconds"] > 2


@pytest.mark.slow
def test_a_rank_that_is_late_is_recorded_and_shown_while_the_job_runs(work: Path) -> None:
    """In each step rank 1 computes for three times as long as rank 0."""
    with running(*words("uneven", after="4", seconds=60)) as run:
        run.wait_for("ready 0")
        record = max(paths.runs().glob("2*")) / "stalls.json"
        wait_until(record.exists)
        shown = provision("status", "localhost").stdout
        run.process.send_signal(2)
        _, said = end(run)
    (late,) = json.loads(record.read_text())["stragglers"]
    assert (late["rank"], late["host"], late["by"], late["seconds"]) == (1, "localhost", "itself", None), late
    assert late["cause"] in ("cpu", "ready"), "the latter where this machine has more to do"
    assert f"\n  {late['said']}\n" in shown
    assert "is late" not in said, "a job is not disturbed"
    written = Path(provision("runs", "report", record.parent.name).stdout.strip())
    assert "Ranks that were late" in written.read_text()


@pytest.mark.slow
def test_the_ranks_of_a_stalled_job_are_started_again(work: Path) -> None:
    with running(*words("fifo_once", "--on-stall", "restart", "--max-restarts", "1")) as run:
        code, said = end(run)
    assert code == 0, said
    assert "all ranks are started again (1 of 1)" in said
    assert said.count("ready 0") == 2
    with running(*words("fifo", "--on-stall", "restart", "--max-restarts", "1")) as run:
        code, said = end(run)
    assert code == 124, said
    assert "the job has stalled, and was ended (--on-stall restart)" in said


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["evaluation", "uneven", "compiles", "sleeps", "busy_threads"])
def test_healthy_jobs_raise_no_alarm(work: Path, shape: str) -> None:
    with running(*words(shape, after="3", seconds=25)) as run:
        code, said = end(run)
    assert code == 0, said
    assert "provision:" not in said


@pytest.mark.slow
def test_ctrl_c_during_an_examination_ends_the_job_and_leaves_nothing(work: Path) -> None:
    with running(*words("fifo")) as run:
        run.wait_for("ready 1")
        wait_until(lambda: any(b"'stall.py'" in each for each in command_lines()))
        run.process.send_signal(2)
        code, said = end(run)
        assert code == 130
        assert "nothing of this run is left running" in said


@pytest.mark.slow
def test_a_rank_on_another_host_is_named(ready_sandbox: Callable[[str], Sandbox], work: Path) -> None:
    cluster = ready_sandbox("stalls")
    for launcher in ("mpi", "own"):
        options = ["--launcher", launcher, "--hosts", str(cluster.inventory), "--stall-after", "3", "--on-stall", "kill"]
        with running("run", *options, "python", "watched_job.py", "fifo", "0") as run:
            code, said = end(run)
        assert code == 124, said
        assert re.search(
            rf"has stalled since \S+: rank 3 on node2 waits in \S+ .*at watched_job.py:{STANDS}; the other 3 ranks wait", said
        ), said
        for shape in ("evaluation", "uneven"):
            with running("run", *options, "python", "watched_job.py", shape, "15") as run:
                code, said = end(run)
            assert code == 0, said
            assert "provision:" not in said


def command_lines() -> Iterator[bytes]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            yield (folder / "cmdline").read_bytes()
