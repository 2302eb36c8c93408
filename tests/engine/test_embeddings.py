"""Sharded embeddings: tables whose rows live on one rank each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cases import slow_but_last
from collective_core.extensions.sparse.id_table import IdTable
from collective_core.extensions.sparse.row_file import BYTES_PER_SLOT, RowFile
from collective_core.extensions.sparse.sharding import common_rows, part_of, place
from collective_core.extensions.sparse.table_plan import Costs, Table, plan_tables
from conftest import LAUNCH_LIMIT, WORKERS

torch = pytest.importorskip("torch")

from collective_core.extensions.sparse import shards  # noqa: E402
from collective_core.torch import checkpoint  # noqa: E402

sys.path.insert(0, str(WORKERS))


@pytest.mark.parametrize("sharding", slow_but_last("table_wise", "column_wise", "row_wise"))
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (3, 1), (2, 2), (2, 1)))
def test_training_equals_one_process_with_the_global_batch(launch, sharding, n, hosts):
    reports = launch("sharded_embeddings.py", n, hosts, (sharding,)).must_succeed().reports()
    assert set(reports) == set(range(n))


GIB = 1 << 30


def test_each_table_is_placed_where_the_squares_of_the_ranks_seconds_add_up_to_the_least():
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


def test_small_messages_that_were_held_up_make_no_network_infinitely_fast(monkeypatch):
    from collective_core.extensions.sparse import planner

    times = iter([0.003, 0.002, 0.001])  # of the small messages, of the large one, of rows in memory
    monkeypatch.setattr(planner, "_median_seconds", lambda _call: next(times))
    monkeypatch.setattr(planner.membership, "size", lambda: 2)
    monkeypatch.setattr(planner.barrier, "barrier", lambda: None)
    monkeypatch.setattr(planner, "broadcast_object", lambda costs, _root: costs)
    assert planner.measure_costs().bandwidth == pytest.approx(10 * (planner.LARGE / 2) / 0.002)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    slow_but_last(
        ((3, "column_wise"), (2, "row_wise")),
        ((2, "table_wise"), (3, "column_wise")),
        ((2, "column_wise"), (4, "column_wise")),
        ((2, "row_wise"), (3, "row_wise")),
        ((1, "row_wise"), (2, "column_wise")),
    ),
)
def test_a_checkpoint_loads_on_another_number_of_ranks(launch, tmp_path, before, after):
    n, sharding = before
    saved = launch("sharded_checkpoints.py", n, 1, (str(tmp_path), "save", sharding)).must_succeed().reports()
    m, other = after
    restored = launch("sharded_checkpoints.py", m, 1, (str(tmp_path), "go-on", other)).must_succeed().reports()
    assert set(saved) == set(range(n))
    assert set(restored) == set(range(m))
    assert {entry["digest"] for entry in restored.values()} == {saved[0]["digest"]}, "other numbers came back"
    for entry in restored.values():
        for got, want in zip(entry["end"], saved[0]["end"], strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_damaged_tables_are_passed_over_or_named(launch, tmp_path):
    launch("sharded_checkpoints.py", 2, 1, (str(tmp_path), "save", "row_wise")).must_succeed()
    last, before = (tmp_path / f"step-{step:012d}.tables" / "000001.safetensors" for step in (4, 2))
    last.write_bytes(last.read_bytes()[:-1])
    reports = launch("sharded_checkpoints.py", 2, 1, (str(tmp_path), "short", "row_wise")).must_succeed().reports()
    assert [entry["step"] for entry in reports.values()] == [2, 2]
    content = bytearray(before.read_bytes())
    content[-1] ^= 1
    before.write_bytes(content)
    reports = launch("sharded_checkpoints.py", 2, 1, (str(tmp_path), "wrong", "row_wise")).must_succeed().reports()
    assert len(reports) == 2
    for entry in reports.values():
        assert f"the checksum of {before} is wrong" in entry["error"]


def test_a_file_of_a_table_and_its_name_are_brought_to_the_disk(tmp_path, monkeypatch):
    brought = []
    monkeypatch.setattr(os, "fsync", lambda number: brought.append(os.readlink(f"/proc/self/fd/{number}")))
    shards.write(tmp_path / "x.safetensors", {"a": torch.zeros(2, 1)})
    assert brought == [str(tmp_path / ".x.safetensors.part"), str(tmp_path)]


@pytest.mark.slow
def test_a_step_that_is_saved_again_keeps_its_tables_until_it_is_whole(launch, tmp_path):
    reports = launch("sharded_checkpoints.py", 2, 1, (str(tmp_path), "again", "row_wise")).must_succeed().reports()
    assert len(reports) == 2


def test_a_file_of_a_table_is_one_of_safetensors(tmp_path):
    tensors = {"a/weight": torch.arange(6, dtype=torch.float32).view(3, 2), "a/state.sum": torch.zeros(0, 1, dtype=torch.float64)}
    path = tmp_path / "x.safetensors"
    written = shards.write(path, tensors)
    assert written == {"bytes": path.stat().st_size, "sha256": checkpoint.checksum(path)}
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert json.loads(raw[8 : 8 + length])["a/weight"] == {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}
    for name, array in shards.read(path).items():
        assert torch.equal(torch.from_numpy(array.copy()), tensors[name])
    for damaged in (b"", raw[:4], (1 << 40).to_bytes(8, "little") + raw[8:], raw[:8] + b"[" + raw[9:], raw.replace(b"[0, 24]", b"[0, 99]")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            shards.read(path)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_rows_in_two_shards_are_found_without_looking_at_each(size):
    for other_size in (1, 2, 3, 4, 5):
        for rows in (1, 3, 17):
            for one in [range(rank, rows, size) for rank in range(size)]:
                for other in [range(rank, rows, other_size) for rank in range(other_size)]:
                    both = common_rows(one, other)
                    assert list(both) == sorted(set(one) & set(other))
                    if len(both):
                        assert list(one)[part_of(one, both)] == list(both) == list(other)[part_of(other, both)]


def test_an_elastic_state_refuses_tables():
    from collective_core.torch import elastic

    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(2, 2))
    module.weight.collective_shard = object()
    with pytest.raises(ValueError, match=r"restore them there with hvd\.Checkpoints"):
        elastic.TorchState(module)


def test_a_sharded_part_that_lacks_what_is_asked_of_one_is_named(tmp_path):
    import collective_core.torch as hvd

    module = torch.nn.Linear(2, 2, bias=False)
    module.weight.collective_shard = types.SimpleNamespace(name="w", process_set=None, ranks=lambda: 1)
    with pytest.raises(hvd.CollectiveError, match=r"of a parameter, of type SimpleNamespace, has no send_gradients, update"):
        hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(hvd.CollectiveError, match=r"of model\.weight, of type SimpleNamespace, has no send_gradients, update"):
        hvd.Checkpoints(tmp_path, model=module)._tables()


@pytest.mark.parametrize("place", slow_but_last("file", "memory"))
def test_rows_of_a_rank_that_was_killed_come_back_from_the_checkpoint(tmp_path, place):
    from sharded_elastic import COLUMNS, ROWS, initial

    words = ["--min-np", "1", "-np", "2", sys.executable, str(WORKERS / "sharded_elastic.py"), str(tmp_path), "8", "5", place]
    done = subprocess.run([sys.executable, "-m", "collective_core.launch", *words], capture_output=True, text=True, timeout=LAUNCH_LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = torch.nn.Embedding(ROWS, COLUMNS, sparse=True, dtype=torch.float64)
    plain.load_state_dict({"weight": initial()})
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for step in range(8):
        ids = torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        plain(ids).square().sum().div(12).backward()
        optimizer.step()
    assert (tmp_path / "died").exists()
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end.*")]
    assert ends
    assert any(len(end["sizes"]) > 1 for end in ends), "nobody began again"
    for end in ends:
        found = torch.tensor(end["weight"], dtype=torch.float64)
        torch.testing.assert_close(found, plain.weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_rows_are_given_to_ids_that_occur_often_and_taken_from_those_out_of_use(launch, tmp_path):
    for n, action in ((2, "save"), (3, "load")):
        reports = launch("dynamic_embeddings.py", n, 1, (str(tmp_path), action)).must_succeed().reports()
        assert set(reports) == set(range(n))


def test_ids_are_found_among_many():
    table, generator, known = IdTable(), np.random.default_rng(0), {}
    for step in range(30):
        # Close together, so that they want the same places.
        ids = np.unique(generator.integers(-2000, 2000, 300) * (1 << 11))
        entries = table.find(ids)
        assert [known.get(i) for i in ids.tolist()] == [None if e < 0 else table.ids[e] for e in entries]
        new = ids[entries < 0]
        added = table.add(new, step)
        table.counts[added] = new
        known.update({i: i for i in new.tolist()})
        if step % 7 == 6:
            is_kept = generator.random(len(table)) < 0.5
            known = {i: i for i in table.ids[is_kept].tolist()}
            table.keep(is_kept)
        assert len(table) == len(known)
        everything = np.array(sorted(known))
        assert np.array_equal(table.ids[table.find(everything)], everything)
        assert np.array_equal(table.counts, table.ids)


@pytest.mark.parametrize(("n", "which"), slow_but_last((3, "all"), (2, "few")))
def test_a_table_in_a_file_is_trained_like_one_in_memory(launch, tmp_path, n, which):
    reports = launch("table_storage.py", n, 1, (str(tmp_path), which)).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.parametrize("slots", [0, 32, 64, 4096])
def test_a_cache_of_rows_forgets_nothing_and_takes_no_more_than_it_was_given(tmp_path, slots):
    rows, width = 1000, 3
    file = RowFile(tmp_path, (rows, width), np.float32, slots * (4 * width + BYTES_PER_SLOT))
    expected, generator = np.zeros((rows, width), np.float32), np.random.default_rng(0)
    for step in range(200):
        # Ids of a step that share sets: with 32 slots there are two.
        some = generator.permutation(rows)[: generator.integers(0, 120)]
        if step % 3:
            some = np.unique(some // 20 * 2)
        assert np.array_equal(file.read(some), expected[some])
        expected[some] += generator.integers(1, 9, (len(some), width))
        file.write(some[::2], expected[some[::2]])
        file.write(some[1::2], expected[some[1::2]])
        if step % 50 == 20:
            file.flush()
            assert np.array_equal(file.whole, expected)
        if step % 50 == 40:
            file.clear()
            file.whole[step] = expected[step] = step
    file.flush()
    assert np.array_equal(file.whole, expected)
    assert not list(tmp_path.iterdir())


def test_rows_in_use_are_read_from_the_file_once(tmp_path, monkeypatch):
    file, read = RowFile(tmp_path, (10_000, 4), np.float64, 64 * (32 + BYTES_PER_SLOT)), []
    monkeypatch.setattr(RowFile, "_read_file", lambda self, rows: read.extend(rows.tolist()) or self.whole[rows])
    hot = np.arange(40) * 7
    for step in range(20):
        file.read(hot)
        file.read(np.arange(4) + 1000 + 4 * step)  # one of each set, which must not push out those in use
    assert sorted(row for row in read if row in hot) == hot.tolist()


def test_threads_share_a_file_of_rows(tmp_path):
    file = RowFile(tmp_path, (1000, 4), np.int64, 256 * (32 + BYTES_PER_SLOT))
    file.whole[:] = np.arange(1000)[:, None]

    def read(seed):
        generator = np.random.default_rng(seed)
        found = (generator.permutation(1000)[:300] for _ in range(300))
        return all(np.array_equal(file.read(rows)[:, 0], rows) for rows in found)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(4)))


READS_IN_A_CHILD = """
import os, signal, sys
import numpy as np
from collective_core.extensions.sparse.row_file import RowFile
file = RowFile(sys.argv[1], (5000, 4), np.float32, 0)
file.read(np.arange(5000))
child = os.fork()
if child == 0:
    signal.alarm(20)
    file.read(np.arange(5000))
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def test_a_child_that_is_forked_reads_rows(tmp_path):
    subprocess.run([sys.executable, "-c", READS_IN_A_CHILD, str(tmp_path)], check=True, timeout=LAUNCH_LIMIT)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_rows_that_a_file_has_not_are_an_error(tmp_path, cache_bytes):
    file = RowFile(tmp_path, (100, 4), np.float32, cache_bytes)
    for rows in (np.array([3, 100]), np.array([-1, 3])):
        with pytest.raises(IndexError, match="out of range: there are 100"):
            file.read(rows)
        with pytest.raises(IndexError, match="out of range: there are 100"):
            file.write(rows, np.ones((2, 4), np.float32))
    file.flush()
    assert not file.whole.any()


def test_flushing_takes_little_memory_and_calls_have_no_end(tmp_path):
    file = RowFile(tmp_path, (20_000, 384), np.float32, 40 << 20)
    file._call = 1 << 31
    for begin in range(0, 20_000, 2000):
        file.write(np.arange(begin, begin + 2000), np.full((2000, 384), begin, np.float32))
    tracemalloc.start()
    try:
        file.flush()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 14 << 20
    assert np.array_equal(file.whole[:, 0], np.arange(20_000) // 2000 * 2000)


def test_a_disk_without_room_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"(?i)no space|too large"):
        RowFile(tmp_path, (1 << 40, 1 << 10), np.float64, 0)
    assert not list(tmp_path.iterdir())


def test_a_table_stays_right_when_a_program_moves_it_or_a_rank_fails(launch):
    reports = launch("sharded_details.py", 2).must_succeed().reports()
    assert set(reports) == {0, 1}


def test_ftrl_learns_nothing_at_a_rate_of_zero_and_goes_on_after_it():
    from collective_core.extensions.sparse.row_optimizers import FTRL, Update

    optimizer = FTRL()
    values, state = torch.ones(1, 2), {"z": torch.zeros(1, 2), "n": torch.zeros(1, 2)}
    for lr in (0.0, 0.5):
        before = values.clone()
        optimizer.update(Update(values, torch.ones(1, 2), state, lr, 1, lambda rows: rows.mean(1, keepdim=True)))
        assert torch.equal(values, before) == (lr == 0)
    assert torch.isfinite(values).all()
    with pytest.raises(ValueError, match=r"lr=0.0 is not possible"):
        FTRL(0.0)


def test_what_the_pages_show_runs_as_it_stands(launch, tmp_path, monkeypatch):
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.chdir(tmp_path)
    pages = [docs / "embeddings.md", docs / "slow-networks.md"]
    reports = launch("documented.py", 2, 1, tuple(map(str, pages))).must_succeed().reports()
    assert reports[0]["ran"] == reports[1]["ran"]
    assert reports[0]["unknown"] == [], "what is replaced stands in the pages"
    assert [entry.split()[0] for entry in reports[0]["ran"]].count("embeddings.md") >= 3
    assert [entry.split()[0] for entry in reports[0]["ran"]].count("slow-networks.md") >= 3
