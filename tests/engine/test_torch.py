"""The PyTorch interface."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_operations(launch, n, hosts):
    reports = launch("torch_ops.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (2, 1), (2, 2)])
def test_training_equals_one_process_with_the_whole_batch(launch, n, hosts):
    assert digest_of(launch("training.py", n, hosts), n)


def digest_of(outcome, n):
    reports = outcome.must_succeed().reports()
    assert set(reports) == set(range(n))
    digests = {entry["digest"] for entry in reports.values()}
    assert len(digests) == 1, "the replicas differ"
    return digests.pop()


def test_two_runs_and_other_buckets_agree(launch):
    """Of three ranks: the sum of two is the same in any order."""
    digests = {digest_of(launch("training.py", 3, env={"COLLECTIVE_FUSION_MB": size}), 3) for size in ("0.002", "25")}
    assert len(digests) == 1
