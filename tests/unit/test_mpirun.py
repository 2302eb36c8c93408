"""mpirun's command line, word for word, and what it must never hold."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from provision.base.errors import UsageError
from provision.launch import mpirun

HOSTS = [("10.0.0.1", 2), ("10.0.0.2", 2)]
TWO_HOSTS: dict[str, Any] = {
    "mpirun": "/opt/p/venv/bin/mpirun",
    "prefix": "/opt/p/venv",
    "hosts": HOSTS,
    "hostfile": "/tmp/job/hostfile",
    "np": 4,
    "networks": ["10.0.0.0/24"],
    "ssh_config": "/opt/p/ssh/config",
    "environment": {"COLLECTIVE_SECRET": "s3cr3t", "COLLECTIVE_NETWORK": "10.0.0.0/24"},
    "program": ["/opt/p/venv/bin/python", "train_mnist.py", "--dataset-name=digits (UCI, 8×8)"],
    "as_root": True,
    "oversubscribe": False,
}


def parameter(argv: list[str], name: str) -> str | None:
    return next((argv[at + 2] for at, word in enumerate(argv) if word == "--mca" and argv[at + 1] == name), None)


def test_two_hosts_word_for_word() -> None:
    assert shlex.join(mpirun.command(**TWO_HOSTS)) == (
        "/opt/p/venv/bin/mpirun --allow-run-as-root --prefix /opt/p/venv --hostfile /tmp/job/hostfile -np 4 --map-by slot --bind-to none "
        "--tag-output --mca pml ob1 --mca btl self,vader,tcp --mca btl_vader_single_copy_mechanism none --mca orte_keep_fqdn_hostnames 1 "
        "--mca plm_rsh_no_tree_spawn 1 --mca plm_rsh_agent ssh --mca plm_rsh_args '-F /opt/p/ssh/config' "
        "--mca btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24 -x COLLECTIVE_NETWORK -x COLLECTIVE_SECRET "
        "/opt/p/venv/bin/python train_mnist.py '--dataset-name=digits (UCI, 8×8)'"
    )


def test_a_distributions_mpirun_on_this_machine_alone_needs_little() -> None:
    one = {**TWO_HOSTS, "mpirun": "/usr/bin/mpirun", "prefix": "", "hosts": [("localhost", 2)], "np": 2, "networks": [], "ssh_config": ""}
    argv = mpirun.command(**{**one, "environment": {}, "as_root": False, "tag_output": False})
    assert not {"--prefix", "--allow-run-as-root", "--tag-output", "-x"} & set(argv)
    assert parameter(argv, "btl_tcp_if_include") is parameter(argv, "oob_tcp_if_include") is parameter(argv, "plm_rsh_args") is None


def test_no_value_of_the_environment_is_on_the_command_line() -> None:
    argv = mpirun.command(**TWO_HOSTS)
    assert not any("s3cr3t" in word for word in argv)
    assert argv[argv.index("COLLECTIVE_SECRET") - 1] == "-x"


def test_several_networks_go_to_both_layers() -> None:
    argv = mpirun.command(**{**TWO_HOSTS, "networks": ["10.0.0.0/24", "fd00:1::/64"]})
    assert parameter(argv, "btl_tcp_if_include") == parameter(argv, "oob_tcp_if_include") == "10.0.0.0/24,fd00:1::/64"


def test_more_ranks_than_slots_only_when_told() -> None:
    with pytest.raises(UsageError, match=r"5 ranks, but the 2 host\(s\) have 4 slots"):
        mpirun.command(**{**TWO_HOSTS, "np": 5})
    argv = mpirun.command(**{**TWO_HOSTS, "np": 5, "oversubscribe": True})
    assert "--oversubscribe" in argv
    assert parameter(argv, "mpi_yield_when_idle") == "1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"np": 0}, "0 ranks"),
        ({"ssh_config": "/home/a b/config"}, "path holds a space"),
        ({"environment": {"A=1": "x"}}, "not the name of an environment variable"),
        ({"environment": {"A B": "x"}}, "not the name of an environment variable"),
    ],
)
def test_what_mpirun_would_misread_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        mpirun.command(**{**TWO_HOSTS, **change})


def test_the_hostfile_keeps_the_order_of_the_hosts() -> None:
    assert mpirun.hostfile_text([("node2", 8), ("10.0.0.1", 1)]) == "node2 slots=8\n10.0.0.1 slots=1\n"


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ([("a b", 1)], "not an address"),
        ([("", 1)], "not an address"),
        ([("a#", 1)], "not an address"),
        ([("a", 0)], "at least one"),
        ([("a", 1), ("b", 1), ("a", 1)], "listed twice"),
    ],
)
def test_a_hostfile_that_would_be_misread_is_refused(hosts: list[tuple[str, int]], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        mpirun.hostfile_text(hosts)


@pytest.mark.parametrize(
    ("slots", "np", "counts"),
    [
        ((2, 2), 4, [2, 2]),
        ((2, 2), 2, [1, 1]),
        ((2, 2), 3, [2, 1]),
        ((1, 4), 4, [1, 3]),
        ((1, 4), 9, [3, 6]),
        ((8, 1, 8), 3, [1, 1, 1]),
        ((4,), 1, [1]),
        ((1,), 4, [4]),
    ],
)
def test_ranks_are_spread_over_all_hosts(slots: tuple[int, ...], np: int, counts: list[int]) -> None:
    hosts = [(f"h{number}", count) for number, count in enumerate(slots)]
    assert mpirun.spread(hosts, np, oversubscribe=True) == [(f"h{number}", count) for number, count in enumerate(counts)]
    if np > sum(slots):
        for place in (mpirun.spread, mpirun.fill):
            with pytest.raises(UsageError, match=r"ranks, but the \d host\(s\) have \d+ slots.*\n.*--oversubscribe"):
                place(hosts, np)
        assert sum(count for _, count in mpirun.fill(hosts, np, oversubscribe=True)) == np


def test_fewer_ranks_than_hosts_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot take part on all 2 hosts"):
        mpirun.spread(HOSTS, 1)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[1,0]<stdout>:Train Epoch: 1", "Train Epoch: 1"),
        ("[1,0]<stdout>: indented", " indented"),
        ("[1,12]<stderr>:Traceback", "rank 12: Traceback"),
        ("[1,0]<stderr>:warning", "rank 0: warning"),
        ("Loss: 0.4[1,0]<stdout>:", "Loss: 0.4"),
        ("mpirun's own words", "mpirun's own words"),
    ],
)
def test_lines_lose_their_tags(line: str, shown: str) -> None:
    assert mpirun.readable(line) == shown
