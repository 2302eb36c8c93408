"""Verdicts on examinations of jobs, recorded of `tests/integration/stalled_job.py` in `tests/data/stalls`, and how they are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from provision.base.errors import ProvisionError
from provision.cli.main import app
from provision.doctor.stall import examination, judgement
from provision.doctor.stall.model import Document, HostAnswer, Rank, Verdict
from provision.survey.document import parse_answer

DATA = Path(__file__).parents[2] / "data/stalls"
_C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
BEGIN, END = "===PROVISION-STALL-BEGIN===", "===END==="


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


def ranks(data: list[dict[str, Any]]) -> list[Rank]:
    return TypeAdapter(list[Rank]).validate_json(json.dumps(data))


def judged(data: list[dict[str, Any]], host: str = "node1") -> Verdict:
    (verdict,) = judgement.judge({host: ranks(data)})
    return verdict


def first_thread(rank: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = rank["processes"][0]["threads"][0]
    return found


@pytest.mark.parametrize(
    ("shape", "state", "kind", "said"),
    [
        ("fifo", "stalled", "file", "waits in openat of /data/fifo on ext4 "),
        ("full_pipe", "stalled", "file", "waits in write of pipe:"),
        ("stopped", "stalled", "stopped", "is stopped"),
        ("two_locks", "stalled", "lock", "waits for a lock in"),
        ("file_lock", "stalled", "lock", ", which process "),
        ("child", "stalled", "child", "for a process that it has started: process "),
        ("loader", "stalled", "loader", "which waits in openat of /data/fifo on ext4 "),
        ("backward", "stalled", "sleep", "sleeps"),
        ("endless", "works", "busy", "is at work"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_with_its_line(shape: str, state: str, kind: str, said: str) -> None:
    data = recorded(shape)
    verdict = judged(data["ranks"])
    assert (verdict.state, verdict.suspects) == (state, [1])
    assert verdict.places[1].kind == kind
    assert verdict.said.startswith("rank 1 on node1 ")
    assert said in verdict.said
    # The endless loop has two lines.
    expected = {0: data["stands"]["0"][-1], 1: data["stands"]["1"][-1], 2: data["stands"]["2"][-1]}
    for place in verdict.places:
        file, line = expected[place.rank].split(":")
        assert place.line in (f"{file}:{line}", f"{file}:{int(line) - (shape == 'endless')}")
    assert "the other 2 ranks wait for it" in verdict.said
    assert verdict.steps


def test_a_rank_that_waits_for_a_thread_at_work_is_at_work_however_little_it_gets_of_a_core() -> None:
    data = recorded("two_locks")["ranks"]
    for thread in data[1]["processes"][0]["threads"][1:]:
        thread.update(busy=0.2, state="R")
    assert judged(data).state == "works"


def started_by_rank_1(data: list[dict[str, Any]], shape: str) -> dict[str, Any]:
    """The thread of a process that the last one of rank 1 has started."""
    processes = data[1]["processes"]
    thread = {"tid": 99, "state": "S", "call": "wait4" if shape == "child" else "read"}
    processes.append({"pid": 99, "parent": processes[-1]["pid"], "threads": [thread]})
    return thread


@pytest.mark.parametrize("shape", ["child", "loader", "two_locks"])
@pytest.mark.parametrize(
    "of_thread",
    [
        {"busy": 0.9},
        {"busy": 0.2, "state": "R"},
        {"switches": 60},
        {"switches": 60, "call": "poll", "target": "socket:[7]", "peer": "10.0.0.9:443"},
    ],
)
def test_a_rank_whose_processes_are_at_work_is_at_work(shape: str, of_thread: dict[str, Any]) -> None:
    """A compiler that a shell has started, a worker of several, a pool of processes, a download."""
    data = recorded(shape)["ranks"]
    thread = started_by_rank_1(data, shape)
    assert judged(data).state == "stalled"
    thread.update(of_thread)
    assert (judged(data).state, judged(data).suspects) == ("works", [1])


LOOKS = [
    {"call": "futex"},
    {"call": "clock_nanosleep"},
    {"call": "poll", "target": "pipe:[7]"},
    {"call": "poll", "target": "socket:[7]", "peer": "0.0.0.0:0"},
    {"call": "epoll_wait", "target": "socket:[7]", "peer": "[::]:0"},
    {"call": "", "waits_in": "futex_do_wait"},
]


@pytest.mark.parametrize("shape", ["child", "loader", "two_locks"])
@pytest.mark.parametrize("of_thread", LOOKS)
def test_a_process_that_looks_again_and_again_is_not_at_work(shape: str, of_thread: dict[str, Any]) -> None:
    data = recorded(shape)["ranks"]
    started_by_rank_1(data, shape).update(of_thread, switches=60)
    assert judged(data).state == "stalled"


RECEIVES = {"call": "recvfrom", "target": "socket:[7]", "peer": "10.0.0.9:443"}


@pytest.mark.parametrize(
    ("of_thread", "state"),
    [
        ({**RECEIVES, "switches": 30}, "works"),
        ({**RECEIVES, "switches": 30, "call": "poll"}, "works"),
        ({"call": "read", "target": "/data/x on nfs4 fs1:/data", "switches": 30}, "works"),
        (RECEIVES, "stalled"),
        *(({**each, "switches": 60}, "stalled") for each in LOOKS),
    ],
)
@pytest.mark.parametrize(
    "frames", [[], [{"name": "load", "file": "/x/train.py", "line": 3}], [{"name": "f", "file": "/lib/python3.11/x.py", "line": 3}]]
)
def test_a_rank_that_waits_for_a_thread_that_gets_data_is_at_work(of_thread: dict[str, Any], state: str, frames: list[Any]) -> None:
    """Of the program, of a library, or native. One that looks again and again, as a watchdog does, hides no stall."""
    data = recorded("two_locks")["ranks"]
    data[1]["processes"][0]["threads"].append({"tid": 99, "state": "S", "frames": frames, **of_thread})
    assert (judged(data).state, judged(data).suspects) == (state, [1])


def test_a_native_thread_that_spins_hides_no_stall() -> None:
    data = recorded("two_locks")["ranks"]
    data[1]["processes"][0]["threads"].append({"tid": 99, "state": "R", "busy": 0.9, "switches": 700})
    assert judged(data).state == "stalled"


@pytest.mark.parametrize(
    "serves",
    [
        {"call": "accept4", "target": "socket:[7]", "peer": "0.0.0.0:0"},
        {"call": "accept4", "target": "socket:[7]"},  # of Unix, or in a network namespace that may not be read
        {"call": "poll", "target": "socket:[7]", "peer": "0.0.0.0:0"},
        {"call": "poll", "target": "socket:[7]", "peer": "0.0.0.0:0", "switches": 60},
        {"call": "epoll_wait", "target": "socket:[7]", "peer": "[::]:0"},
        {"call": "", "waits_in": "inet_csk_accept"},
    ],
)
def test_a_server_of_several_ranks_that_nobody_asks_has_not_stalled(serves: dict[str, Any]) -> None:
    """Rank 0 waits for clients, the others for what it sends them, in a collective operation or asleep."""
    stack = [{"name": "serve", "file": "/x/serve.py", "line": 9}]
    for shape in ("order", "backward", "two_locks"):
        data = recorded(shape)["ranks"]
        assert judged(data).state == "stalled"
        first_thread(data[0]).update(frames=stack, **serves)
        assert (judged(data).state, judged(data).suspects) == ("works", []), shape
        assert "for a client at serve.py:9" in judged(data).said
    for shape in ("fifo", "stopped", "never_joins", "file_lock"):  # and these are no part of that
        data = recorded(shape)["ranks"]
        first_thread(data[0]).update(**{"frames": stack, "busy": 0, "switches": 0, **serves})
        assert judged(data).state == "stalled", shape


def test_a_thread_that_has_the_other_lock_is_in_the_evidence() -> None:
    (place,) = [each for each in judged(recorded("two_locks")["ranks"]).places if each.rank == 1]
    assert any(line.startswith("thread ") and "waits for a lock" in line for line in place.evidence)


def test_ranks_that_wait_in_different_operations_are_a_disagreement_of_the_fewest() -> None:
    verdict = judged(recorded("order")["ranks"])
    assert (verdict.state, verdict.suspects) == ("stalled", [1])
    assert "rank 1 on node1 waits for other ranks in broadcast" in verdict.said
    assert "ranks 0,2 on node1 wait for other ranks in all_reduce" in verdict.said
    two = judged(recorded("order")["ranks"][:2])
    assert two.suspects == [2]  # of a job of three ranks one is not there


def test_of_two_ranks_that_disagree_each_may_be_wrong() -> None:
    data = recorded("order")["ranks"][:2]
    for rank in data:
        rank["ranks"] = rank["local"] = 2
    assert judged(data).suspects == [0, 1]


def test_a_rank_that_has_ended_is_told_from_one_on_another_host() -> None:
    data = recorded("never_joins")["ranks"]
    verdict = judged(data)
    assert (verdict.state, verdict.suspects, verdict.missing) == ("stalled", [1], [1])
    assert verdict.said.startswith("rank 1 has ended; the other 2 ranks wait for it in init_process_group at stalled_job.py:")
    for rank in data:
        first_thread(rank).update(call="connect", switches=900)  # it looks again and again, and is seen at it
    assert judged(data).state == "stalled"
    for rank in data:
        rank["local"] = 2  # its launcher has started two here, and these are there
    assert judged(data).said.startswith("rank 1 cannot be found on these hosts: ended, or on another host; ")


def test_jobs_that_meet_at_the_loopback_of_their_hosts_are_apart() -> None:
    fifo, quick = ([{**rank, "job": "RANK none 127.0.0.1 29500"} for rank in recorded(name)["ranks"]] for name in ("fifo", "quick"))
    assert sorted(each.state for each in judgement.judge({"node1": ranks(fifo), "node2": ranks(quick)})) == ["moves", "stalled"]


def test_a_program_in_a_checkout_of_a_library_is_not_that_library() -> None:
    data = recorded("fifo")["ranks"]
    for rank in data:
        for frame in first_thread(rank)["frames"]:
            frame["file"] = frame["file"].replace("stalled_job.py", "horovod/examples/collective_core/train.py")
    assert judged(data).places[1].kind == "file"


def test_without_workers_a_loader_is_where_its_data_set_is() -> None:
    data = recorded("fifo")["ranks"]
    loader = "/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    first_thread(data[1])["frames"][1:1] = [{"name": name, "file": loader, "line": 7} for name in ("_next_data", "__next__")]
    assert judged(data).places[1].kind == "file"


def test_ranks_in_different_operations_of_the_engine_at_one_line_disagree() -> None:
    data = recorded("order")["ranks"]
    for rank, running in zip(data, ("allreduce 'loss'", "allreduce 'accuracy' of process set 1", "allreduce 'loss'"), strict=True):
        first_thread(rank)["frames"] = first_thread(data[0])["frames"]
        rank["processes"][0]["operations"] = running
    verdict = judged(data)
    assert verdict.suspects == [1]
    assert "rank 1 on node1 waits for other ranks in allreduce 'accuracy' of process set 1 at " in verdict.said


def test_ranks_that_wait_for_their_neighbours_at_one_line_do_not_disagree() -> None:
    data = recorded("order")["ranks"]
    for number, rank in enumerate(data):
        stack = [{"name": "main", "file": "/x/ring.py", "line": 3}]
        first_thread(rank).update(frames=stack, call="recvfrom", target="socket:[1]", peer=f"10.0.0.{number}:29500")
    verdict = judged(data)
    assert verdict.said.startswith("ranks 0-2 on node1 wait in recvfrom")
    assert "different operations" not in verdict.said


def test_a_rank_at_fault_is_named_before_those_of_hosts_that_were_not_examined() -> None:
    data = recorded("fifo")["ranks"]
    for rank in data:
        rank["ranks"] = 8
    verdict = judged(data)
    assert (verdict.suspects, verdict.missing) == ([1], [3, 4, 5, 6, 7])
    assert verdict.said.startswith("rank 1 on node1 waits in openat")
    assert verdict.said.endswith("; ranks 3-7 cannot be found on these hosts")


@pytest.mark.parametrize(("shape", "state"), [("quick", "moves"), ("long_steps", "works")])
def test_a_healthy_job_is_not_stalled(shape: str, state: str) -> None:
    verdict = judged(recorded(shape)["ranks"])
    assert verdict.state == state
    if state == "moves":
        assert (verdict.suspects, verdict.steps) == ([], [])


def test_where_all_wait_at_one_place_the_network_or_the_shape_is_left() -> None:
    data = [rank for rank in recorded("fifo")["ranks"] if rank["rank"] != 1]
    for rank, number in zip(data, range(2), strict=True):
        rank.update(rank=number, ranks=2, local=2)
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("stalled", [])
    assert "none is elsewhere: another shape on one of them, or the network" in verdict.said
    line = "10.0.0.1:5 to 10.0.0.2:6, established, 8192 bytes not acknowledged"
    data[0]["processes"][0]["unanswered"] = [line]
    data[1]["processes"][0]["operations"] = "allreduce 'what comes next'"  # its end has got everything
    for rank in data:
        rank["local"] = 1
    (verdict,) = judgement.judge({"node1": ranks(data[:1]), "node2": ranks(data[1:])})
    assert (verdict.state, verdict.suspects) == ("stalled", [])
    assert f"the network loses what rank 0 on node1 sends, or the answers: {line}" in verdict.said


def test_ranks_that_wait_in_mpi_spin_and_that_is_no_progress() -> None:
    """On a busy machine with more ranks than cores: each gives its core away again and again."""
    data = recorded("backward")["ranks"]
    for rank in data:
        if rank["rank"] != 1:
            frames = [{"name": "opal_progress", "file": "/lib/libopen-pal.so.40", "line": 0}, {"name": "PMPI_Barrier", "file": "mpi.so"}]
            first_thread(rank).update(busy=0.2, switches=700, call="", frames=[*frames, {"name": "main", "file": "/x/mpi.py", "line": 9}])
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("stalled", [1])
    assert "the other 2 ranks wait for it in PMPI_Barrier at mpi.py:9" in verdict.said
    alone = [{**rank, "rank": at, "ranks": 2, "local": 2} for at, rank in enumerate([data[0], data[2]])]
    assert judged(alone).state == "works"  # all are in one operation, in which they may well go on


def test_our_engine_looks_again_and_again_and_that_is_no_progress() -> None:
    data = recorded("fifo")["ranks"]
    engine = {"name": "run", "file": "/venv/lib/python3.11/site-packages/collective_core/_native.py", "line": 416}
    for rank in data:
        if rank["rank"] != 1:
            stack = [engine, {"name": "allreduce", "file": engine["file"], "line": 9}, {"name": "main", "file": "/x/train.py", "line": 3}]
            first_thread(rank).update(frames=stack, call="futex", busy=0.0, switches=157)
    assert (judged(data).state, judged(data).suspects) == ("stalled", [1])
    first_thread(data[0])["busy"] = 0.3
    assert judged(data).state == "moves"


def test_ranks_that_keep_nobody_waiting_have_not_stalled() -> None:
    """All sleep; or the only one waits for a client."""
    data = recorded("fifo")["ranks"]
    for rank in data:
        first_thread(rank).update(frames=[{"name": "time_sleep", "file": "", "line": 0}], call="clock_nanosleep", target="")
    assert judged(data).state == "works"
    server = {**data[0], "rank": 0, "ranks": 1, "local": 1}
    first_thread(server).update(frames=[], call="accept4", target="socket:[7]")
    assert judged([server]).state == "works"
    first_thread(server).update(call="read", target="/data/x on nfs4 fs1:/data")
    assert judged([server]).state == "stalled"


def test_without_stacks_what_the_kernel_says_counts() -> None:
    """As an unprivileged user without ptrace: neither stacks nor system calls."""
    data = recorded("fifo")["ranks"]
    for rank in data:
        rank["processes"][0]["no_stacks"] = "ptrace is refused"
        for thread in rank["processes"][0]["threads"]:
            thread.update(frames=[], call="", target="", waits_in="wait_for_partner" if rank["rank"] == 1 else "futex_do_wait")
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("stalled", [1])
    assert verdict.said == (
        "rank 1 on node1 waits in wait_for_partner; the other 2 ranks wait for it in futex_do_wait, for what cannot be read"
    )
    assert all("no stack: ptrace is refused" in place.evidence for place in verdict.places)


def test_the_newest_job_comes_first() -> None:
    older, newer = recorded("fifo")["ranks"], recorded("stopped")["ranks"]
    for rank in older:
        rank.update(began=1, job="a")
    for rank in newer:
        rank.update(began=2, job="b")
    assert [each.job for each in judgement.judge({"node1": ranks(older), "node2": ranks(newer)})] == ["b", "a"]


def answer_of(data: list[dict[str, Any]], **more: object) -> HostAnswer:
    return parse_answer(HostAnswer, f"{BEGIN}\n{json.dumps({'ranks': data, **more})}\n{END}", BEGIN, "the examination")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rank": -1}, "a rank below 0"),
        ({"ranks": 10**9}, "more ranks than there can be"),
        ({"processes": []}, "no process"),
        ({"processes": [{"pid": 1, "threads": [{"tid": 1, "busy": float("nan")}]}]}, "no number"),
        ({"processes": [{"pid": 1, "threads": [{"tid": 1}] * 49}]}, "a flood of threads"),
        ({"processes": [{"pid": 1, "threads": [{"tid": 1, "frames": [{"name": "a" * 601, "file": ""}]}]}]}, "a long name"),
    ],
)
def test_an_answer_that_no_host_gives_is_refused(change: dict[str, Any], what: str) -> None:
    data = recorded("fifo")["ranks"]
    answer_of(data)
    data[0].update(change)
    with pytest.raises(ProvisionError, match="invalid answer"):
        answer_of(data)


def run(monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict], *arguments: str, failed: dict[str, str] | None = None) -> tuple[int, str]:
    monkeypatch.setattr(examination, "of_processes", lambda _: Document(jobs=verdicts, failed=failed or {}))
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "arguments", [("--job", "4711"), ("job", "4711"), ("4711", "--job"), ("--job", "4711,4712"), ("--job", "4711", "4712,"), ("--job",)]
)
def test_the_paragraph_comes_first_then_evidence_then_steps(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    code, printed = run(monkeypatch, [judged(recorded("stopped")["ranks"])], *arguments)
    lines = printed.splitlines()
    assert code == 1
    assert lines[0].startswith("rank 1 on node1 is stopped at stalled_job.py:")
    assert lines[2] == lines[0].split(";")[0]  # the suspect's group is the first
    assert "  processor: 0 % of a core, 0 switches" in lines
    assert lines[-1].startswith("→ kill -CONT ")


@pytest.mark.parametrize(("shape", "code"), [("quick", 0), ("long_steps", 0), ("fifo", 1)])
def test_the_document_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, shape: str, code: int) -> None:
    status, printed = run(monkeypatch, [judged(recorded(shape)["ranks"])], "--job", "4711", "--json")
    document = json.loads(printed)
    assert status == code
    assert document["schema"] == 1
    assert document["jobs"][0]["places"][1]["line"].startswith("stalled_job.py:")


def test_hosts_that_could_not_be_examined_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run(monkeypatch, [], "--job", failed={"node2": "no route"})
    assert code == 2
    assert "node2: not examined: no route" in printed


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("999999999", "no such process: 999999999"),
        ("999999999999", "no such process: 999999999999"),
        ("20261129-204428-abc1234", "no such run here, or its run.json is damaged: 20261129-204428-abc1234"),
        ("20261129-204428-abc1235", "its run.json is damaged: 20261129-204428-abc1235"),
        ("nowhere.ini", "nowhere.ini"),
    ],
)
def test_wrong_targets_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    damaged = tmp_path / "runs/20261129-204428-abc1235/run.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"run": ')
    result = CliRunner().invoke(app, ["doctor", "--job", target])
    assert isinstance(result.exception, ProvisionError)
    assert result.exception.exit_code == 2
    assert said in str(result.exception)


def test_text_of_a_process_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job's owner can choose: names of threads, functions and files."""
    attack = "a\x1b[2J\nprovision: all is well {{ x }} [bold]\u202e"
    data = recorded("fifo")["ranks"]
    for rank in data:
        for thread in rank["processes"][0]["threads"]:
            thread.update(name=attack, target=f"/data/{attack}")
            for frame in thread["frames"]:
                frame.update(name=attack, file=f"/home/{attack}.py")
    verdict = judgement.judge({"node1": answer_of(data).ranks})
    _code, printed = run(monkeypatch, verdict, "--job", "4711")
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert not any(line.startswith("provision: all") for line in printed.splitlines())
    assert "{{ x" not in printed


def test_a_rank_that_sleeps_until_something_is_there_is_stalled_however_often_it_looks() -> None:
    data = recorded("backward")["ranks"]
    first_thread(data[1]).update(switches=60)
    assert (judged(data).state, judged(data).suspects) == ("stalled", [1])
    first_thread(data[1]).update(busy=0.1)
    assert judged(data).state == "works"


@pytest.mark.parametrize("library", ["tensorflow/python/eager/execute.py", "jax/_src/array.py"])
@pytest.mark.parametrize("is_native", [False, True])
def test_what_a_library_with_threads_of_its_own_does_is_seen_at_these(library: str, is_native: bool) -> None:
    data = recorded("fifo")["ranks"]
    frames = [{"name": "f", "file": f"/x/site-packages/{library}", "line": 9}, {"name": "train", "file": "/x/train.py", "line": 3}]
    frames[:0] = [{"name": "syscall", "file": "/lib/x86_64-linux-gnu/libc.so.6"}] * is_native
    for number in (0, 2):
        first_thread(data[number]).update(
            call="futex", target="", frames=[*frames[:-1], {"name": "f", "file": "<string>", "line": 1}, *frames[-1:]]
        )
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("stalled", [1])
    assert "the other 2 ranks wait for it in futex, for what cannot be read at train.py:3" in verdict.said
    data[2]["processes"][0]["threads"].append({"tid": 99, "state": "R", "busy": 0.9})
    assert (judged(data).places[2].kind, judged(data).suspects) == ("busy", [1])


def test_a_rank_at_a_socket_of_its_own_keeps_those_in_an_operation_waiting() -> None:
    data = recorded("fifo")["ranks"][:2]
    for rank in data:
        rank["ranks"] = 2
    first_thread(data[1]).update(call="connect", target="socket:[7]", peer="10.0.0.9:443")
    assert (judged(data).state, judged(data).suspects) == ("stalled", [1])


@pytest.mark.parametrize(
    ("calls", "said"), [(("PMPI_Send", "MPI_Ssend"), "send, and none receives"), (("PMPI_Recv",) * 2, "receive, and none sends")]
)
def test_ranks_that_all_send_or_all_receive_wait_for_one_another(calls: tuple[str, str], said: str) -> None:
    data = recorded("fifo")["ranks"][:2]
    for rank, call in zip(data, calls, strict=True):
        rank["ranks"] = 2
        frames = [{"name": call, "file": "libmpi.so.40"}, {"name": "swap", "file": "/x/train.py", "line": 9}]
        first_thread(rank).update(call="", target="", state="R", busy=0.9, frames=frames)
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("stalled", [0, 1])
    assert f"all of them {said}" in verdict.said


def test_a_helper_is_named_with_the_line_that_has_called_it() -> None:
    data = recorded("fifo")["ranks"]
    lines = [{"name": "read", "file": "/x/helper.py", "line": 9}, {"name": "train", "file": "/x/train.py", "line": 40}]
    first_thread(data[1])["frames"] = lines
    assert "at helper.py:9, called at train.py:40; the other 2 ranks wait for it" in judged(data).said
    for number in (0, 1):  # from two lines: neither speaks for both
        first_thread(data[number])["frames"] = [lines[0], {**lines[1], "line": 40 + number}]
        first_thread(data[number]).update({key: first_thread(data[1])[key] for key in ("call", "target", "state")})
    assert "called at" not in judged(data).said


def test_ranks_in_operations_of_different_groups_are_told_apart_by_their_callers() -> None:
    data = recorded("fifo")["ranks"]
    for rank in data:
        is_odd = rank["rank"] == 1
        rank["processes"][0]["operations"] = f"allreduce 'x' of process set {3 + is_odd}"
        lines = [{"name": "f", "file": "/x/train.py", "line": line} for line in (9, 40 + is_odd)]
        first_thread(rank).update(call="futex", target="", frames=[{"name": "all_reduce", "file": _C10D, "line": 5}, *lines])
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("stalled", [1])
    assert "rank 1 on node1 waits for other ranks in allreduce 'x' of process set 4 at train.py:9, called at train.py:41" in verdict.said


def test_ranks_that_wait_in_one_function_are_told_apart_by_its_callers() -> None:
    data = recorded("fifo")["ranks"]
    for rank in data:
        lines = [{"name": "f", "file": "/x/train.py", "line": line} for line in (9, 40 + rank["rank"] // 2)]
        first_thread(rank).update(call="recvfrom", target="socket:[7]", peer="10.0.0.9:443", frames=lines)
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == (
        "stalled",
        [2],
    )  # though it may have come there by another way than the others, and rightly
    assert "rank 2 on node1 waits in recvfrom for 10.0.0.9:443 at train.py:9, called at train.py:41" in verdict.said


def test_ranks_without_a_stack_are_not_taken_for_the_cause() -> None:
    data = recorded("fifo")["ranks"]
    for rank in data[1:]:
        first_thread(rank).update(call="recvfrom", target="socket:[7]", peer="10.0.0.9:443", frames=[])
    assert not set(judged(data).suspects) & {1, 2}


@pytest.mark.parametrize("where", ["thread", "native thread", "child"])
def test_a_rank_that_sleeps_while_something_of_it_works_is_at_work(where: str) -> None:
    data = recorded("fifo")["ranks"][:2]
    for rank in data:
        rank["ranks"] = 2
    main = data[1]["processes"][0]
    sleeping = [{"name": "wait", "file": "/x/train.py", "line": 9}]
    first_thread(data[1]).update(call="clock_nanosleep", target="", state="S", busy=0.0, switches=60, frames=sleeping)
    assert judged(data).suspects == [1]
    works = {"tid": 99, "state": "R", "busy": 0.9, "frames": [{"name": "put", "file": "/x/train.py", "line": 30}]}
    if where == "native thread":
        del works["frames"]
    if where != "child":
        main["threads"].append(works)
    else:
        data[1]["processes"].append({"pid": 99, "parent": main["pid"], "threads": [works]})
    assert judged(data).state in ("works", "moves")


SPINS = [{"name": "cuStreamSynchronize", "file": "libcuda.so.1"}, {"name": "cudaStreamSynchronize", "file": "libcudart.so.12"}]


@pytest.mark.parametrize(
    ("operations", "elsewhere", "state", "suspects", "said"),
    [
        (["", "", ""], True, "stalled", [1], "the other 2 ranks wait for it in cuStreamSynchronize"),
        (["", "", ""], False, "works", [], "none is elsewhere"),
        (["all_reduce #7 of dp [8]"] * 3, False, "stalled", [], "wait for other ranks in all_reduce #7 of dp [8] at train.py:9"),
        (["all_reduce #7 of dp [8]"] * 2 + ["all_reduce #7 of dp [9]"], False, "stalled", [2], "rank 2 on node1 waits for other ranks in"),
        (["all_reduce #7 of dp [8]", "all_reduce #6 of dp [8]", "all_reduce #7 of dp [8]"], False, "stalled", [1], "all_reduce #6 of dp"),
    ],
)  # fmt: skip
def test_ranks_that_spin_for_a_gpu_wait_for_what_pytorchs_recorder_says(
    operations: list[str], elsewhere: bool, state: str, suspects: list[int], said: str
) -> None:
    data = recorded("fifo")["ranks"]
    for rank, operation in zip(data, operations, strict=True):
        rank["processes"][0]["operations"] = operation
        if rank["rank"] != 1 or not elsewhere:
            frames = [*SPINS, {"name": "step", "file": "/x/train.py", "line": 9}]
            first_thread(rank).update(call="", target="", state="R", busy=1.0, switches=2, frames=frames)
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == (state, suspects)
    assert said in verdict.said


def test_ranks_without_native_stacks_spin_where_one_is_in_an_operation() -> None:
    data = recorded("fifo")["ranks"]
    for rank, line in zip(data, (13, 11, 13), strict=True):
        frames = [{"name": "step", "file": "/x/train.py", "line": line}]
        first_thread(rank).update(call="", waits_in="", target="", state="R", busy=0.7, frames=frames)
        rank["processes"][0]["no_stacks"] = "there was no time left"
    assert judged(data).state == "moves"  # nobody knows
    first_thread(data[0])["frames"].insert(0, {"name": "PMPI_Allreduce", "file": "libmpi.so.40"})
    data[0]["processes"][0]["no_stacks"] = ""
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("works", [1])
    assert "the other 2 ranks wait for it in PMPI_Allreduce at train.py:13" in verdict.said
    first_thread(data[1])["frames"][0]["line"] = 13  # none is elsewhere: one of them may compute there
    assert (judged(data).state, judged(data).suspects) == ("works", [1, 2])


def test_ranks_whose_native_calls_were_not_read_stand_where_one_of_them_stands_that_was() -> None:
    data = recorded("fifo")["ranks"]
    backward = [{"name": "_engine_run_backward", "file": "/x/site-packages/torch/autograd/graph.py", "line": 5}]
    for rank, line in zip(data, (13, 11, 13), strict=True):
        innermost = [{"name": "barrier", "file": _C10D, "line": 8}] if line == 11 else backward
        frames = [*innermost, {"name": "step", "file": "/x/train.py", "line": line}]
        first_thread(rank).update(call="futex", waits_in="", target="", state="S", busy=0.0, switches=2, frames=frames)
    first_thread(data[0])["frames"].insert(0, {"name": "gloo::transport::tcp::UnboundBuffer::waitRecv", "file": "libtorch_cpu.so"})
    verdict = judged(data)
    assert (verdict.state, verdict.suspects) == ("stalled", [1])
    assert "rank 1 on node1 waits for other ranks in barrier at train.py:11" in verdict.said
    first_thread(data[2])["switches"] = 50
    assert judged(data).state == "moves"


def test_what_the_host_of_a_suspect_lacks_is_said() -> None:
    data = recorded("fifo")["ranks"]
    for rank in data:
        rank["processes"][0]["lacks"] = ["/ckpt (tmpfs) is full"] if rank["rank"] == 1 else ["/other (ext4) is full"]
    verdict = judged(data)
    assert verdict.said.endswith("; on node1 /ckpt (tmpfs) is full")
    assert "/other (ext4) is full" in verdict.places[0].evidence
