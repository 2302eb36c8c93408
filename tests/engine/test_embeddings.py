"""Sharded embeddings: tables whose rows live on one rank each."""

from __future__ import annotations

import json

import pytest
from cases import slow_but_last
from collective_core.common.sharding import place
from collective_core.common.table_plan import Costs, Table, plan_tables

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (3, 1), (2, 2), (2, 1)))
def test_training_equals_one_process_with_the_global_batch(launch, sharding, n, hosts):
    reports = launch("sharded_embeddings.py", n, hosts, (sharding,)).must_succeed().reports()
    assert set(reports) == set(range(n))


GIB = 1 << 30


def test_each_table_is_placed_where_the_slowest_rank_is_done_first():
    tables = [
        Table("days", 7, 16),
        Table("users", 500_000_000, 16),
        Table("pages", 200_000, 8, ids_per_sample=0.01),
        Table("texts", 40_000, 4096, ids_per_sample=0.1),
    ]
    plan = plan_tables(tables, ranks=8, memory=16 * GIB, batch=2048)
    assert list(plan.choices) == ["days", "users", "pages", "texts"]
    # A whole copy of the large one exceeds a rank; of the small one the gradient is less than what a lookup costs.
    assert plan.choices["days"].sharding == "replicated"
    assert plan.choices["users"].sharding == "row_wise"
    assert "a rank would hold 59.6 GiB of 16 GiB" in plan.choices["users"].rejected["table_wise"]
    # Few rows in few messages: the others of one owner have a message where they would have seven.
    assert plan.choices["pages"].sharding == "table_wise"
    assert max(plan.bytes_per_rank) <= 16 * GIB
    assert len(plan.bytes_per_rank) == 8
    assert json.loads(json.dumps(plan.as_dict()))["choices"][1]["table"]["rows"] == 500_000_000
    text = plan.explain()
    for name, choice in plan.choices.items():
        assert f"{name} (" in text
        assert choice.sharding in text
        assert set(choice.rejected) == {"row_wise", "table_wise", "column_wise", "replicated"} - {choice.sharding}
    assert plan.options("users") == {
        "num_embeddings": 500_000_000,
        "embedding_dim": 16,
        "sharding": "row_wise",
        "owner": 0,
        "name": "users",
    }
    with pytest.raises(ValueError, match=r"torch.nn.Embedding\(7, 16\)"):
        plan.options("days")


def test_small_tables_are_spread_over_owners():
    tables = [Table(f"t{number}", 100_000, 8, ids_per_sample=0.01) for number in range(8)]
    plan = plan_tables(tables, ranks=4, memory=GIB, batch=1024)
    owners = [choice.owner for choice in plan.choices.values() if choice.sharding == "table_wise"]
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_a_plan_rests_on_is_what_the_costs_say():
    table = [Table("t", 2000, 16, ids_per_sample=1)]
    slow_messages = plan_tables(table, 2, GIB, 1000, Costs(bandwidth=1e9, latency=1.0, memory_bandwidth=1e9))
    slow_network = plan_tables(table, 2, GIB, 10, Costs(bandwidth=1e3, latency=0.0, memory_bandwidth=1e9))
    assert slow_messages.choices["t"].sharding == "replicated"
    assert slow_network.choices["t"].sharding == "row_wise"


def test_a_table_that_fits_nowhere_is_an_error_that_says_what_it_needs():
    with pytest.raises(ValueError, match=r"huge .* fits nowhere: row_wise: a rank would hold 59.6 GiB of 1 GiB") as caught:
        plan_tables([Table("huge", 1_000_000_000, 8, state=1)], 1, GIB, 1)
    assert "column" in str(caught.value)
    with pytest.raises(ValueError, match="different names"):
        plan_tables([Table("a", 1, 1), Table("a", 2, 1)], 1, GIB, 1)


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_number_of_a_table_is_on_one_rank(sharding, size):
    for rows in (1, 2, 7, 20):
        placement = place(sharding, rows, 9, size, owner=size - 1)
        found = []
        for rank in range(size):
            assert placement.shape(rank) == (len(placement.rows_of(rank)), len(range(9)[placement.columns_of(rank)]))
            for number, row in enumerate(placement.rows_of(rank)):
                found += [(row, column) for column in range(9)[placement.columns_of(rank)]]
                if sharding != "column_wise":
                    assert placement.position(row) == placement.row_bounds[rank] + number
        assert sorted(found) == [(row, column) for row in range(rows) for column in range(9)]


def test_a_plan_from_measured_costs_is_the_same_on_all_ranks(launch):
    reports = launch("table_costs.py", 2).must_succeed().reports()
    assert set(reports) == {0, 1}
