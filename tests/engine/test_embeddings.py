"""Sharded embeddings: tables whose rows live on one rank each."""

from __future__ import annotations

import pytest
from cases import slow_but_last

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (3, 1), (2, 2), (2, 1)))
def test_training_equals_one_process_with_the_global_batch(launch, sharding, n, hosts):
    reports = launch("sharded_embeddings.py", n, hosts, (sharding,)).must_succeed().reports()
    assert set(reports) == set(range(n))
