"""CUDA tensors without a GPU: CPU tensors in their place, Gloo in that of NCCL (workers/gpus_by_gloo.py). See also tests/gpu."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from cases import slow_but_last
from collective_core.torch import gpu, handles, nccl


def told(**other):
    return {"unsupported_reason": "", "setting": "auto", "gpu": "GPU-0", "version": [2, 27, 3], "library": "NCCL", **other}


def test_nccl_is_used_where_every_rank_has_a_gpu_of_its_own():
    assert gpu.unsupported_reason_of([told(gpu="a"), told(gpu="b"), told(gpu="c")], [0, 1, 2]) == ""
    assert gpu.unsupported_reason_of([told(), told(gpu="")], [0, 1]) == "", "an older PyTorch does not tell which one it is"
    assert gpu.unsupported_reason_of([told(gpu=""), told(gpu="")], [0, 1]) == ""
    found = gpu.unsupported_reason_of([told(gpu=name) for name in "abacba"], [0, 2, 3, 5, 6, 7])
    assert found.startswith("ranks 0 and 3 and 7; 2 and 6 use the same GPU")
    assert gpu.unsupported_reason_of([told(setting="on"), told(setting="on")], [0, 1]) == "", "NCCL itself says whether it can"
    assert gpu.unsupported_reason_of([told(), told(unsupported_reason="it has no GPU")], [4, 7]) == "rank 7: it has no GPU"
    of_amd = told(gpu="b", library="RCCL")  # of the same number
    assert gpu.unsupported_reason_of([told(), of_amd], [0, 1]) == "rank 0 has NCCL, and rank 1 a GPU of another vendor"
    assert gpu.unsupported_reason_of([of_amd, told(gpu="c", library="RCCL")], [0, 1]) == ""
    assert gpu.unsupported_reason_of([told(), told(gpu="b", version=[2, 28, 0])], [0, 1]) == "ranks 0 and 1 have different versions of NCCL"


def test_a_store_gives_what_it_has_learnt_and_lets_go_of_who_waits():
    store, found = nccl.Relay(), []
    waiting = threading.Thread(target=lambda: found.append(store.get("theirs")))
    waiting.start()
    store.set("mine", b"\0\xff")
    assert store.take_untold() == {"mine": b"\0\xff"}
    assert store.take_untold() == {}
    assert (store.check(["mine"]), store.check(["mine", "theirs"])) == (True, False)
    store.learn({"theirs": b"1"})
    waiting.join()
    assert found == [b"1"]
    closing = threading.Timer(0.05, store.close, ["a rank has died"])
    closing.start()
    with pytest.raises(RuntimeError, match="a rank has died"):
        store.wait(["never"])


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 3)))
def test_a_death_between_operations_is_seen_by_who_looks(launch, n, hosts):
    reports = launch("idle.py", n, hosts, keep_going=True).reports()
    assert {(reports[rank]["kind"], *reports[rank]["ranks"]) for rank in set(range(n)) - {1}} == {("peer_lost", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("n", slow_but_last(2, 3))
def test_what_goes_through_the_process_group_is_what_the_engine_gives(launch, n):
    reports = launch("gpu_tensors.py", n).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["auto", "on", "off"])
@pytest.mark.parametrize("case", ["missing", "shared", "versions", "broken"])
def test_where_nccl_cannot_be_used_tensors_go_through_host_memory_and_one_rank_says_why(launch, case, setting):
    reports = launch("gpu_ways.py", 2, arguments=(case,), env={"COLLECTIVE_NCCL": setting}).must_succeed().reports()
    reasons = {
        "missing": "rank 1: its PyTorch has no NCCL",
        "shared": "ranks 0 and 1 use the same GPU",
        "versions": "different versions of NCCL",
        "broken": "NCCL could not be started (rank 1: RuntimeError: no socket is left)",
    }
    assert set(reports) == {0, 1}
    for rank, report in reports.items():
        if setting == "on" and case == "shared":
            assert report["enabled"], "as asked for"
            continue
        assert report["enabled"] is (None if setting == "on" else False)
        assert (reasons[case] in report["error"] and "COLLECTIVE_NCCL=on" in report["error"]) == (setting == "on")
        assert bool(report["warned"]) == (rank == 0 and setting == "auto")
        assert all(reasons[case] in text for text in report["warned"])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), [("dies", "peer_lost"), ("hangs", "timeout")])
def test_a_gpu_never_waits_for_a_rank_that_is_gone_and_nothing_broken_is_committed(launch, case, kind):
    env = {"COLLECTIVE_TIMEOUT": "3"}
    reports = launch("gpu_failures.py", 2, arguments=(case,), env=env, keep_going=True).reports()
    assert reports[0]["kinds"] == [kind] * 3, reports
    if case == "dies":
        assert set(reports[0]["blamed"]) == {1}
    assert reports[0]["seconds"] < 30


@pytest.mark.parametrize("hosts", slow_but_last(1, 3))
def test_process_sets_on_one_gpu_are_launched_in_one_order_on_all_ranks(launch, hosts):
    """Without one, a GPU that works for one set and another that works for the other wait for each other."""
    launched, agreed = launched_in_order(launch, hosts)
    assert sorted(launched[1]) == [1, *range(1001, 1004), *range(2001, 2004), 2009, 3000]
    assert len(agreed) == 3, launched


@pytest.mark.slow
def test_process_sets_on_one_gpu_are_launched_in_different_orders_where_nothing_orders_them(launch):
    """So that the test above can fail: the pauses of its ranks are long enough."""
    launched, agreed = launched_in_order(launch, 1, "without")
    assert agreed == [(0, 2)], launched  # which share no more than the global set


def launched_in_order(launch, hosts, *arguments):
    """What each rank has launched, and the pairs of ranks that have launched in one order what both have."""
    reports = launch("gpu_order.py", 3, hosts, arguments).must_succeed().reports()
    launched = {rank: report["launched"] for rank, report in reports.items()}

    def common(one, other):
        return [each for each in launched[one] if each in launched[other]]

    return launched, [(one, other) for one, other in ((0, 1), (0, 2), (1, 2)) if common(one, other) == common(other, one)]


def test_who_was_late_for_an_operation_that_has_a_place_in_the_order_is_named(launch):
    reports = launch("gpu_late.py", 3).must_succeed().reports()
    assert [reports[rank]["slowest"] for rank in (0, 2)] == [1, 1]


def test_what_may_still_come_first_holds_up_what_is_behind_it():
    order = nccl.Order()
    assert [order.enter(each) for each in (7, 3)] == [1, 2]
    order.enter(3, 2)
    assert not order.is_next(3), "7 may become 1"
    order.enter(7, 2)
    assert (order.is_next(7), order.is_next(3)) == (False, True), "equal numbers: the lower process set"
    assert order.enter(5) == 3
    order.leave(3)
    assert (order.is_next(7), order.is_next(5)) == (True, False)
    order.enter(5, 9)
    assert order.enter(1) == 10, "higher than all that has been agreed on"


def test_a_launch_waits_for_its_turn_unless_its_group_is_broken(monkeypatch):
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(new_stream=lambda _: None))
    monkeypatch.setattr(nccl, "order", nccl.Order())
    monkeypatch.setattr(nccl, "BLAME_AFTER", 0.0)
    group = nccl.Group(SimpleNamespace(id=4, rank=0, size=2), torch.device("cpu"))
    nccl.order.enter(2)
    group.start(SimpleNamespace(order=nccl.order.enter(4)))
    assert [group.test(), group.test()] == [None, None]
    group.broken = "it was aborted"
    assert "it was aborted" in (group.test() or group.test())
    nccl.order.leave(2)
    assert nccl.order.is_next(9), "it holds up nobody"


def test_a_group_whose_turn_does_not_come_is_not_connected(monkeypatch):
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(new_stream=lambda _: None))
    monkeypatch.setattr(nccl, "order", nccl.Order())
    monkeypatch.setattr(nccl, "groups", {})
    monkeypatch.setattr(nccl.membership, "current", lambda: SimpleNamespace(config=SimpleNamespace(timeout=0.1)))
    nccl.order.enter(2)
    members = SimpleNamespace(id=4, rank=0, size=1, ranks=[0])
    problem = nccl.connect(members, torch.device("cpu"), lambda document: [document], 60.0)
    assert "rank 0: CollectiveError: what goes before it has taken more than 0.1 s (COLLECTIVE_TIMEOUT)" in problem
    assert nccl.groups == {}


class Asked:
    """The engine's pointer to a transfer."""

    def __init__(self, process_set, kind=nccl._native.BARRIER, order=0):
        self.contents = SimpleNamespace(process_set=process_set, kind=kind, order=order)


def test_what_will_never_be_launched_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(new_stream=lambda _: None))
    monkeypatch.setattr(nccl, "order", nccl.Order())
    monkeypatch.setattr(nccl, "groups", {})
    error = ctypes.create_string_buffer(200)

    def start(*asked):
        return nccl._start(Asked(*asked), ctypes.addressof(error), 200)

    assert start(4) < 0, "the set has been left, or has no group"
    assert b"has left process set 4" in error.value
    assert nccl.order.is_next(9)
    group = nccl.groups[4] = nccl.Group(SimpleNamespace(id=4, rank=0, size=2), torch.device("cpu"))
    assert start(4) == 0
    assert not nccl.order.is_next(9)
    assert start(4, nccl._native.BARRIER, 1) == 0, "the other ranks have not answered"
    assert nccl.order.is_next(9)
    nccl.order.enter(2)
    assert start(4) == 0
    assert start(4, nccl._native.ALLREDUCE, 7) == 0
    assert nccl._test(4, ctypes.addressof(error), 200) == nccl.WAITS_FOR_TURN
    assert group.waiting is not None
    assert start(4, nccl._native.BARRIER, 2) == 0, "a rank has died while this one waited for its turn"
    assert group.waiting is None
    nccl.order.leave(2)
    assert nccl.order.is_next(9)
    assert start(5, nccl._native.ALLREDUCE, 8) < 0
    assert nccl.order.is_next(9)


def test_who_leaves_the_job_leaves_no_turn_behind_and_waits_for_what_waits(monkeypatch):
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(new_stream=lambda _: None, synchronize=lambda *_: None))
    monkeypatch.setattr(nccl, "order", nccl.Order())
    monkeypatch.setattr(nccl.membership, "is_healthy", lambda: True)
    group = nccl.Group(SimpleNamespace(id=0, rank=0, size=2), torch.device("cpu"))
    group.backend = SimpleNamespace(abort=lambda: None)
    monkeypatch.setattr(nccl, "groups", {0: group})
    group.waiting = object()
    nccl.order.enter(5)
    launching = threading.Timer(0.1, lambda: setattr(group, "waiting", None))
    launching.start()
    nccl._leave(0)
    assert group.waiting is None
    assert nccl.order.is_next(9)
    monkeypatch.setattr(nccl, "ABORT_TIME", 0.05)
    nccl.groups[3] = group
    group.waiting = object()
    nccl._leave(3)
    assert group.waiting is not None, "it was not waited for for ever"


def test_a_value_that_is_none_is_refused(launch):
    outcome = launch("idle.py", 1, env={"COLLECTIVE_NCCL": "/usr/lib/libnccl.so.2"})
    assert "COLLECTIVE_NCCL='/usr/lib/libnccl.so.2' is not one of auto, on, off" in outcome.stderr


def test_a_wait_is_on_the_stream_of_the_tensors_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    waited = []
    nccl.Cuda().wait(SimpleNamespace(wait=waited.append), torch.device("cuda:1"))
    assert waited == ["the stream of cuda:1"]


def test_pytorch_leaves_the_failures_of_these_groups_to_the_engine(monkeypatch):
    seen = {}

    class Made:
        def __init__(self, *arguments):
            seen.update({name: os.environ.get(name) for name in nccl.SETTINGS}, timeout=arguments[3]._timeout)

        Options = SimpleNamespace

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Made, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", raising=False)
    nccl.Cuda().backend(None, 0, 2)
    assert seen.pop("timeout") == nccl.NO_TIMEOUT
    assert set(seen.values()) == {"0"}
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in os.environ


def test_an_abort_that_hangs_ends_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(nccl, "ABORT_TIME", 0.05)
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(new_stream=lambda _: None))
    group = nccl.Group(SimpleNamespace(id=0, rank=0, size=2), torch.device("cpu"))
    release = threading.Event()
    group.backend = SimpleNamespace(abort=release.wait)
    group.end("a test")
    assert "NCCL has not ended what is under way within 0.05 s" in capsys.readouterr().err
    release.set()


def test_the_engine_waits_while_a_gpu_has_too_much_to_do(monkeypatch):
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(new_stream=lambda _: None, is_done=lambda event: event.query()))
    group, done = nccl.Group(SimpleNamespace(id=0, rank=0, size=2), torch.device("cpu")), set()
    group._under_way.extend((0.0, SimpleNamespace(query=lambda number=number: number in done)) for number in range(nccl.MAX_IN_FLIGHT))
    assert group.test() == ""
    group._under_way.append((0.0, SimpleNamespace(query=lambda: False)))
    assert group.test() is None
    done.add(0)
    assert group.test() == ""
    group._under_way.append((0.0, SimpleNamespace(query=lambda: False)))
    group.broken = "it was aborted"
    assert group.test() == "", "what was aborted holds up nobody"


def test_an_operation_is_done_when_the_gpu_is(monkeypatch):
    ended, end = [True], [False]
    monkeypatch.setattr(gpu._native, "is_done", lambda _: ended[0])
    monkeypatch.setattr(handles, "_kept", {})
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(is_done=lambda event: event.query()))
    launch = SimpleNamespace(end=SimpleNamespace(query=lambda: end[0]), group=SimpleNamespace(broken=""))
    work = gpu._LaunchWork(7, lambda: None, None, launch)
    assert not work.is_done()
    end[0] = True
    assert work.is_done()
    ended[0] = False
    assert not work.is_done()
    ended[0], end[0], launch.group.broken = True, False, "it was aborted"
    assert work.is_done(), "a GPU that has failed may never be"
    handles._kept.clear()


def test_a_gpu_that_hangs_is_noticed_before_the_engines_timeout(monkeypatch):
    monkeypatch.setattr(nccl, "HUNG_AFTER", 0.2)
    monkeypatch.setattr(nccl, "INTERVAL", 0.01)
    monkeypatch.setattr(nccl.membership, "current", lambda: SimpleNamespace(config=SimpleNamespace(timeout=1800.0)))
    monkeypatch.setattr(nccl._native, "check_peers", lambda _: None)
    since = time.monotonic()
    groups = {n: SimpleNamespace(number=n, broken="", busy_since=lambda n=n: since if n == 2 else None) for n in range(3)}
    monkeypatch.setattr(nccl, "groups", groups)
    found = []
    monkeypatch.setattr(nccl, "_reason", found.append)
    nccl._see_to()
    assert [(error.kind, str(error)) for error in found] == [
        ("timeout", "a GPU has not finished a collective of process set 2 within 0.2 s")
    ]


def driver_of(monkeypatch, code=0, hip=None):
    """A pretended libcuda.so.1, or the libraries of a PyTorch for AMD's GPUs (``hip``), which keep the modes of threads; what they keep."""
    modes = {}

    def exchange(mode):
        if code == 0:
            mode = mode._obj
            mode.value, modes[threading.get_ident()] = modes.get(threading.get_ident(), 0), mode.value
        return code

    exchange.__name__ = f"{'hip' if hip else 'cu'}ThreadExchangeStreamCaptureMode"
    found = {torch._C.__file__ if hip else "libcuda.so.1": SimpleNamespace(**{exchange.__name__: exchange})}
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *_, **__: found[name])
    monkeypatch.setattr(nccl, "_capture_mode_call", nccl._capture_mode_call.__wrapped__)
    return modes


class Capturing:
    """Of a graph that another thread captures in PyTorch's mode, global (0): a question in that mode ends the capture."""

    def __init__(self, modes):
        self.modes, self.asked_in = modes, []

    def query(self):
        self.asked_in.append(self.modes.get(threading.get_ident(), 0))
        if self.asked_in[-1] == 0:
            raise RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream")
        return True


@pytest.mark.parametrize("asks", ["watch thread", "poll", "copies"])
def test_a_graph_that_is_captured_meanwhile_is_not_ended_by_a_question(monkeypatch, asks):
    modes = driver_of(monkeypatch)
    event = Capturing(modes)
    monkeypatch.setattr(nccl, "platform", nccl.Cuda())
    if asks == "watch thread":
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
        group = nccl.Group(SimpleNamespace(id=0, rank=0, size=2), torch.device("cpu"))
        group._under_way.append((0.0, event))
        assert group.busy_since() is None
    elif asks == "poll":
        monkeypatch.setattr(gpu._native, "is_done", lambda _: True)
        monkeypatch.setattr(handles, "_kept", {})
        assert gpu._LaunchWork(7, lambda: None, None, SimpleNamespace(end=event, group=SimpleNamespace(broken=""))).is_done()
        handles._kept.clear()
    else:
        work = gpu.Copying(event, lambda: None)
        event.synchronize = lambda: None
        monkeypatch.setattr(gpu, "_copying", deque([work]))
        gpu.begin_copied()
        assert not gpu._copying
    assert event.asked_in == [1]
    assert modes == {threading.get_ident(): 0}, "the thread's own mode, afterwards"


@pytest.mark.parametrize(("hip", "call"), [(None, "cu"), ("6.2", "hip")])
def test_a_driver_that_refuses_the_mode_is_named(monkeypatch, hip, call):
    driver_of(monkeypatch, code=3, hip=hip)
    with pytest.raises(RuntimeError, match=f"^{call}ThreadExchangeStreamCaptureMode failed with error 3"):
        nccl.Cuda().is_done(Capturing({}))


def test_a_pytorch_for_amds_gpus_is_asked_by_its_own_libraries(monkeypatch):
    modes = driver_of(monkeypatch, hip="6.2")
    assert nccl.Cuda().is_done(Capturing(modes))
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(RuntimeError, match=r"the library of the GPU's driver cannot be used: .*undefined symbol: hip"):
        nccl.Cuda().is_done(Capturing({}))  # a PyTorch for CPUs has none
    assert ctypes.CDLL(torch._C.__file__).omp_get_max_threads() > 0, "what PyTorch's libraries depend on is found by way of it"


def test_a_question_that_fails_leaves_the_threads_mode_as_it_was(monkeypatch):
    modes = driver_of(monkeypatch)

    class Failed:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        nccl.Cuda().is_done(Failed())
    assert modes == {threading.get_ident(): 0}


def test_a_tensor_on_a_ranks_second_gpu_is_named_with_both_once(monkeypatch, capsys):
    monkeypatch.setattr(nccl, "platform", SimpleNamespace(holds=lambda _: True))
    monkeypatch.setattr(nccl, "groups", {3: SimpleNamespace(device=torch.device("cuda:0"))})
    monkeypatch.setattr(gpu, "_agreed", {3: ""})
    first, second = (SimpleNamespace(layout=torch.strided, device=torch.device("cuda", number)) for number in range(2))
    gpu._say_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # python -W error: it would end the call of this rank alone
        assert gpu.moves_with_nccl(first, SimpleNamespace(id=3))
        assert capsys.readouterr().err == ""
        assert not gpu.moves_with_nccl(second, SimpleNamespace(id=3))
        assert not gpu.moves_with_nccl(second, SimpleNamespace(id=3))
    assert capsys.readouterr().err.count("GPU in process set 3 is cuda:0, so a tensor on cuda:1 goes through host memory") == 1
