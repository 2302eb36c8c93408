"""The cost model: what it is fitted to, it finds again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.engine import cost_model, simulation

CORES = 2


def _counted(hosts: int, size: int) -> simulation.Simulated:
    steps = hosts.bit_length()
    return simulation.Simulated(hosts, "allreduce", size, steps, 0.0, hosts * (steps * steps + 3), 2 * hosts * size, 0, 0)


COUNTS = {(hosts, size): _counted(hosts, size) for hosts in (*cost_model.FITTED, *cost_model.PREDICTED) for size in cost_model.SIZES}


@pytest.mark.parametrize("true", [(30e-6, 4e-6, 2e-6, 1e-9, 8e-6), (30e-6, 0.0, 2e-6, 1e-9, 0.0)])
def test_the_coefficients_behind_exact_times_are_found(true):
    points = [
        cost_model.Point(hosts, size, cost_model.predict(true, one, CORES))
        for (hosts, size), one in COUNTS.items()
        if hosts in cost_model.FITTED
    ]
    assert cost_model.fit(points, COUNTS, CORES) == pytest.approx(true, rel=1e-6, abs=1e-15)


def test_a_model_that_is_off_says_by_how_much():
    coefficients = (30e-6, 4e-6, 2e-6, 1e-9, 8e-6)
    exact = cost_model.predict(coefficients, COUNTS[32, 1 << 20], CORES)
    _, off = cost_model.comparison([cost_model.Point(32, 1 << 20, exact * 2)], COUNTS, coefficients, CORES)
    assert off == pytest.approx(0.5)
