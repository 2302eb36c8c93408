"""The benchmark: what it accepts, what it computes, and that a small run gives the promised document."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine import limits, options, peers, report

CHECKOUT = Path(__file__).resolve().parents[2]


def bench(*arguments, package="benchmarks.engine", folder=CHECKOUT):
    return subprocess.run([sys.executable, "-m", package, *arguments], capture_output=True, text=True, timeout=120, cwd=folder)


def test_sizes_are_binary():
    assert options.parse_sizes("4K,64k,1M,8MiB,1G,12") == (4096, 65536, 1 << 20, 8 << 20, 1 << 30, 12)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sizes", "4Q"], "is not a size"),
        (["--sizes", "4K,,1M"], "is not a size"),
        (["--sizes", "7"], "multiple of 4"),
        (["--sizes", "0"], "multiple of 4"),
        (["--np", "0"], "--np '0'"),
        (["--np", "two"], "--np 'two'"),
        (["--rounds", "-1"], "--rounds '-1'"),
        (["--peers", "mpi,nccl"], "'nccl' is not a peer of the collectives"),
        (["--train", "mnist", "--peers", "mpi"], "'mpi' is not a peer of --train mnist"),
        (["--train", "imagenet"], "--train"),
        (["--batch", "8"], "--batch goes with --train"),
        (["--rows", "1000", "--train", "mnist"], "--rows goes with --train ctr or dlrm"),
        (["--overhead", "--train", "mnist"], "--overhead goes without"),
        (["--report", "x.svg", "--train", "mnist"], "plots "),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_2(arguments, complaint):
    with pytest.raises(options.UsageError) as caught:
        options.parse(arguments)
    assert complaint in str(caught.value)
    done = bench(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("benchmarks.engine: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_it_runs_under_another_name_as_it_does_on_hosts(tmp_path):
    shutil.copytree(CHECKOUT / "benchmarks/engine", tmp_path / "engine_benchmark")
    done = bench("--np", "2", "--sizes", "4K", "--peers", "none", "--rounds", "1", "--json", package="engine_benchmark", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["np"] == 2


def test_peers_are_all_unless_told_otherwise():
    assert options.parse([]).peers == ("mpi", "gloo")
    assert options.parse(["--train", "mlp"]).peers == ("ddp", "collective-ddp", "fsdp", "collective-fsdp")
    assert options.parse(["--peers", "none"]).peers == ()
    assert options.parse(["--peers", "gloo,gloo"]).peers == ("gloo",)


def test_limits_and_bus_bandwidth_agree():
    """An allreduce that takes exactly the time of the limit has exactly the limit's bus bandwidth."""
    size, bandwidth = 1 << 20, 40.0
    for ranks in (2, 3, 4):
        seconds = 2 * ranks * size / (bandwidth * 1e9)
        assert report.bus_bandwidth(size, seconds, ranks) == pytest.approx(limits.bus_limit_of_memory(bandwidth, ranks))
    for hosts, ranks in ((2, 2), (2, 4), (3, 6)):
        seconds = 2 * (hosts - 1) / hosts * size / (bandwidth * 1e9)
        assert report.bus_bandwidth(size, seconds, ranks) == pytest.approx(limits.bus_limit_of_network(bandwidth, ranks, hosts))


@pytest.mark.slow
def test_the_machines_limit_is_measured_and_drawn(tmp_path):
    """limit.c itself ends with an error where its sums are wrong."""
    sizes = (4096, 1 << 20)
    best = peers.measure_limit(3, sizes)
    assert 0 < best["allreduce_us"]["4096"] < best["allreduce_us"]["1048576"]
    sides = {report.LIMIT: best["allreduce_us"], "Open <MPI>": {}, report.OURS: {}}
    rows = [
        report.collective_row(name, "ordinary", "Allreduce", size, 3, [times.get(str(size), 1e3) / 1e6])
        for name, times in sides.items()
        for size in sizes
    ]
    document = {"np": 3, "hosts": 1, "rounds": 1, "results": rows, "missing": {}, "limit_gbs": 1.0, "memory_gbs": 9.0, **best}
    report.write(document, str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "Open &lt;MPI&gt;" in page
    assert "Open <MPI>" not in page


@pytest.mark.slow
def test_a_small_run_gives_the_document():
    done = bench("--np", "2", "--sizes", "4K,1M", "--peers", "mpi", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["limit_gbs"] > 0
    assert document["missing"] == {}
    for size in (4096, 1 << 20):
        rows = {(r["engine"], r["call"], r["memory"]): r for r in document["results"] if r["bytes"] == size}
        in_torch = {("hvd.allreduce_", "ordinary"), ("hvd.allreduce_", "adopted")}
        ours = {("cc.allreduce", "arena"), ("cc.allreduce", "ordinary"), *in_torch}
        assert set(rows) == {*(("collective_core", *each) for each in ours), ("mpi", "Allreduce", "ordinary")}
        for row in rows.values():
            assert (row["op"], row["np"]) == ("allreduce", 2)
            assert row["busbw_gbs"] == pytest.approx(size / row["median_us"] / 1e3, rel=1e-3, abs=5e-5)  # of rounded figures


def test_a_missing_peer_is_named(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = bench("--np", "2", "--sizes", "4K", "--peers", "gloo", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "missing: hvd.allreduce_ (no torch here)" in done.stdout
    assert "missing: gloo (no torch here)" in done.stdout


def test_ranks_that_mpirun_started_must_be_those_of_np(launch):
    outcome = launch("benchmarks.engine", 2, arguments=["--np", "3"])
    assert outcome.returncode == 2
    assert "the launcher started 2 ranks" in outcome.stderr


@pytest.mark.slow
def test_training_steps_are_measured():
    pytest.importorskip("torch")
    done = bench("--np", "2", "--train", "mnist", "--batch", "4", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["parameters"] == 21840
    assert {r["engine"] for r in document["results"]} == {"collective_core", *options.TRAINING_PEERS, "barrier", "none"}
    assert all(r["samples_per_second"] > 0 for r in document["results"])


@pytest.mark.slow
def test_steps_with_a_sharded_table_are_measured():
    pytest.importorskip("torch")
    done = bench("--np", "2", "--train", "ctr", "--rows", "5000", "--batch", "4", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    missing = document["missing"]
    assert set(missing) <= {"torchrec"}, missing
    assert [r["engine"] for r in document["results"]] == ["sharded", *(p for p in options.CTR_PEERS if p not in missing), "barrier", "none"]
    assert 26 <= document["rows_per_batch"] <= 4 * 26


@pytest.mark.slow
def test_what_the_engine_costs_is_measured():
    done = bench("--np", "2", "--overhead", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["side"] for row in document["overhead"]] == ["plain", "timeline", "flight recorder", "autotune"]
    assert document["init_s"] > 0
    assert document["gradient_bytes"] <= document["engine_bytes"] <= 1.1 * document["gradient_bytes"] + (64 << 20)
