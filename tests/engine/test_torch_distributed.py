"""The backend `collective` of torch.distributed."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from collective_core.errors import CollectiveError
from collective_core.runtime.handshake import HEAD
from collective_core.runtime.point_to_point import GREETING, MAX_PENDING, PointToPoint
from collective_core.torch.backend import cuda
from collective_core.torch.backend.store import StoreLauncher
from collective_core.torch.backend.work import Completer, MessageWork
from conftest import WORKERS

from collective_core import _native

SUITE = Path(__file__).with_name("torchs_own_distributed_tests.py")


@pytest.mark.parametrize(("n", "hosts"), [(3, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_every_collective_gives_what_gloo_gives(launch, n, hosts):
    reports = launch("torch_distributed.py", n, hosts).must_succeed().reports()
    assert len(reports) == n
    for report in reports.values():
        assert report["different"] == []
        assert report["again"] == [float(n)] * 3


def test_what_trains_with_torch_distributed_trains(launch):
    reports = launch("torch_distributed_training.py", 2).must_succeed().reports()
    assert len(reports) == 2
    for report in reports.values():
        finished = ("ddp", "fsdp", "dtensor", "dcp", "compiled_ddp", "async_save", "sharded_tensor")
        assert {what: report[what] for what in finished} == dict.fromkeys(finished, True)
        assert report["hooks"] == [True, True]
        assert report["half"] == [2.0] * 3
        assert report["compiled"] == [3.0] * 3


@pytest.mark.parametrize("asked", ["gloo", "cpu:gloo", "none"])
def test_a_program_that_says_gloo_is_tuned(launch, asked):
    env = {"COLLECTIVE_FOR_GLOO": "1", "COLLECTIVE_AUTOCAST": "bf16"}
    reports = launch("torch_tuned.py", 2, 1, [asked], env, own_interpreter=True).must_succeed().reports()
    for report in reports.values():
        assert report["groups"] == ["CollectiveGroup"] * 2
        assert report["outputs"] == ["torch.bfloat16"] * 2
        assert report["types"] == ["torch.float32"] * 2
        assert report["wrong"] < 0.02
        assert report["total"] == [2.0] * 3
    assert reports[0]["weights"] == reports[1]["weights"]


def test_a_program_that_says_gloo_gets_it_otherwise(launch):
    reports = launch("torch_tuned.py", 2, 1, ["gloo"], own_interpreter=True).must_succeed().reports()
    for report in reports.values():
        assert report["groups"] == ["ProcessGroup"] * 2
        assert report["outputs"] == ["torch.float32"] * 2


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="PyTorch before 2.13 exchanges no memory")
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_buffers_of_fsdp2_and_buckets_of_ddp_lie_in_the_engines_memory(launch, n):
    reports = launch("torch_arena.py", n, arguments=["all"]).must_succeed().reports()
    assert len(reports) == n
    moved, stays = {"right": True, "moved": 1, "beside": False}, {"right": True, "moved": 0, "beside": False}
    for report in reports.values():
        assert report["wrong"] == []
        expected = {"plain": moved, "beside": {**moved, "beside": True}, "unused": moved, "static": moved}
        assert report["ddp"] == {**expected, "views": stays, "fp16": {**stays, "beside": report["ddp"]["fp16"]["beside"]}}
        assert (report["sparse"], report["several"]) == ([3.0] * 4, [True, True])
        assert (report["buffers"] > 0, report["in_arena"], report["fsdp"]) == (True, True, True)
        assert (report["kept"], report["freed"], report["again"], report["child"]) == (True, 4 << 20, True, 0)
        assert (report["nothing"], report["no_room"], report["left"]) == (0, True, 0)
        assert report["later"] == [sum(range(1, n + 1))]
        assert report["ddp_again"] == moved


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="PyTorch before 2.13 exchanges no memory")
def test_tensors_that_are_reduced_again_move_where_that_is_allowed(launch):
    reports = launch("torch_arena.py", 2, arguments=["adopted"], env={"COLLECTIVE_ADOPT_TENSORS": "1"}).must_succeed().reports()
    assert len(reports) == 2
    for rank, report in reports.items():
        assert report["wrong"] == []
        moved = ["plain", *(["array"] if rank else []), "grid"]
        assert report["moved"] == dict.fromkeys(("all_reduce", "async", "allreduce_", "allreduce_async_", "grouped_allreduce_"), moved)
        assert (report["left"], report["ddp"]["moved"], report["views"]["moved"]) == (0, 1, 0)


def test_memory_of_a_sum_that_has_timed_out_is_not_used_again(launch):
    reports = launch("torch_arena.py", 2, arguments=["timeout"], env={"COLLECTIVE_TIMEOUT": "2"}, keep_going=True).reports()
    assert len(reports) == 2
    assert "no word from rank 1" in reports[0]["error"]
    for report in reports.values():
        assert report["error"]
        assert (report["unchanged"], report["again"], report["arena"]) == (True, False, True)


def test_what_pytorchs_tests_ask_of_gloo_works(launch):
    reports = launch("torch_distributed_as_gloo.py", 2).must_succeed().reports()
    assert [report["wrong"] for report in reports.values()] == [{}, {}]


def test_a_child_that_is_forked_from_a_rank_of_mpirun_ends_at_once(launch):
    reports = launch("forked_and_ended.py", 2, arguments=["groups"]).must_succeed().reports()
    assert [reports[rank]["code"] for rank in (0, 1)] == [7, 7]


def test_what_it_cannot_do_is_an_error_everywhere_and_what_is_late_holds_up_nothing_else(launch):
    reports = launch("torch_distributed_edges.py", 2).must_succeed().reports()
    assert [report["wrong"] for report in reports.values()] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 1])
def test_tensors_on_gpus_go_through_pytorchs_own_backend_or_host_memory(launch, gpus):
    reports = launch("torch_distributed_gpus.py", 2, 1, [str(gpus)]).must_succeed().reports()
    for report in reports.values():
        assert report["wrong"] == []
        if gpus == 2:
            assert report["by_engine"] == 0
            assert report["told"] == []
        else:
            assert report["by_engine"] > 10
            assert len(report["told"]) == 1
            assert "2 ranks of host" in report["told"][0]
            assert "share 1 of its GPUs" in report["told"][0]


def seen(*gpus, setting="auto"):
    return {"gpus": list(gpus), "setting": setting}


@pytest.mark.parametrize(
    ("everyone", "hosts", "problem"),
    [
        ([seen("x", "y"), seen("x", "y")], "aa", ""),
        ([seen("x"), seen("y")], "ab", ""),
        ([seen("x"), seen("y")], "aa", ""),
        ([seen("x"), seen("x")], "aa", "2 ranks of host a share 1 of its GPUs"),
        ([seen("x", "y")] * 3, "aaa", "3 ranks of host a share 2 of its GPUs"),
        ([seen("x", setting="on")] * 2, "aa", ""),
        ([seen("x", "y"), seen()], "aa", "rank 1 of the group has no GPU, or its PyTorch no NCCL"),
        ([seen("x", "y"), seen("x", "y", setting="off")], "aa", "COLLECTIVE_NCCL=off"),
    ],
)
def test_nccl_is_used_where_each_rank_may_have_a_gpu_of_its_own(everyone, hosts, problem):
    assert cuda.unsupported_reason(everyone, [(host, host) for host in hosts]) == problem


def test_two_hosts_of_one_name_are_two_hosts():
    assert cuda.unsupported_reason([seen("x"), seen("x")], [("id 1", "node"), ("id 2", "node")]) == ""
    assert "2 ranks of host node share" in cuda.unsupported_reason([seen("x"), seen("x")], [("id 1", "node"), ("id 1", "node")])


class CountingStore:
    """A store of PyTorch's for threads, that counts what it is asked."""

    def __init__(self):
        self.store, self.requests = dist.HashStore(), 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


def members(store, count, timeout):
    return [StoreLauncher(store, rank, count, timeout) for rank in range(count)]


def test_a_groups_members_ask_the_store_a_few_times_each():
    store = CountingStore()
    launchers = members(store, 12, 60)
    store.requests = 0
    with ThreadPoolExecutor(12) as threads:
        results = list(threads.map(lambda each: each.exchange(bytes([each.rank, 255])), launchers))
    assert results == [[bytes([rank, 255]) for rank in range(12)]] * 12
    assert store.requests <= 4 * 12 + 2


def test_members_of_a_group_that_do_not_come_are_named():
    launchers, missing = members(dist.HashStore(), 4, 0.1), {}
    for rank in (1, 0, 2, 3):  # one after the other: each finds the keys of those before it, and rank 3 an answer of rank 0 that is missing
        with pytest.raises(CollectiveError, match="did not come") as error:
            launchers[rank].exchange(b"")
        missing[rank] = error.value.ranks
    assert missing == {1: (0, 2, 3), 0: (2, 3), 2: (3,), 3: (0,)}


ERRORS = {
    "shapes": ("mismatch", r"all_reduce.*the ranks ask for different things: rank 0 .*float32\[3\].*rank 1 .*float32\[4\]"),
    "kinds": ("mismatch", "the ranks ask for different things: rank 0 .* broadcast .* rank 1 .* allreduce"),
    "type": ("invalid", "tensors of torch.float8_e5m2 .* cannot be sent"),
}


@pytest.mark.parametrize("case", ["shapes", *(pytest.param(case, marks=pytest.mark.slow) for case in list(ERRORS)[1:])])
def test_what_does_not_fit_together_is_an_error_on_every_rank(launch, case):
    reports = launch("torch_distributed_failures.py", 2, 1, [case], keep_going=True).reports()
    kind, text = ERRORS[case]
    for report in reports.values():
        assert report["kind"] == kind
        assert re.search(text, report["error"])
    assert len(reports) == 2


@pytest.mark.parametrize("case", ["dies-recv", *(pytest.param(case, marks=pytest.mark.slow) for case in ("dies-allreduce", "leaves-recv"))])
def test_a_rank_that_dies_or_leaves_is_named_at_once(launch, case):
    (report,) = launch("torch_distributed_failures.py", 2, 1, [case], keep_going=True).reports().values()
    assert (report["kind"], report["ranks"]) == ("peer_lost", [1])
    assert re.search(r"rank 1 \(host .*, pid \d+\)", report["error"])
    assert report["seconds"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("case", ["stops-recv", "stops-send"])
def test_a_rank_that_a_signal_has_stopped_is_named_by_who_waits_for_a_message(launch, case):
    report = launch("torch_distributed_failures.py", 2, 1, [case], keep_going=True, limit=300).reports()[0]
    assert (report["kind"], report["ranks"]) == ("peer_lost", [1])
    assert "has been stopped by a signal for a minute" in report["error"]
    assert report["seconds"] < 100


@pytest.mark.slow
def test_a_message_of_another_length_and_a_wait_that_is_too_short_are_errors(launch):
    receiver = launch("torch_distributed_failures.py", 2, 1, ["length"], keep_going=True).reports()[1]
    assert receiver["kind"] == "mismatch"
    assert "sent 12 bytes with tag 0 to rank 1, which receives 16" in receiver["error"]
    waiting = launch("torch_distributed_failures.py", 2, 1, ["wait"], keep_going=True).reports()[0]
    assert waiting["kind"] == "timeout"
    assert "all_reduce.2 took longer than the 0.5 s of this wait" in waiting["error"]


class Meeting:
    """Members of a group who tell each other about themselves, in threads of one process."""

    def __init__(self, size: int) -> None:
        self.barrier, self.told = threading.Barrier(size), [b""] * size

    def member(self, rank: int, secret: bytes) -> SimpleNamespace:
        def exchange(mine: bytes) -> list[bytes]:
            self.told[rank] = mine
            self.barrier.wait(10)
            return list(self.told)

        return SimpleNamespace(rank=rank, secret=secret, exchange=exchange)


@pytest.fixture(params=["", "127.0.0.1"], ids=["one host", "several"])
def two_ends(request, monkeypatch):
    """two_ends(secrets) -> both ends of messages between two ranks."""
    monkeypatch.setattr(_native, "check_peers", lambda _: None)  # there is no engine
    made = []

    def make(secrets=(b"of the job" * 4,) * 2, timeout=20.0):
        meeting = Meeting(2)
        peers = [_native.PeerInfo(rank, 4711 + rank, "id", "here", request.param, 0, "") for rank in range(2)]
        with ThreadPoolExecutor(2) as threads:
            ends = threads.map(lambda r: PointToPoint(meeting.member(r, secrets[r]), peers, 0, timeout), range(2))
        made.extend(ends)
        return made

    yield make
    for end in made:
        end.end()


def bytes_of(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def test_messages_come_by_tag_and_strangers_disturb_nobody(two_ends):
    here, there = two_ends()
    address = here._addresses[1]
    strangers = []
    for greeting in (b"", b"x" * 100, HEAD.pack(GREETING, 0) + bytes(64), HEAD.pack(GREETING, 7) + bytes(32)):
        stranger = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        stranger.connect(address)
        stranger.sendall(greeting)
        strangers.append(stranger)
    sent = [here.send(bytes_of(b"tag %d" % tag), 1, tag) for tag in range(4)]
    for tag in (2, 0, 3, 1):
        got = np.zeros(5, dtype=np.uint8)
        assert there.receive(got, 0, tag).wait(20)
        assert bytes(got.tolist()) == b"tag %d" % tag
    assert all(each.wait(20) for each in sent)
    assert there.receive(np.zeros(0, dtype=np.uint8), 0, 9).wait(0.01) is False
    for stranger in strangers:
        stranger.close()


def test_whoever_does_not_know_the_groups_secret_sends_nothing(two_ends):
    here, there = two_ends((b"of the job" * 4, b"of another job" * 4))
    waiting = there.receive(np.zeros(5, dtype=np.uint8), 0, 0)
    with pytest.raises(CollectiveError, match=r"rank 1 \(host here, pid 4712\) cannot be reached: what listens there does not know"):
        here.send(bytes_of(b"12345"), 1, 0).wait(20)
    assert not waiting.wait(0.05)


def test_a_message_that_nobody_sends_ends_with_the_groups_timeout(two_ends):
    _, there = two_ends(timeout=0.1)
    waiting = there.receive(np.zeros(5, dtype=np.uint8), 0, 3)
    with pytest.raises(CollectiveError, match=r"\(tag 3\) from or to rank 0 \(host here, pid 4711\) was not taken within 0.1 s") as caught:
        waiting.wait(1.0)
    assert caught.value.kind == "timeout"


def stop_half_way(here: PointToPoint) -> threading.Event:
    """Has this end send 1000 bytes of a message, and the rest when the event is set."""
    resume, write = threading.Event(), here._write

    def write_a_part_first(rank, sender):
        if sender.waiting and not sender.waiting[0].moved:
            sender.connection.sendall(sender.head + bytes(sender.waiting[0].bytes[:1000]))
            sender.head, sender.waiting[0].moved = b"", 1000
            resume.wait(20)
        write(rank, sender)

    here._write = write_a_part_first
    return resume


def test_a_receive_of_a_group_that_fails_half_way_writes_nothing_more(two_ends, monkeypatch):
    here, there = two_ends()
    resume, got = stop_half_way(here), np.zeros(1 << 20, dtype=np.uint8)
    waiting = there.receive(got, 0, 0)
    sent = here.send(np.ones(1 << 20, dtype=np.uint8), 1, 0)
    while not got[999]:
        time.sleep(0.001)
    monkeypatch.setattr(there, "_on_failure", there._fail_all, raising=False)
    there._post("failure", CollectiveError("rank 7 is lost", "peer_lost", (7,)))
    with pytest.raises(CollectiveError, match="rank 7 is lost"):
        waiting.wait(20)
    got.fill(7)
    resume.set()
    with pytest.raises(CollectiveError, match="cannot be reached"):
        sent.wait(20)
    assert (got == 7).all()


def test_a_message_is_given_up_when_a_wait_for_it_has_been_too_short(two_ends):
    here, there = two_ends()
    late, got = np.zeros(5, dtype=np.uint8), np.zeros(5, dtype=np.uint8)
    work = MessageWork(Completer(), "a message", there.receive(late, 0, 0), lambda: None, [])
    with pytest.raises(CollectiveError, match=r"was not taken within 0\.2 s"):
        work.wait(timedelta(seconds=0.2))
    here.send(bytes_of(b"12345"), 1, 0)
    assert there.receive(got, 0, 0).wait(20)
    assert bytes(got.tolist()) == b"12345"
    assert not late.any()


def test_a_receive_that_times_out_half_way_writes_nothing_more_and_closes_the_connection(two_ends):
    here, there = two_ends()
    resume, got = stop_half_way(here), np.zeros(1 << 20, dtype=np.uint8)
    waiting, behind = there.receive(got, 0, 0, timeout=0.2), there.receive(np.zeros(5, dtype=np.uint8), 0, 1)
    sent = here.send(np.ones(1 << 20, dtype=np.uint8), 1, 0)
    while not got[999]:
        time.sleep(0.001)
    with pytest.raises(CollectiveError, match=r"was not taken within 0\.2 s"):
        waiting.wait(0.5)
    got.fill(7)
    resume.set()
    with pytest.raises(CollectiveError, match="cannot be reached"):
        sent.wait(20)
    assert (got == 7).all()
    for later in (behind, there.receive(np.zeros(5, dtype=np.uint8), 0, 0)):
        with pytest.raises(CollectiveError, match="sends no more: a message timed out when it had begun, so its connection was closed"):
            later.wait(20)
    with pytest.raises(CollectiveError, match="cannot be reached"):
        here.send(bytes_of(b"12345"), 1, 1).wait(20)


def test_a_send_that_times_out_half_way_goes_no_further_and_closes_the_connection(two_ends):
    here, there = two_ends()
    here.send(bytes_of(b"12345"), 1, 0)
    assert there.receive(np.zeros(5, dtype=np.uint8), 0, 0).wait(20)
    here.timeout = 0.2
    memory, got = np.ones(16 << 20, dtype=np.uint8), np.zeros(16 << 20, dtype=np.uint8)
    sent = here.send(memory, 1, 0)
    while not sent.moved:
        time.sleep(0.001)
    behind = here.send(bytes_of(b"12345"), 1, 1)
    with pytest.raises(CollectiveError, match=r"was not taken within 0\.2 s"):
        sent.wait(0.5)
    memory.fill(9)
    with pytest.raises(CollectiveError, match="cannot be reached: a message timed out when it had begun"):
        behind.wait(20)
    with pytest.raises(CollectiveError, match="sends no more: its connection ended in the middle of a message"):
        there.receive(got, 0, 0, timeout=20).wait(20)
    assert 9 not in got
    with pytest.raises(CollectiveError, match="cannot be reached: a message to it timed out when it had begun"):
        here.send(bytes_of(b"12345"), 1, 1).wait(20)


def test_a_send_that_is_given_up_before_it_begins_is_never_sent_and_the_others_are(two_ends):
    here, there = two_ends()
    large = np.ones(16 << 20, dtype=np.uint8)
    first, second, third = here.send(large, 1, 0), here.send(bytes_of(b"12345"), 1, 1), here.send(bytes_of(b"67890"), 1, 2)
    second.give_up(0.5)
    with pytest.raises(CollectiveError, match=r"was not taken within 0\.5 s"):
        second.wait(0)
    got, last = np.zeros(16 << 20, dtype=np.uint8), np.zeros(5, dtype=np.uint8)
    for transfer in (there.receive(last, 0, 2), there.receive(got, 0, 0), first, third):
        assert transfer.wait(20)
    assert got.all()
    assert bytes(last.tolist()) == b"67890"
    assert there._unexpected == []


def test_a_message_is_taken_by_whoever_asks_for_it_while_it_comes(two_ends, monkeypatch):
    here, there = two_ends()
    begun, go = threading.Event(), threading.Event()
    choose = there._choose_target

    def slowly(receiver):
        choose(receiver)
        if receiver.kept:
            begun.set()
            go.wait(20)

    monkeypatch.setattr(there, "_choose_target", slowly)
    large, got, last = np.ones(16 << 20, dtype=np.uint8), np.zeros(16 << 20, dtype=np.uint8), np.zeros(5, dtype=np.uint8)
    other = there.receive(last, 0, 2)
    sent = [here.send(large, 1, 0), here.send(bytes_of(b"67890"), 1, 2)]
    assert begun.wait(20)
    late = there.receive(got, 0, 0)
    go.set()
    for transfer in (other, late, *sent):
        assert transfer.wait(20)
    assert got.all()
    assert bytes(last.tolist()) == b"67890"
    assert there._unexpected == []


def test_an_accept_that_fails_is_tried_again(two_ends):
    here, there = two_ends()
    listener, left = there._listener, [errno.EMFILE, errno.ECONNABORTED]

    def accept():
        if left:
            raise OSError(left.pop(), "made by a test")
        return listener.accept()

    there._listener = SimpleNamespace(fileno=listener.fileno, accept=accept, close=listener.close)
    got = np.zeros(5, dtype=np.uint8)
    received, sent = there.receive(got, 0, 0), here.send(bytes_of(b"12345"), 1, 0)
    assert received.wait(20)
    assert sent.wait(20)
    assert left == []


def test_who_leaves_is_named_to_those_who_wait_for_a_message(two_ends):
    here, there = two_ends()
    here.send(bytes_of(b"12345"), 1, 0)
    assert there.receive(np.zeros(5, dtype=np.uint8), 0, 0).wait(20)
    waiting = there.receive(np.zeros(5, dtype=np.uint8), 0, 0)
    here.end()
    late = there.receive(np.zeros(5, dtype=np.uint8), 0, 1)
    for each in (waiting, late):
        with pytest.raises(CollectiveError, match="sends no more: it has left the group or ended"):
            each.wait(20)


def test_a_message_of_any_length_is_taken_by_whoever_waits_for_one(two_ends):
    here, there = two_ends()
    waiting = there.receive(None, 0, 1, timeout=float("inf"))
    for text in (b"12345", b"", b"1234567"):
        here.send(bytes_of(text), 1, 1)
    here.send(bytes_of(b"last"), 1, 2)
    assert there.receive(None, 0, 2).wait(20)  # those before it are kept
    for text in (b"12345", b"", b"1234567"):
        assert waiting.wait(20)
        assert waiting.memory.tobytes() == text
        waiting = there.receive(None, 0, 1)


def test_more_strangers_than_may_wait_disturb_nobody(two_ends):
    here, there = two_ends()
    address = here._addresses[1]
    assert there.receive(np.zeros(0, dtype=np.uint8), 0, 9).wait(0.01) is False  # its thread accepts
    strangers = []
    for _ in range(MAX_PENDING + 20):
        stranger = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        stranger.connect(address)
        strangers.append(stranger)
    got = np.zeros(5, dtype=np.uint8)
    sent, received = here.send(bytes_of(b"12345"), 1, 0), there.receive(got, 0, 0)
    assert sent.wait(20)
    assert received.wait(20)
    assert bytes(got.tolist()) == b"12345"
    for stranger in strangers:
        stranger.close()


def test_messages_go_on_after_a_failure_of_the_group(two_ends, monkeypatch):
    here, there = two_ends()
    waiting = there.receive(np.zeros(5, dtype=np.uint8), 0, 0)

    def check(_):
        raise CollectiveError("rank 0 is lost", "peer_lost", (0,))

    with monkeypatch.context() as patched:
        patched.setattr(_native, "check_peers", check)
        with pytest.raises(CollectiveError, match="rank 0 is lost"):
            waiting.wait(20)
    got = np.zeros(5, dtype=np.uint8)
    received = there.receive(got, 0, 0)
    assert here.send(bytes_of(b"12345"), 1, 0).wait(20)
    assert received.wait(20)
    assert bytes(got.tolist()) == b"12345"


def test_a_defect_of_the_thread_that_moves_messages_is_an_error_of_all_of_them(two_ends):
    here, _ = two_ends()
    waiting = here.receive(np.zeros(5, dtype=np.uint8), 1, 0)

    def fail(_):
        raise ZeroDivisionError("made by a test")

    here._on_send = fail
    sent = here.send(bytes_of(b"12345"), 1, 0)
    for transfer in (waiting, sent):
        with pytest.raises(CollectiveError, match="messages of rank 0 ended: ZeroDivisionError: made by a test"):
            transfer.wait(20)
    with pytest.raises(CollectiveError, match="messages of rank 0 ended"):
        here.send(bytes_of(b"12345"), 1, 0)


ONE_SUM = "import torch, torch.distributed as d; d.init_process_group({!r}); t = torch.ones(2); d.all_reduce(t); print(t.tolist())"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["collective", "gloo"])
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "ours", "torchrun in ours"])
def test_every_launcher_starts_it_and_no_import_is_needed(launcher, backend, tmp_path):
    script = tmp_path / "sum.py"
    # Without it PyTorch's Gloo often aborts at the end of the process, under torchrun, too.
    end = "; d.destroy_process_group()" if backend == "gloo" else ""
    script.write_text(ONE_SUM.format(backend) + end)
    beside = Path(sys.executable).parent
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command = {
        "torchrun": torchrun,
        "torchrun in ours": [sys.executable, "-m", "collective_core.launch", "-np", "1", *torchrun],
        "mpirun": [str(beside / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, str(script)],
        "ours": [sys.executable, "-m", "collective_core.launch", "-np", "2", sys.executable, str(script)],
    }[launcher]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("[2.0, 2.0]") == 2


HOROVOD_BESIDE = """
import sys, torch, torch.distributed as d, collective_core.torch as hvd
hvd.init()
for _ in range(2):
    d.init_process_group("collective")
    t = torch.ones(2)
    d.all_reduce(t)
    sys.stdout.write(f"{t.tolist()} {hvd.allreduce(t, op=hvd.Sum).tolist()}\\n")  # at once: the other rank writes there, too
    d.destroy_process_group()
hvd.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_groups_may_be_made_again_beside_horovods_interface(launcher, tmp_path):
    script = tmp_path / "both.py"
    script.write_text(HOROVOD_BESIDE)
    command = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "mpirun": [str(Path(sys.executable).parent / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    }[launcher]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("[2.0, 2.0] [4.0, 4.0]") == 4


@pytest.mark.slow
def test_over_mpi_the_program_joins_the_job_first(launch):
    with_mpi = {"COLLECTIVE_BACKEND": "mpi"}
    done = launch("torch_distributed_failures.py", 2, 1, ["shapes"], keep_going=True, env=with_mpi)
    assert done.stderr.count("with COLLECTIVE_BACKEND=mpi call hvd.init() before init_process_group") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["collective", "gloo"])
def test_srun_starts_it(backend):
    """By the variables that it sets; the examples run under a real one."""
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "here"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_SUM.format(backend)],
            env={**os.environ, **shared, "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=100)[0] for rank in ranks] == ["[2.0, 2.0]\n"] * 2


@pytest.mark.slow
def test_ranks_on_several_hosts_meet_over_the_interface_between_them(ssh, tmp_path):
    script = tmp_path / "sum.py"
    script.write_text(ONE_SUM.format("gloo"))
    words = ["--ssh-config", ssh[2], "-H", "localhost:1,other:1", sys.executable, str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "collective_core.launch", *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.count("[2.0, 2.0]") == 2, done.stderr


IN_EACH_GENERATION = """
import os, torch, torch.distributed as dist
import collective_core.torch as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    dist.init_process_group("gloo")
    total = torch.ones(2)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} sums to {total.tolist()}", flush=True)
    dist.destroy_process_group()
    if state.step == 0 and hvd.rank() == 1:
        os.kill(os.getpid(), 9)
    while state.step < 1:  # the others learn of its end here
        hvd.barrier()
        state.step += 1
        state.commit()

train(hvd.elastic.ObjectState(step=0))
"""


@pytest.mark.slow
def test_the_ranks_of_an_elastic_job_meet_in_each_generation(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(IN_EACH_GENERATION.replace("state.step == 0 and", f"not os.path.exists('{tmp_path}/died') and"))
    script.write_text(script.read_text().replace("        os.kill", f"        open('{tmp_path}/died', 'w').close()\n        os.kill"))
    words = ["--min-np", "2", "-np", "2", "-H", "localhost:2", sys.executable, str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "collective_core.launch", *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"rank {rank} of 2 sums to [2.0, 2.0]") for rank in range(2)] == [2, 2]


@pytest.mark.slow
def test_a_worker_of_an_elastic_job_that_has_no_rank_yet_says_so():
    words = ["--min-np", "1", "-np", "1", "--max-restarts", "0", sys.executable, "-c", ONE_SUM.format("gloo")]
    done = subprocess.run(
        [sys.executable, "-m", "collective_core.launch", *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "call it where this one has its rank, in the function of hvd.elastic.run" in done.stderr


@pytest.mark.slow
def test_more_ranks_than_the_launcher_has_started_are_an_error_on_every_rank_and_not_a_wait():
    program = "import os, torch.distributed as d; d.init_process_group('gloo', rank=int(os.environ['RANK']), world_size=3)"
    words = ["-np", "2", sys.executable, "-c", program]
    done = subprocess.run(
        [sys.executable, "-m", "collective_core.launch", *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    said = r"\[(\d)\] ValueError: Error initializing torch.distributed using env:// rendezvous: world_size is 3, and the"
    (first,) = re.findall(said, done.stderr)
    assert f"[{1 - int(first)}] the same error as that of rank {first}" in done.stderr


SPAWNS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(local, size):
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]) * size + local, world_size=int(os.environ["WORLD_SIZE"]) * size)
    total = torch.ones(2)
    dist.all_reduce(total)
    print(total.tolist())

if __name__ == "__main__":
    mp.spawn(work, (2,), nprocs=2)
"""


@pytest.mark.slow
def test_a_rank_may_start_processes_that_are_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SPAWNS)
    words = ["-np", "1", sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(
        [sys.executable, "-m", "collective_core.launch", *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.count("[2.0, 2.0]") == 2, done.stderr


@pytest.mark.slow
def test_without_a_launcher_pytorchs_own_error_stays():
    done = subprocess.run([sys.executable, "-c", ONE_SUM.format("collective")], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "environment variable RANK expected, but not set" in done.stderr


@pytest.mark.slow
def test_importing_pytorch_does_not_import_the_engine():
    code = "import sys, torch; print('collective_core' in sys.modules, torch.distributed.Backend.COLLECTIVE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["False", "collective"]


@pytest.mark.slow
def test_pytorchs_own_tests_pass(tmp_path):
    """All of its distributed tests that need no GPU and two ranks, and that Gloo or MPI passes, with this backend in Gloo's place."""
    environment = {**os.environ, "WORLD_SIZE": "2", "TEMP_DIR": str(tmp_path), "PYTHONPATH": str(WORKERS)}
    command = [sys.executable, "-m", "unittest", "-v", SUITE.stem]
    done = subprocess.run(command, cwd=SUITE.parent, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    ran = int(re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE).group(1))
    skipped = int((re.search(r"skipped=(\d+)", done.stderr) or ["", "0"])[1])
    assert ran - skipped >= 99
