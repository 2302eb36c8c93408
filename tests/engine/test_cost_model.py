"""The cost model: what it is fitted to, it finds again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.engine import cost_model

SHARE = 0.5  # two cores


@pytest.mark.parametrize("true", [(30e-6, 4e-6, 2e-6, 1e-9, 8e-6), (30e-6, 0.0, 2e-6, 1e-9, 0.0)])
def test_the_coefficients_behind_exact_times_are_found(true):
    points = [
        cost_model.Point(hosts, size, cost_model.predict(true, hosts, size, hosts * SHARE))
        for hosts in cost_model.FITTED
        for size in cost_model.SIZES
    ]
    assert cost_model.fit(points, SHARE) == pytest.approx(true, rel=1e-6, abs=1e-15)


def test_a_model_that_is_off_says_by_how_much():
    coefficients = (30e-6, 4e-6, 2e-6, 1e-9, 8e-6)
    exact = cost_model.predict(coefficients, 32, 1 << 20, 32 * SHARE)
    _, off = cost_model.comparison([cost_model.Point(32, 1 << 20, exact * 2)], coefficients, SHARE)
    assert off == pytest.approx(0.5)


def test_agreeing_takes_the_logarithm_of_many_hosts():
    assert [cost_model.terms(hosts, 0, 1.0)[1] for hosts in (2, 8, 9, 64, 1000)] == [1, 7, 4, 6, 10]


def test_what_a_sum_moves_with_connections_between_all_hosts_and_on_the_ring():
    assert cost_model.terms(4, 100, 1.0) == (1, 3 + 6, 4, 150, 1 + 2)
    assert cost_model.terms(4, 100, 1.0, has_mesh=False) == (1, 3 + 2, 4, 200, 1 + 6)
    assert [cost_model.terms(hosts, 1000, 1.0)[4] for hosts in (65, 66)] == [7 + 2, 7 + 130]
