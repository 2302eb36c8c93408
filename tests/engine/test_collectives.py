"""Results against NumPy, bit by bit, on one host and on several pretended ones."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
from cases import slow_but_last

#: (ranks, hosts): uneven hosts and ranks without a partner on the other hosts are among them.
PLACES = slow_but_last((1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (3, 3), (4, 2), (7, 3), (4, 3))
#: Settings that must change no bit.
SETTINGS = ({"COLLECTIVE_SOCKETS": "3"}, {"COLLECTIVE_SIMD": "default"}, {"COLLECTIVE_SINGLE_COPY": "0"})


@pytest.fixture(scope="module")
def bits_of(launch):
    """bits_of(ranks, hosts=1): a digest of all results in rank order, the same on all ranks. Every job runs once."""
    known = {}

    def run(n, hosts=1):
        if (n, hosts) not in known:
            known[n, hosts] = checked(launch("collectives.py", n, hosts, env={"COLLECTIVE_SUM_ORDER": "ranks"}), n)
        return known[n, hosts]

    return run


def checked(outcome, n):
    reports = outcome.must_succeed().reports()
    assert set(reports) == set(range(n))
    assert reports[0]["checked"] > 300
    seen = {entry["digest"] for entry in reports.values()}
    assert len(seen) == 1, "the ranks hold different bits"
    return seen.pop()


@pytest.mark.parametrize(("n", "hosts"), PLACES)
def test_every_collective_type_and_size(bits_of, n, hosts):
    assert bits_of(n, hosts)


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 2), (3, 3), (4, 2), (7, 3), (4, 3)))
def test_topology_and_run_do_not_change_a_bit(bits_of, n, hosts):
    assert bits_of(n, hosts) == bits_of(n)


@pytest.mark.slow
@pytest.mark.parametrize("settings", slow_but_last(*SETTINGS, {name: value for each in SETTINGS for name, value in each.items()}))
def test_connections_instruction_sets_and_copies_do_not_change_a_bit(launch, bits_of, settings):
    assert checked(launch("collectives.py", 4, 3, env=settings), 4) == bits_of(4)


@pytest.mark.parametrize(("n", "sockets"), slow_but_last((2, "1"), (2, "3"), (3, "1"), (5, "1"), (5, "3"), (3, "3")))
def test_hosts_with_one_rank_each_add_in_rank_order(launch, n, sockets):
    reports = launch("mesh.py", n, n, env={"COLLECTIVE_SOCKETS": sockets}).must_succeed().reports()
    assert [reports[rank]["checked"] for rank in range(n - 1)] == [41] * (n - 1)


@pytest.mark.parametrize(
    ("n", "hosts", "settings"),
    slow_but_last((4, 2, {"COLLECTIVE_SINGLE_COPY": "0"}), (6, 3, {"COLLECTIVE_SOCKETS": "3"}), (6, 3, {}), (4, 2, {})),
)
def test_sums_of_hosts_are_added_where_the_job_does_not_choose(launch, bits_of, n, hosts, settings):
    assert checked(launch("collectives.py", n, hosts, env=settings), n) != bits_of(n)


#: Whether a process may read the memory of a sibling that allows it: what the engine finds out in its own way.
READS_A_SIBLING = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t
kept, here = ctypes.create_string_buffer(b"here"), ctypes.create_string_buffer(4)
class Span(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("length", ctypes.c_size_t)]
read, done = os.pipe()
sibling = os.fork()
if sibling == 0:
    libc.prctl(0x59616D61, os.getppid(), 0, 0, 0)
    os.write(done, b"1")
    os.read(os.pipe()[0], 1)
os.read(read, 1)
reader = os.fork()
if reader == 0:
    mine, theirs = Span(ctypes.addressof(here), 4), Span(ctypes.addressof(kept), 4)
    got = libc.process_vm_readv(sibling, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    os._exit(0 if got == 4 else 1)
status = os.waitpid(reader, 0)[1]
os.kill(sibling, 9)
sys.exit(status != 0)
"""


def test_the_ranks_reach_each_other_where_the_system_allows_it(launch):
    is_allowed = subprocess.run([sys.executable, "-c", READS_A_SIBLING], check=False).returncode == 0
    for wish, expected in (("1", is_allowed), ("0", False)):
        outcome = launch("collective_core.check", 2, arguments=["--json"], env={"COLLECTIVE_SINGLE_COPY": wish})
        assert json.loads(outcome.must_succeed().stdout)["single_copy"] is expected


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_tensors_of_more_than_two_gibibytes(launch, hosts):
    """Of every collective. About 5 GB of memory: both ranks' tensors and what they send."""
    pytest.importorskip("torch")
    reports = launch("large.py", 2, hosts).must_succeed().reports()
    assert [entry["bytes"] for entry in reports.values()] == [2**31 + 17] * 2


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 2), (4, 2)))
def test_tensors_go_over_several_addresses_of_a_host(launch, n, hosts):
    rails = {"COLLECTIVE_ADDRESS": "127.0.0.2", "COLLECTIVE_RAILS": "127.0.0.1/32"}
    one = launch("rails.py", n, hosts, env={"COLLECTIVE_ADDRESS": "127.0.0.2"}).must_succeed().reports()
    two = launch("rails.py", n, hosts, env=rails).must_succeed().reports()
    assert len({entry["digest"] for entry in [*one.values(), *two.values()]}) == 1
    assert two[0]["between"] == one[0]["between"] + 2, "not one connection each way"


def test_an_address_that_is_missing_is_an_error(launch):
    outcome = launch("rails.py", 2, 2, env={"COLLECTIVE_RAILS": "198.51.100.0/24"}, keep_going=True)
    assert "has no address in COLLECTIVE_RAILS=198.51.100.0/24 on another card than 127.0.0.1; its interfaces: " in outcome.stderr


def test_ranks_placed_cyclically_agree(launch):
    """Not the rank order then (topology.h), but one order for all, so ranks still hold the same bits."""
    reports = launch("cyclic.py", 4, 2).must_succeed().reports()
    assert len({entry["digest"] for entry in reports.values()}) == 1


@pytest.mark.parametrize(("n", "hosts"), [(2, 1), (4, 2)])
def test_self_check(launch, n, hosts):
    if hosts == 1:
        document = json.loads(launch("collective_core.check", n, arguments=["--json"]).must_succeed().stdout)
        assert document["ok"]
        assert document["size"] == n
        assert document["transport"] == "shared memory"
        assert document["schema"] == 1
        assert document["version"] == document["library_version"] == metadata.version("collective-core")
    else:
        out = launch("check_on_hosts.py", n, hosts).must_succeed().stdout
        assert "all collectives correct" in out
        assert "tcp" in out
