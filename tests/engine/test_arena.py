"""Arrays in the engine's own memory."""

from __future__ import annotations

import pytest
from cases import slow_but_last


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (2, 1), (3, 1), (7, 1), (8, 1), (16, 1), (4, 1), (4, 2), (2, 2)))
def test_same_bits_as_in_numpy(launch, n, hosts):
    reports = launch("arena.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))
    assert reports[0]["checked"] > 200
    assert len({entry["digest"] for entry in reports.values()}) == 1, "the ranks hold different bits"


@pytest.mark.slow
def test_lesser_instruction_sets_give_the_same_bits(launch):
    digests = {
        launch("arena.py", 2, env={"COLLECTIVE_SIMD": simd}).must_succeed().reports()[0]["digest"] for simd in ("default", "avx2", "")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("n", slow_but_last(2, 3))
def test_a_host_that_allows_no_large_mapping_still_works(launch, n):
    """ulimit -v: the arena is smaller than asked for, or missing on some ranks; results are right either way."""
    outcome = launch("small_arena.py", n)
    reports = outcome.must_succeed().reports()
    assert set(reports) == set(range(n))
    assert all(entry["right"] for entry in reports.values())
    assert "no room for" in reports[0]["error"]
