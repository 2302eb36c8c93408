"""Groups of tensors: the small ones travel as one, with the sums that they have alone."""

from __future__ import annotations

import pytest
import torch
from cases import slow_but_last
from collective_core.torch.ops import fusion

FUSED = ["g.fused", "g.4", "g.7"]  # one is too large, one of another type


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 1), (4, 2)))
def test_a_group_has_the_sums_of_its_tensors(launch, n, hosts):
    reports = launch("fused_groups.py", n, hosts).must_succeed().reports()
    assert {tuple(entry["submitted"]) for entry in reports.values()} == {tuple(FUSED)}
    for entry in reports.values():
        assert entry["warned"] == ""
        for part in ("'d.0'", "[2]", "[3]"):
            assert part in entry["disagreement"], "groups of as many elements, divided differently"
        assert entry["apart"] == ["mismatch", *(["b.fused"] if entry["rank"] else [])]


def test_ranks_that_fuse_differently_send_their_tensors_one_by_one(launch):
    reports = launch("fused_groups.py", 3, env={"FUSION_OF_THE_FIRST": "0.000001"}).must_succeed().reports()
    # The first fuses nothing, so that all of its tensors are under way already when the others find out.
    assert sorted(reports[0]["submitted"]) == sorted(["g.fused", *(f"g.{number}" for number in range(9))])
    for entry in reports.values():
        assert sorted(entry["submitted"]) == sorted(reports[0]["submitted"])
        assert "COLLECTIVE_FUSION_MB" in entry["warned"]
        assert "g.fused" in entry["warned"]


def test_what_is_fused():
    small, large = torch.ones(3), torch.ones(fusion.MAX_BYTES // 4 + 1)
    assert fusion.choose([small, large, small], 1 << 20) == [0, 2]
    assert fusion.choose([small, large], 1 << 20) == [], "one alone is not fused"
    assert fusion.choose([], 1 << 20) == []
    assert fusion.choose([small, small.double(), small.double(), small.double()], 1 << 20) == [1, 2, 3], "the commonest type"
    assert fusion.choose([small] * 4, 25) == [0, 1], "no more than the limit"
    assert fusion.choose([small] * 4, 0) == []
    assert fusion.choose([small.to_sparse(), small, small, small.to(torch.complex32)], 1 << 20) == [1, 2], "not what cannot be sent"
    assert fusion.checksum_of([torch.ones(2), torch.ones(3)], [0, 1]) != fusion.checksum_of([torch.ones(3), torch.ones(2)], [0, 1])
    assert fusion.checksum_of([small, small, large], [0, 1]) != fusion.checksum_of([small, large, small], [0, 2])
