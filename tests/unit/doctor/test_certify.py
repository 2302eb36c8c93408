"""`provision certify`: which host or link is accused, on simulated clusters with the noise of busy machines; and its script on real sockets.

Measurements of clusters are simulated here, because hundreds of runs of 64 hosts are; `tests/integration/test_certify.py` has real ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from golden_facts import facts_of
from typer.testing import CliRunner

from provision.base import resources
from provision.doctor.certify import decisions, fabric, measure, page
from provision.doctor.certify.decisions import Round, State
from provision.doctor.certify.measure import Target
from provision.doctor.certify.model import Certificate, Core, Device, Found, Group, HostMeasured, PairMeasured
from provision.doctor.certify.model import Pair as Measured
from provision.remote import ssh

KINDS = ("slow", "loss", "mtu", "port-mtu", "core", "flips")
IDS = {
    "slow": "slow-network",
    "loss": "packet-loss",
    "mtu": "mtu-differs",
    "port-mtu": "path-mtu",
    "core": "slow-core",
    "flips": "wrong-sums",
}


class Cluster:
    """Hosts with faults (host → kind), and links with faults, as they would be measured on machines that do other work, too."""

    def __init__(self, count: int, seed: int, faults: dict[str, str] | None = None, links: dict[frozenset[str], str] | None = None) -> None:
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self.random, self.faults, self.links, self.seed = random.Random(seed), faults or {}, links or {}, seed

    def first_pairs(self) -> list[tuple[str, str]]:
        """Those that meet first."""
        return list(decisions._tournament(self.names, 0, self.seed, set(self.names)))

    def busy(self, share: float, least: float, most: float) -> float:
        """A factor that is 1 but for this share of measurements."""
        return self.random.uniform(least, most) if self.random.random() < share else 1.0

    def host(self, name: str, times: int) -> HostMeasured:
        fault = self.faults.get(name)
        cores = []
        for number in range(4):
            speed = 500 * (1 - abs(self.random.gauss(0, 0.03))) * max(self.busy(0.005, 0.5, 0.7) for _ in range(times))
            speed *= 0.45 if (fault, number) == ("core", 2) else 1.0
            wrong = sum(self.random.random() < 0.05 for _ in range(100)) if fault == "flips" and number == 3 else 0
            cores.append(Core(core=number, kind="x", speed=speed, made=100, wrong=wrong))
        memory = 8 * max(self.busy(0.01, 0.4, 0.6) for _ in range(times))
        return HostMeasured(mtu=1400 if fault == "mtu" else 1500, memory_gbs=memory, cores=tuple(cores))

    def pair(self, one: str, other: str, times: int) -> PairMeasured:
        kinds = [self.faults.get(one), self.faults.get(other), self.links.get(frozenset((one, other)))]
        if "cut" in kinds:
            return PairMeasured(error="timed out")
        whole = self.busy(0.003, 0.3, 0.6) / (4 if "slow" in kinds else 1)
        up, down = (max(940 * math.exp(self.random.gauss(0, 0.05)) * self.busy(0.03, 0.2, 0.6) * whole for _ in range(times)) for _ in "ud")
        loss = 1 - 0.99 ** kinds.count("loss")
        lost = sum(self.random.random() < loss for _ in range(500)) + (self.random.random() < 0.01) * self.random.randint(1, 3)
        latency = 100 * math.exp(self.random.gauss(0, 0.2)) + (self.random.expovariate(1 / 3000) if self.random.random() < 0.01 else 0)
        big_lost = 10 if "port-mtu" in kinds else 0
        return PairMeasured(latency_us=latency, sent=500, lost=lost, big_sent=10, big_lost=big_lost, up_mbps=up, down_mbps=down)

    def certify(self) -> State:
        state = State(self.names, self.seed)
        while (planned := decisions.next_round(state)) is not None:
            check(planned)
            state.rounds += 1
            times = 1 if state.rounds <= state.planned else 3
            for name in planned.hosts:
                state.measured.setdefault(name, []).append(self.host(name, times))
            pairs = ((one, other, self.pair(one, other, times)) for one, other in planned.pairs)
            state.pairs += [Measured(round=state.rounds, caller=one, answerer=other, measured=made) for one, other, made in pairs]
        return state


def check(planned: Round) -> None:
    """No host does two things in a round."""
    names = [*planned.hosts, *itertools.chain(*planned.pairs)]
    assert len(names) == len(set(names))


def accused(found: Sequence[Found]) -> set[tuple[str | None, str]]:
    return {(each.host, each.id) for each in found}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 17, 64, 100])
def test_healthy_clusters_accuse_none_in_as_few_rounds_as_they_may(count: int) -> None:
    for seed in range(50 if count == 64 else 10):
        state = Cluster(count, seed).certify()
        assert decisions.findings(state) == []
        assert state.rounds <= math.ceil(math.log2(count)) + 3


@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_faults_are_found_and_no_other_host_is_accused(faulty: int) -> None:
    planted = missed = 0
    for seed in range(60):
        chosen = random.Random(seed)
        faults = {host: chosen.choice(KINDS) for host in chosen.sample([f"node{n}" for n in range(1, 65)], faulty)}
        state = Cluster(64, seed, faults).certify()
        found, expected = accused(decisions.findings(state)), {(host, IDS[kind]) for host, kind in faults.items()}
        assert found <= expected, (seed, faults)
        planted, missed = planted + len(expected), missed + len(expected - found)
        assert state.rounds <= 6 + 3
    assert missed <= 0.02 * planted, f"{missed} of {planted}"


@pytest.mark.parametrize(("kind", "count"), [*itertools.product(("cut", "port-mtu", "loss", "slow"), (6, 64)), ("cut", 2), ("loss", 2)])
def test_a_link_is_told_from_its_hosts(kind: str, count: int) -> None:
    found = 0
    for seed in range(10):
        cluster = Cluster(count, seed)
        one, other = sorted(cluster.first_pairs()[0])
        cluster.links[frozenset((one, other))] = kind
        made = decisions.findings(cluster.certify())
        assert {each.link for each in made} <= {(one, other)}
        assert not any(each.host for each in made)
        found += bool(made)
    assert found >= (7 if kind == "loss" or (kind, count) == ("slow", 64) else 10)


def test_where_most_pairs_are_bad_no_host_is_accused() -> None:
    names = {f"node{number}": "cut" for number in range(1, 8)}
    (found,) = decisions.findings(Cluster(8, 1, names).certify())
    assert (found.host, found.link, found.id) == (None, None, "no-connection")
