"""Results against NumPy, bit by bit, on one host and on several pretended ones."""

from __future__ import annotations

import pytest

#: (ranks, hosts): uneven hosts and ranks without a partner on the other hosts are among them.
PLACES = [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (3, 3), (4, 2), (7, 3)]


@pytest.fixture(scope="module")
def digests():
    return {}


@pytest.mark.parametrize(("n", "hosts"), PLACES)
def test_every_collective_type_and_size(launch, digests, n, hosts):
    reports = launch("collectives.py", n, hosts).must_succeed().reports()
    assert set(reports) == set(range(n))
    assert reports[0]["checked"] > 300
    seen = {entry["digest"] for entry in reports.values()}
    assert len(seen) == 1, "the ranks hold different bits"
    digests[n, hosts] = seen.pop()


@pytest.mark.parametrize(("n", "hosts"), [(2, 2), (3, 3), (4, 2), (7, 3)])
def test_topology_and_run_do_not_change_a_bit(digests, n, hosts):
    if (n, hosts) not in digests or (n, 1) not in digests:
        pytest.skip("the runs to compare did not take place")
    assert digests[n, hosts] == digests[n, 1]


def test_the_number_of_connections_changes_no_bit(launch, digests):
    reports = launch("collectives.py", 3, 3, env={"COLLECTIVE_SOCKETS": "3"}).must_succeed().reports()
    if (3, 1) in digests:
        assert reports[0]["digest"] == digests[3, 1]


def test_lesser_instruction_sets_give_the_same_bits(launch, digests):
    reports = launch("collectives.py", 3, env={"COLLECTIVE_SIMD": "default"}).must_succeed().reports()
    if (3, 1) in digests:
        assert reports[0]["digest"] == digests[3, 1]


def test_ranks_placed_cyclically_agree(launch):
    """Not the rank order then (topology.h), but one order for all, so ranks still hold the same bits."""
    reports = launch("cyclic.py", 4, 2).must_succeed().reports()
    assert len({entry["digest"] for entry in reports.values()}) == 1


@pytest.mark.parametrize(("n", "hosts"), [(2, 1), (4, 2)])
def test_self_check(launch, n, hosts):
    import json

    if hosts == 1:
        document = json.loads(launch("collective_core.check", n, arguments=["--json"]).must_succeed().stdout)
        assert document["ok"]
        assert document["size"] == n
        assert document["transport"] == "shared memory"
        assert document["schema"] == 1
    else:
        out = launch("check_on_hosts.py", n, hosts).must_succeed().stdout
        assert "all collectives correct" in out
        assert "tcp" in out
