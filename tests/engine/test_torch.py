"""The PyTorch interface."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_operations(launch, n, hosts):
    reports = launch("torch_ops.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_training_equals_one_process_with_the_whole_batch(launch, n, hosts):
    reports = launch("training.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))
    assert len({entry["digest"] for entry in reports.values()}) == 1, "the replicas differ"


def test_two_runs_and_other_buckets_agree(launch):
    digests = {
        launch("training.py", 2, env={"COLLECTIVE_FUSION_MB": size}).must_succeed().reports()[0]["digest"] for size in ("0.002", "25")
    }
    assert len(digests) == 1
