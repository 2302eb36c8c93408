"""Training on slow networks: compressed gradients, LocalSGD and DiLoCo, and what is planned with them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cases import slow_but_last
from collective_core.extensions.slow_networks.communication import Network, as_matrix, plan
from collective_core.extensions.slow_networks.fragments import divide, schedule
from conftest import WORKERS

torch = pytest.importorskip("torch")

from collective_core.extensions.slow_networks import quantization  # noqa: E402

PATIENCE = 90


@pytest.mark.slow
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 2), (4, 2), (3, 1)))
def test_compressed_gradients(launch, n, hosts):
    reports = launch("compressed_gradients.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((3, 1), (4, 2), (2, 2)))
def test_local_sgd_and_diloco(launch, n, hosts):
    reports = launch("local_sgd.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))
    assert "DiLoCo(sync_every=50, bits=4)" in reports[0]["plan"]


@pytest.mark.slow
@pytest.mark.parametrize("dying", [9])
def test_a_rank_that_dies_between_two_synchronisations_costs_its_own_steps_alone(tmp_path, dying):
    command = [sys.executable, "-m", "collective_core.launch", "-np", "3", "--min-np", "2", sys.executable]
    script = [str(WORKERS / "elastic_diloco.py"), str(tmp_path), str(dying)]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("log.*")]
    ends = [log[-1]["end"] for log in logs if "end" in log[-1]]
    assert len(ends) == 3
    assert ends[0] == ends[1] == ends[2]
    survivors = [log for log in logs if "end" in log[-1] and log[0]["begin"] == 0]
    assert len(survivors) == 2
    for log in survivors:
        steps = [note["step"] for note in log if "step" in note]
        assert steps == [*range(1, len(steps) + 1)], "a step was lost or done twice"
        begins = [note for note in log if "begin" in note]
        assert begins[1]["own"] != begins[1]["outer"], "its own steps since the last synchronisation are lost"
    newcomer = next(log for log in logs if log[0]["begin"] > 0)
    assert newcomer[0]["begin"] % 6 == 0, "it came between two synchronisations"
    assert newcomer[0]["own"] == newcomer[0]["outer"]
    outer = [note["outer"] for log in logs for note in log if note.get("begin") == newcomer[0]["begin"]]
    assert all(each == outer[0] for each in outer)


@pytest.mark.parametrize("bits", quantization.WIDTHS)
def test_packed_values_are_off_by_half_a_level_at_most(bits):
    rows = torch.randn(3, 4 * quantization.BLOCK, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-6, 6, 4).view(3, 1)
    rows[1, : quantization.BLOCK] = 0
    packed = quantization.pack(rows, bits)
    assert packed.shape == (3, quantization.packed_bytes(rows.shape[1], bits))
    levels = rows.view(3, -1, quantization.BLOCK).abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)
    found = quantization.unpack(packed, rows.shape[1], bits)
    off = (found - rows).view(3, -1, quantization.BLOCK).abs()
    assert (off <= levels * 0.5001).all()
    assert torch.equal(quantization.pack(found, bits), packed), "what is packed again is the same"


def test_a_block_with_an_infinity_is_not_finite():
    rows = torch.ones(1, 2 * quantization.BLOCK)
    rows[0, 3] = float("inf")
    found = quantization.unpack(quantization.pack(rows, 8), rows.shape[1], 8)
    assert not torch.isfinite(found[0, : quantization.BLOCK]).any()
    assert torch.equal(found[0, quantization.BLOCK :], torch.ones(quantization.BLOCK))


def test_fragments_begin_one_after_the_other():
    plan_ = schedule(12, 3, 2)
    starts = {fragment: [] for fragment in range(3)}
    for fragment, found in starts.items():
        step = 0
        while step < 36:
            step = plan_.next_start(fragment, step)
            found.append(step)
    assert starts == {0: [4, 16, 28, 40], 1: [8, 20, 32, 44], 2: [12, 24, 36]}
    assert schedule(5, 1, 0).next_start(0, 7) == 10, "one that was cut off comes at its next turn"


@pytest.mark.parametrize("sizes", [[1] * 10, [100, 1, 1, 1, 1], [1, 1, 1, 1, 100], [5, 50, 5, 50, 5]])
@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_fragments_have_every_parameter_once_in_order(sizes, fragments):
    parts = divide(sizes, fragments)
    assert [number for part in parts for number in part] == [*range(len(sizes))]
    assert len(parts) == fragments
    assert all(parts)


def test_fragments_are_of_about_equal_size():
    assert divide([4, 4, 4, 4, 4, 4], 3) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="3 fragments"):
        divide([1, 1], 3)


def test_what_a_plan_says():
    found = plan([(1000, 1000), (1000,)], Network(2, 0.02, 12.5e6), sync_every=100, rank=4, ratio=0.01)
    costs = {choice.name.strip(): choice for choice in found.choices}
    assert costs["DistributedOptimizer"].bytes == 4 * 1_001_000
    assert costs["DistributedOptimizer"].milliseconds == pytest.approx(20 + 4004 / 12.5)
    assert costs["Compression.int8"].milliseconds == pytest.approx(20 + costs["Compression.int8"].bytes / 12.5e3)
    assert costs["Compression.powersgd(rank=4)"].bytes == 4 * (2000 * 4 + 1000)
    assert costs["Compression.topk(ratio=0.01)"].bytes == 8 * 10_010
    assert costs["DiLoCo(sync_every=100, bits=4)"].bytes == pytest.approx(costs["DistributedOptimizer"].bytes / 100 / 7.53, rel=0.01)
    assert found.as_data()["network"] == {"ranks": 2, "latency": 0.02, "bandwidth": 12.5e6}
    assert len(str(found).splitlines()) == len(found.choices) + 2
    alone = plan([(10, 10)], Network(1, 0.0, 1.0), sync_every=10, rank=1, ratio=0.5)
    assert all(choice.bytes == choice.milliseconds == 0 for choice in alone.choices)
    assert str(alone)


def test_what_is_a_matrix_for_powersgd():
    assert as_matrix((64, 32, 3, 3), 4) == (64, 288)
    assert as_matrix((64,), 4) == (64, 0)
    assert as_matrix((8, 8), 4) == (64, 0), "its factors would be as long as itself"
    assert as_matrix((), 4) == (1, 0)
    assert as_matrix((0, 5), 4) == (0, 0)
