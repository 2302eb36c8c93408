"""The PyTorch interface."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import slow_but_last
from collective_core.runtime import cores, membership
from conftest import LAUNCH_LIMIT

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (3, 1), (4, 2)))
def test_operations(launch, n, hosts):
    reports = launch("torch_ops.py", n, hosts, env={"COLLECTIVE_SUM_ORDER": "ranks"}).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.parametrize(("n", "hosts"), [(3, 1), *slow_but_last((6, 2), (6, 3), (4, 2))])
def test_half_types_among_hosts_keep_to_their_bound(launch, n, hosts):
    reports = launch("half_sums.py", n, hosts).must_succeed().reports()
    assert len({entry["digest"] for entry in reports.values()}) == 1
    assert reports[0]["rounded"] > 0, "no sum of a host was rounded"


@pytest.mark.parametrize("worker", ["complex_tensors.py", "repeated.py"])
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (3, 2), (2, 1)))
def test_complex_tensors_and_calls_that_are_repeated(launch, worker, n, hosts):
    reports = launch(worker, n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.fixture(scope="module")
def trained(launch):
    """trained(ranks, hosts, bucket_mb): a digest of the trained parameters, the same on all ranks. Every job runs once."""
    return functools.cache(lambda n, hosts, mb: digest_of(launch("training.py", n, hosts, env={"COLLECTIVE_FUSION_MB": mb}), n))


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (2, 1), (2, 2), (3, 2)))
def test_training_equals_one_process_with_the_whole_batch(trained, n, hosts):
    assert trained(n, hosts, "0.002")


def digest_of(outcome, n):
    reports = outcome.must_succeed().reports()
    assert set(reports) == set(range(n))
    digests = {entry["digest"] for entry in reports.values()}
    assert len(digests) == 1, "the replicas differ"
    return digests.pop()


@pytest.mark.slow
def test_two_runs_with_other_buckets_and_hosts_agree(trained):
    """Of three ranks: the sum of two is the same in any order."""
    assert trained(3, 2, "0.002") == trained(3, 1, "25")


@pytest.mark.slow
def test_every_function_runs_inside_a_compiled_one(launch):
    reports = launch("compiled_operations.py", 2).must_succeed().reports()
    assert set(reports) == {0, 1}


@pytest.mark.slow
def test_what_compilers_of_pytorch_do_not_look_into(launch):
    reports = launch("compiled.py", 2).must_succeed().reports()
    assert set(reports) == {0, 1}


def test_work_that_was_never_begun_ends_silently(monkeypatch):
    from collective_core.torch import handles

    monkeypatch.setitem(handles._kept, -1, None)
    handles.Work.__new__(handles.Work).__del__()


@pytest.mark.slow
def test_an_infinity_on_one_rank_has_all_skip_the_step_of_a_grad_scaler(launch):
    reports = launch("scaled_gradients.py", 2).must_succeed().reports()
    assert set(reports) == {0, 1}


@pytest.mark.parametrize("how", ["", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_grad_scaler_is_recognised_through_whatever_stands_between(launch, how):
    reports = launch("scaler_callers.py", 2, arguments=[how]).must_succeed().reports()
    assert set(reports) == {0, 1}


def test_importing_loads_the_core_alone_and_leaves_the_classes_of_torch():
    program = """
import sys, torch
classes = torch.nn.Module, torch.amp.GradScaler, torch.optim.Optimizer
before = [dict(vars(kind)) for kind in classes]
import collective_core.torch as hvd
loaded = sorted(name for name in sys.modules if name.startswith("collective_core"))
optional = [name for name in loaded if name.split(".")[1:2] in (["extensions"], ["launch"], ["elastic"])]
assert not optional, optional
assert len(loaded) <= 70, (len(loaded), loaded)
assert {"DiLoCo", "data", "elastic", "nn", "ps"} <= {*dir(hvd)} & {*hvd.__all__}
missing = [name for name in hvd.__all__ if not hasattr(hvd, name)]
assert not missing, missing
hvd.init()
hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
hvd.nn.ShardedEmbedding(2, 2, hvd.nn.SGD(1.0))
assert [dict(vars(kind)) for kind in classes] == before
assert not hasattr(hvd, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LAUNCH_LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["collective_core", "collective_core.torch"])
def test_type_checkers_know_a_name_that_is_not_there(package):
    """For them a package with ``__getattr__`` has every name."""
    source = Path(importlib.util.find_spec(package).origin).read_text()
    assigned = [statement.targets[0] for statement in ast.parse(source).body if isinstance(statement, ast.Assign)]
    assert "__getattr__" in source
    assert "__getattr__" not in {node.id for target in assigned for node in ast.walk(target) if isinstance(node, ast.Name)}


@pytest.mark.parametrize(("quota", "ranks", "overlaps"), [(1.0, 1, False), (2.0, 1, True), (2.0, 2, False), (4.0, 2, True)])
def test_sums_beside_the_backward_pass_need_a_core_that_computes_nothing(monkeypatch, quota, ranks, overlaps):
    from collective_core.torch import handles

    monkeypatch.setattr(membership, "current", lambda: SimpleNamespace(cross_size=1, local_size=ranks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    monkeypatch.setattr(cores, "quota", lambda _process: quota)
    assert handles.can_overlap() is overlaps


def test_a_commit_waits_for_what_is_under_way_and_saves_nothing_of_a_failure(launch, tmp_path):
    reports = launch("committed_in_flight.py", 2, arguments=(str(tmp_path),)).must_succeed().reports()
    assert set(reports) == {0, 1}
