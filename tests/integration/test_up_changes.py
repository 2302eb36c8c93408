"""Later runs that change what is installed, and ``provision bench``, on ready hosts."""

from __future__ import annotations

import pytest
from hosts import good, provision, report, root

from provision.sandbox import Sandbox

pytestmark = pytest.mark.slow


def test_the_distributions_open_mpi_takes_the_wheels_place(ready_sandbox):
    cluster: Sandbox = ready_sandbox("distribution")
    document = report(good(provision("up", str(cluster.inventory), "--torch", "none", "--openmpi", "distribution", "--json")))
    assert document["smoke"]["size"] == 4
    versions = {host["openmpi"] for host in document["hosts"]}
    assert len(versions) == 1
    assert versions.pop() in root(cluster.hosts[0], "/usr/bin/mpirun --version")
    assert root(cluster.hosts[0], "ls /opt/provision/venv/bin/mpirun 2>/dev/null || true") == ""


def test_a_host_that_cannot_build_the_engine_stops_nobody_else(ready_sandbox, tmp_path, monkeypatch):
    cluster: Sandbox = ready_sandbox("no-build")
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))  # no build is kept
    one, two = cluster.hosts
    for host in (one, two):
        root(host, "rm /opt/provision/venv/lib/python3*/site-packages/collective_core/*.so")
    root(one, "rm -rf /opt/provision/src && touch /opt/provision/src")
    result = provision("up", str(cluster.inventory), "--no-smoke", "--json")
    assert result.returncode == 1
    states = {host["host"]: host["state"] for host in report(result)["hosts"]}
    assert states == {"node1": "failed", "node2": "installed"}
    root(two, "/opt/provision/venv/bin/python -c 'import collective_core'")
    root(one, "rm /opt/provision/src")
    good(provision("up", str(cluster.inventory)))  # completes it


def test_bench_measures_the_pair_more_and_more_ranks_and_training(ready_sandbox, tmp_path):
    cluster: Sandbox = ready_sandbox("bench")
    page = tmp_path / "page.html"
    words = ("bench", str(cluster.inventory), "--sizes", "4K,1M", "--rounds", "2", "--repetitions", "1", "--out", str(page))
    measured = report(good(provision(*words, "--json")))
    assert [pair["hosts"] for pair in measured["pairs"]] == [["node1", "node2"]]
    assert [run["np"] for run in measured["ranks"]] == [2, 4]
    assert [run["np"] for run in measured["training"]] == [1, 2, 4]
    assert all(result["busbw_gbs"] > 0 for run in [*measured["pairs"], *measured["ranks"]] for result in run["results"])
    assert all(host["cores"] > 0 for host in measured["hosts"])
    assert "node1" in page.read_text()
    again = good(provision(*words, "--no-pairs", "--no-training"))
    assert "the page: " in again.stdout
    assert "4 figures not compared: one launch is not enough" in again.stdout
    refused = provision("bench", str(cluster.inventory), "--sizes", "big")
    assert (refused.returncode, "invalid --sizes big" in refused.stderr) == (2, True)
