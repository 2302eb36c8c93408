"""Never a silent hang, never an error without a name: disagreement, death, absence, departure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow_but_last
from collective_core.observe import timeline_file
from conftest import LAUNCH_LIMIT, find_mpirun

WORKERS = Path(__file__).parent / "workers"

#: Seconds in which a death must be noticed.
NOTICE = 2.0


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((3, 1), (10, 10), (4, 2)))
def test_disagreement_is_reported_on_every_rank_and_survived(launch, n, hosts):
    reports = launch("disagree.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))
    assert all(entry.get("done") for entry in reports.values())


@pytest.mark.parametrize(
    ("n", "hosts", "victim", "phase"),
    slow_but_last(
        (3, 1, 2, "waiting"),
        (3, 1, 0, "busy"),
        (3, 1, 1, "arena"),
        (4, 2, 1, "arena"),
        (4, 2, 3, "waiting"),
        (3, 3, 0, "waiting"),
        (2, 2, 0, "busy"),
        (5, 5, 2, "busy"),
        (10, 10, 4, "waiting"),
        (10, 9, 1, "busy"),
        (4, 2, 2, "busy"),
    ),
)
def test_a_killed_rank_is_named_within_two_seconds(launch, n, hosts, victim, phase):
    reports = launch("killed.py", n, hosts, [str(victim), phase], keep_going=True).reports()
    assert set(reports) == set(range(n))
    dead = reports.pop(victim)
    for entry in reports.values():
        assert entry["kind"] == "peer_lost"
        assert entry["raised_at"] - dead["dies_at"] < NOTICE
        assert entry["untouched"]
        assert entry["ranks"] == [victim]
        assert f"rank {victim} (host " in entry["error"]
        assert f"pid {dead['pid']}" in entry["error"]
        assert ("barrier 'alive'" if phase == "waiting" else "allreduce 'gradient' (float32[4000000])") in entry["error"]
        assert "stopped after an earlier failure" in entry["again"]


def test_who_waits_for_a_rank_that_leaves_is_told_why_it_does(launch):
    reports = launch("lost_elsewhere.py", 3, 2, keep_going=True).reports()
    assert set(reports) == {0, 1}
    for rank, operation in ((0, "allreduce 'of two' (float64[3])"), (1, "barrier 'of all'")):
        entry = reports[rank]
        assert entry["kind"] == "peer_lost"
        assert entry["ranks"] == [2]
        assert f"{operation}: rank 2 (host " in entry["error"]
        assert f"pid {entry['dead']}" in entry["error"]


@pytest.mark.parametrize(("n", "hosts", "absent"), slow_but_last((3, 1, [1]), (4, 1, [1, 3]), (4, 2, [3]), (10, 10, [3, 8]), (4, 2, [2])))
def test_absent_ranks_are_named_after_the_timeout(launch, n, hosts, absent):
    outcome = launch("stalled.py", n, hosts, [str(r) for r in absent], env={"COLLECTIVE_TIMEOUT": "4"}, keep_going=True)
    reports = outcome.reports()
    assert set(reports) == set(range(n))
    for rank in set(range(n)) - set(absent):
        entry = reports[rank]
        assert entry["kind"] == "timeout"
        assert entry["ranks"] == absent
        assert 3.9 < entry["waited"] < 6.8
        assert "allreduce 'loss' (float32[10])" in entry["error"]
        for rank_absent in absent:
            assert f"rank {rank_absent} (host " in entry["error"]
            assert f"pid {reports[rank_absent]['pid']}" in entry["error"]
    for rank in absent:
        assert reports[rank]["kind"] == "timeout", "a rank that comes too late learns that it did"


@pytest.mark.slow
@pytest.mark.parametrize(("n", "victim"), [(2, 0), (4, 2)])
def test_a_host_that_stops_in_the_middle_of_an_allreduce_is_named_by_the_others(launch, n, victim):
    outcome = launch("stopped.py", n, n, [str(victim), "inside"], env={"COLLECTIVE_TIMEOUT": "2"}, keep_going=True)
    reports = outcome.reports()
    pid = reports.pop(victim)["pid"]
    assert len(reports) == n - 1
    for entry in reports.values():
        assert entry["kind"] == "timeout"
        assert entry["ranks"] == [victim]
        assert entry["waited"] < 4.8
        assert f"allreduce 'gradient' (float32[16000000]): no word from rank {victim} (host " in entry["error"]
        assert f"pid {pid})" in entry["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "hosts", "victim"), [(2, 1, 0), (4, 2, 1)])
def test_a_rank_that_a_signal_has_stopped_for_good_is_named_by_the_others_of_its_host(launch, n, hosts, victim):
    """Under a launcher of others, here mpirun; ours end it before that. COLLECTIVE_TIMEOUT is 30 minutes."""
    reports = launch("stopped.py", n, hosts, [str(victim), "before"], keep_going=True, limit=300).reports()
    pid = reports.pop(victim)["pid"]
    assert len(reports) == n - 1
    for entry in reports.values():
        assert (entry["kind"], entry["ranks"]) == ("peer_lost", [victim])
        assert entry["waited"] > 50.0, "what it was stopped before does not count"
        assert "allreduce 'gradient'" in entry["error"]
        assert f"rank {victim} (host " in entry["error"]
        assert f"pid {pid}) has been stopped by a signal for a minute (kill -CONT would have continued it)" in entry["error"]


@pytest.mark.slow
def test_a_program_that_catches_a_stall_and_shuts_down_has_succeeded(launch):
    reports = launch("survives_stall.py", 2, env={"COLLECTIVE_TIMEOUT": "2"}).must_succeed().reports()
    assert {entry["kind"] for entry in reports.values()} == {"timeout"}


def repeated_if_slow(start):
    """A busy machine may be late to answer Ctrl-C, but hardly three times."""
    for _ in range(3):
        reports = start()
        if reports[0]["waited"] < 1:
            break
    return reports


@pytest.mark.parametrize("case", slow_but_last("prepared", "barrier", "allgather", "join", "queued", "allreduce"))
def test_ctrl_c_ends_a_blocking_operation_and_the_others_are_told_whose(launch, case):
    reports = repeated_if_slow(lambda: launch("interrupted.py", 2, 1, [case], keep_going=True, limit=60).reports())
    assert reports[0]["waited"] < 1, "it took effect when the operation ended"
    assert (reports[1]["kind"], reports[1]["ranks"]) == ("peer_lost", [0])
    assert "rank 0 (host " in reports[1]["error"]
    assert "interrupted" in reports[1]["error"]


@pytest.mark.parametrize(("n", "hosts", "waiting"), slow_but_last((2, 1, 0), (4, 2, 0), (4, 2, 3)))
def test_ctrl_c_is_answered_within_a_second_wherever_a_program_waits(launch, n, hosts, waiting):
    reports = launch("interrupted_waits.py", n, hosts, [str(waiting)]).must_succeed().reports()
    answers = reports.pop(waiting)["found"]
    assert len(answers) == 10
    assert max(answers.values()) < 1, answers
    assert len(reports) == n - 1
    for report in reports.values():
        assert report["found"] == {name: ["peer_lost", [waiting]] for name in answers}


@pytest.mark.parametrize("case", slow_but_last("leaves-allgather", "leaves-queued", "leaves-allreduce"))
def test_a_signals_handler_may_leave_the_job_and_end_the_program_inside_an_operation(launch, case):
    reports = launch("signal_handlers.py", 2, 1, [case], keep_going=True, limit=60).reports()
    assert reports[0]["code"] == 5
    assert reports[0]["waited"] < 10
    assert (reports[1]["kind"], reports[1]["ranks"]) == ("peer_lost", [0])


@pytest.mark.slow
def test_a_signals_handler_that_waits_for_another_operation_is_refused_and_the_program_still_gets_it(launch):
    reports = launch("signal_handlers.py", 2, 1, ["waits"], limit=60).must_succeed().reports()
    assert reports[0]["seen"] == ["invalid"]
    assert reports[0]["results"] == reports[1]["results"] == [[1.0] * 10] * 2


def test_a_signals_handler_that_lets_its_refusal_through_ends_the_operation_as_ctrl_c_does(launch):
    outcome = launch("signal_handlers.py", 2, 1, ["is-refused"], keep_going=True, limit=60)
    reports = outcome.reports()
    assert (reports[0]["kind"], reports[0]["has_ended_engine"]) == ("invalid", True)
    assert (reports[1]["kind"], reports[1]["ranks"]) == ("peer_lost", [0])


def test_a_signals_handler_may_ask_the_engine_while_ranks_connect(launch):
    reports = launch("signal_handlers.py", 2, 1, ["starts"], limit=60).must_succeed().reports()
    assert reports[0]["seen"] == ["released"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_wait_for_ranks_that_do_not_come(rank, tmp_path):
    store = {"COLLECTIVE_RANK": str(rank), "COLLECTIVE_SIZE": "2", "COLLECTIVE_STORE": f"local:{tmp_path.name}-{os.getpid()}"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "COLLECTIVE_"))}
    program = [sys.executable, str(WORKERS / "interrupted.py"), "init"]

    def started():
        done = subprocess.run(program, env={**kept, **store}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return {0: json.loads(done.stdout.removeprefix("REPORT "))}

    assert repeated_if_slow(started)[0]["waited"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((10, 9), (4, 2)))
def test_a_rank_that_its_late_leader_waits_for_is_named_by_all(launch, n, hosts):
    reports = launch("late_leader.py", n, hosts, env={"COLLECTIVE_TIMEOUT": "4"}, keep_going=True).reports()
    assert set(reports) == set(range(n))
    for rank in set(range(n)) - {1}:
        assert (reports[rank]["kind"], reports[rank]["ranks"]) == ("timeout", [1]), reports[rank]


def test_a_rank_that_exits_alone_under_a_timeline_waits_for_nobody(launch, tmp_path):
    outcome = launch("exits_alone.py", 2, 1, [str(tmp_path / "timeline.json")])
    assert set(outcome.reports()) == {0, 1}
    assert outcome.returncode == 3
    assert "timeline: rank 1 leaves " in outcome.stderr


def test_a_rank_that_was_killed_holds_up_no_end_under_a_timeline(launch, tmp_path):
    """Nor is MPI told to end in good order, which would wait for the dead rank."""
    outcome = launch("exits_alone.py", 2, 1, [str(tmp_path / "timeline.json"), "killed"], keep_going=True, limit=60)
    assert set(outcome.reports()) == {0, 1}
    assert "timeline: not all ranks came to its end: " in outcome.stderr
    assert "timeline: rank 0 leaves " in outcome.stderr
    assert outcome.reports()[0]["ends_mpi_with_the_others"] is False


#: Stands for what notes how a rank ends. mpirun's signal reaches both.
NOTES = 'trap : TERM; "$0" "$@"; code=$?; echo $code > $FOLDER/$OMPI_COMM_WORLD_RANK; exit $code'


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_waits_at_its_end_and_is_ended_by_mpirun_has_its_own_exit_code(tmp_path, code):
    options = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-np", "2", "-x", "FOLDER"]
    options += ["--mca", "odls_base_sigkill_timeout", "3"]
    worker = [sys.executable, str(WORKERS / "leaves.py"), str(code)]
    environment = {**os.environ, "FOLDER": str(tmp_path)}
    done = subprocess.run(
        [find_mpirun(), *options, "sh", "-c", NOTES, *worker], env=environment, capture_output=True, text=True, timeout=LAUNCH_LIMIT
    )
    assert done.returncode == 1, done.stderr
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(2)] == [str(code), "1"]


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((3, 1), (3, 3)))
def test_a_rank_that_shut_down_is_named(launch, n, hosts):
    reports = launch("leaving.py", n, hosts, keep_going=True).reports()
    assert set(reports) == set(range(n - 1))
    for entry in reports.values():
        assert entry["kind"] == "peer_lost"
        assert entry["ranks"] == [n - 1]
        assert "shut its engine down" in entry["error"]


@pytest.mark.parametrize(("n", "hosts", "timeline"), slow_but_last((2, 1, False), (2, 1, True), (4, 2, True)))
def test_a_crash_with_something_under_way_ends_the_job_at_once(launch, tmp_path, n, hosts, timeline):
    path = tmp_path / "timeline.json"
    outcome = launch("crashing.py", n, hosts, [str(path)] if timeline else [], keep_going=True)
    reports = outcome.reports()
    for rank in range(1, n):
        assert reports[rank]["gone"], "the crashed rank waited for what it had under way, or for the others' timeline"
        assert reports[rank]["kind"] == "peer_lost"
        assert reports[rank]["ranks"] == [0], reports[rank]["error"]
        assert reports[rank]["waited"] < NOTICE
    assert "the program's own mistake" in outcome.stderr
    files = {file.name for file in tmp_path.iterdir()}
    assert files == ({f"timeline.json.rank{rank:04d}.events" for rank in range(n)} if timeline else set())
    for rank in range(n if timeline else 0):
        part = timeline_file.read(timeline_file.path_of(str(path), rank))
        assert part.head.rank == rank
        assert "before" in {event.name for event in part.events}


@pytest.mark.parametrize("case", slow_but_last("wrong-member", "forgotten", "interrupted"))
def test_operations_that_nobody_waits_for_keep_their_memory(launch, case):
    reports = launch("in_flight.py", 2, 1, [case]).must_succeed().reports()
    assert set(reports) == {0, 1}


def test_a_mismatch_in_a_thread_is_found_before_the_timeout_ends_the_engine(launch):
    reports = launch("threads_alone.py", 2, 1, env={"COLLECTIVE_TIMEOUT": "16", "COLLECTIVE_STALL_WARNING": "0"}).must_succeed().reports()
    assert [report["kinds"] for report in reports.values()] == [["mismatch"]] * 2
    assert {report["then"] for report in reports.values()} == {2.0}


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 3)))
def test_threads_may_bring_operations_in_any_order_and_hear_of_disagreements(launch, n, hosts):
    outcome = launch("several_threads.py", n, hosts).must_succeed()
    assert set(outcome.reports()) == set(range(n))
    said = "in allreduce 'busy of rank 1' (float32[2]): the ranks ask for different things: rank 0 (host "
    assert said in outcome.stderr, outcome.stderr
