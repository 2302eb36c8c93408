"""`provision certify`: whom it accuses, on simulated clusters with the noise of busy machines; and its script on real sockets.

Measurements of clusters are simulated here, because hundreds of runs of 64 hosts are; `tests/integration/test_certify.py` has real ones.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from invented_hosts import FAULTS, changed, host
from typer.testing import CliRunner

from provision.base import resources
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Problem
from provision.catalog import OURS
from provision.cli import certify as command
from provision.cli.main import app
from provision.doctor.certify import allreduce, certification, decisions, fabric, measure, page
from provision.doctor.certify.decisions import Round, State
from provision.doctor.certify.model import Certificate, Group, HostMeasured, PairMeasured, Part, Target
from provision.doctor.certify.model import Pair as Measured
from provision.remote import ssh
from provision.survey import collect
from provision.survey.model import Amd, AmdGpu


class Cluster:
    """Hosts with faults (host → kind), and links with faults, as they would be measured on machines that do other work, too."""

    mbps = 0.0

    def __init__(self, count: int, seed: int, faults: dict[str, str] | None = None, links: dict[frozenset[str], str] | None = None) -> None:
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self.random, self.faults, self.links, self.seed = random.Random(seed), faults or {}, links or {}, seed

    def first_pairs(self) -> list[tuple[str, str]]:
        """Those that meet first."""
        return list(decisions._tournament(State(measured={name: [] for name in self.names}, seed=self.seed, rounds=1)))

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
            cores.append(Part(core=number, kind="x", speed=speed, made=100, wrong=wrong))
        memory = 8 * max(self.busy(0.01, 0.4, 0.6) for _ in range(times))
        return HostMeasured(memory_gbs=memory, cores=tuple(cores))

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
        mtu = {name: 1400 if fault == "mtu" else 1500 for name, fault in self.faults.items()}
        hosts = {name: Target(address="", mtu=mtu.get(name, 1500), mbps=self.mbps) for name in self.names}
        state = State(hosts, self.seed)
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


def accused(found: Iterable[Problem]) -> set[tuple[str | None, str]]:
    return {(each.host, each.id) for each in found}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 17, 64, 100])
def test_healthy_clusters_accuse_none_in_as_few_rounds_as_they_may(count: int) -> None:
    for seed in range(50 if count == 64 else 10):
        state = Cluster(count, seed).certify()
        assert decisions.findings(state) == []
        assert state.rounds <= (count - 1 + count % 2 if 2 < count < 6 else math.ceil(math.log2(count))) + 3


@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_faults_are_found_and_no_other_host_is_accused(faulty: int) -> None:
    planted = missed = 0
    for seed in range(60):
        chosen = random.Random(seed)
        faults = {host: chosen.choice(list(FAULTS)) for host in chosen.sample([f"node{n}" for n in range(1, 65)], faulty)}
        state = Cluster(64, seed, faults).certify()
        found, expected = accused(decisions.findings(state)), {(host, FAULTS[kind]) for host, kind in faults.items()}
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
        assert {(each.where, each.host) for each in made} <= {(f"{one} – {other}", other)}
        found += bool(made)
    assert found >= (10 if kind in ("cut", "port-mtu") else 7)


def test_where_most_pairs_are_bad_no_host_is_accused() -> None:
    names = {f"node{number}": "cut" for number in range(1, 8)}
    (found,) = decisions.findings(Cluster(8, 1, names).certify())
    assert (found.host, found.where, found.id) == (None, "cluster", "no-connection")


@pytest.mark.parametrize(("kind", "count"), [*itertools.product(("cut", "loss", "slow", "late", "port-mtu"), (3, 4, 5, 8))])
def test_a_bad_host_of_a_few_is_named(kind: str, count: int) -> None:
    for seed in range(20):
        found = decisions.findings(Exact(count, seed, {"node2": kind}).certify())
        assert accused(found) == {("node2", {**FAULTS, "cut": "no-connection", "late": "high-latency"}[kind])}, seed


def test_hosts_that_are_lost_take_no_rounds() -> None:
    state = State(targets(*"abcdefghi"), measured={name: [HostMeasured()] for name in "acegi"}, rounds=1)
    assert state.planned == 1 + 5  # all pairs of five hosts, in place of log2(9)
    state.rounds = 2
    planned = decisions.next_round(state)
    assert planned is not None
    assert len(planned.pairs) == 2
    assert set(itertools.chain(*planned.pairs)) <= set("acegi")
    assert decisions.next_round(State(targets("a", "b"), rounds=1)) is None  # both are lost


@pytest.mark.parametrize(("count", "accused_hosts"), [(1, ["node1"]), (4, [f"node{number}" for number in range(1, 5)]), (5, [None])])
def test_where_most_hosts_are_silent_no_host_is_accused(count: int, accused_hosts: list[str | None]) -> None:
    """Then it is this machine that is too busy to hear them. One that the survey has not reached stays accused."""
    names = [f"node{number}" for number in range(1, 9)]
    silent = dict.fromkeys(names[:count], "the measurement did not end: it did not end in time")
    state = State(targets(*names), measured={name: [HostMeasured()] for name in names[count:]}, lost={**silent, "down": "no route"})
    assert [each.host for each in decisions.findings(state)] == [*accused_hosts, "down"]


def test_two_dead_hosts_of_eight_are_named_and_what_was_bad_once_is_nothing() -> None:
    for seed in range(20):
        found = decisions.findings(Exact(8, seed, {"node1": "cut", "node2": "cut"}).certify())
        assert {each.host for each in found} == {"node1", "node2"}, seed
        assert decisions.findings(Exact(3, seed, {"node2": "cut"}, transient=2).certify()) == []


class Exact(Cluster):
    """Measurements without noise. ``transient``: so many pairs are bad when they are measured first, and no other."""

    def __init__(self, count: int, seed: int, faults: dict[str, str], transient: int | None = None) -> None:
        super().__init__(count, seed, faults)
        self.transient, self.met = transient, set[frozenset[str]]()

    def host(self, _name: str, _times: int) -> HostMeasured:
        return HostMeasured(memory_gbs=8)

    def pair(self, one: str, other: str, _times: int) -> PairMeasured:
        kinds, link = {self.faults.get(one), self.faults.get(other)} - {None}, frozenset((one, other))
        if self.transient is not None and kinds:
            kinds = kinds if link not in self.met and len(self.met) < self.transient else set()
            self.met.add(link)
        if "cut" in kinds:
            return PairMeasured(error="timed out")
        speed, lost, big_lost = 90 if "slow" in kinds else 940, 50 * ("loss" in kinds), 10 * ("port-mtu" in kinds)
        late = 9000 if "late" in kinds else 100
        return PairMeasured(latency_us=late, sent=500, lost=lost, big_sent=10, big_lost=big_lost, up_mbps=speed, down_mbps=speed)


H100 = "NVIDIA H100 80GB HBM3"


def targets(*names: str) -> dict[str, Target]:
    return {name: Target(address=f"127.0.8.{number}", mtu=1500) for number, name in enumerate(names, 1)}


def of_devices(*devices: Part) -> set[tuple[str | None, str]]:
    """The findings on hosts with a GPU each, which were measured twice."""
    names = [f"h{number}" for number in range(len(devices))]
    measured = {name: [HostMeasured(memory_gbs=8, devices=(each,))] * 2 for name, each in zip(names, devices, strict=True)}
    return accused(decisions.findings(State(targets(*names), measured=measured, rounds=9)))


def test_gpus_are_compared_with_the_catalogue_and_with_each_other() -> None:
    good = Part(kind=H100, speed=340e3, made=100, memory_gbs=2800, to_gbs=55, from_gbs=55)
    assert of_devices(good, good) == set()
    assert of_devices(good, good.model_copy(update={"speed": 150e3})) == {("h1", "slow-gpu")}  # of 494.5
    assert of_devices(good, good, good.model_copy(update={"speed": 250e3})) == {("h2", "slow-gpu")}  # the others are faster
    assert of_devices(good.model_copy(update={"memory_gbs": 1000})) == {("h0", "slow-gpu-memory")}
    assert of_devices(good.model_copy(update={"from_gbs": 12})) == {("h0", "slow-pcie")}
    assert of_devices(good.model_copy(update={"kind": "another", "speed": 1})) == set()  # nothing is known of it
    assert of_devices(good.model_copy(update={"wrong": 1})) == {("h0", "wrong-sums")}
    assert of_devices(Part(kind=H100, error="CUDA error: uncorrectable ECC error encountered")) == {("h0", "gpu-failed")}


def test_a_core_whose_process_ends_is_not_accused_of_wrong_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    space = script_space()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    monkeypatch.setitem(space, "core_speed", lambda core, _seconds: os._exit(9) if core else (300.0, 0, 5))
    cores = tuple(Part.model_validate(each) for each in space["core_speeds"](0.1))
    assert [(core.made, core.wrong) for core in cores] == [(5, 0), (0, 0)]
    state = State(targets("a"), measured={"a": [HostMeasured(memory_gbs=8, cores=cores)] * 2})
    assert accused(decisions.findings(state)) == {("a", "core-failed")}
    state.measured["a"][1] = HostMeasured(memory_gbs=8, cores=tuple(each.model_copy(update={"speed": 300.0}) for each in cores))
    assert decisions.findings(state) == []


def test_a_gpu_that_fails_at_its_start_leaves_the_other_measurements() -> None:
    class Cuda:
        def get_device_name(self, _number: int) -> str:
            raise Exception("CUDA call failed lazily at initialization")  # as DeferredCudaCallError, of no other type

    torch = SimpleNamespace(cuda=Cuda(), backends=SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace())))
    device = Part.model_validate(script_space()["torch_device"](torch, 0))
    assert of_devices(device) == {("h0", "gpu-failed")}


@pytest.mark.parametrize(
    "report", [[[1.0, 0]] * 2, [[1.0, 0]] * 4, [[1.0, 0], [1.0, -1], [1.0, 0]], [[float("inf"), 0]] * 3, [[0, [1], 1.0]] * 3]
)
def test_a_report_of_other_groups_is_invalid(report: list[object]) -> None:
    """The first rank reports figures, in order; which hosts they are of it cannot say."""
    made = allreduce._groups({"groups": [[1.0, 0]] * 3}, "abc")
    assert [each.hosts for each in made] == [("a", "b"), ("b", "c"), ("a", "b", "c")]
    with pytest.raises(ValueError, match=r"groups|zip"):
        allreduce._groups({"groups": report}, "abc")


def test_a_host_without_address_is_lost_and_gpus_of_amd_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, gpu = host(interfaces=[], missing=["network"]), AmdGpu(address="0000:03:00.0")
    with_amd = changed(host(), missing=[]).model_copy(update={"amd": Amd(gpus=[gpu])})
    monkeypatch.setattr(collect, "survey_hosts", lambda _session: SimpleNamespace(hosts={"a": with_amd, "b": bare}, problems=[]))

    def measured(_session: object, state: State) -> None:
        assert list(state.hosts) == ["a"]
        state.measured["a"] = [HostMeasured(memory_gbs=8)]

    monkeypatch.setattr(measure, "rounds", measured)
    hosts = [SimpleNamespace(name=name, interface=None) for name in "ab"]
    made = certification.certify(SimpleNamespace(inventory=SimpleNamespace(hosts=hosts), catalog=OURS))  # type: ignore[arg-type]
    assert [(each.host, each.id, each.what) for each in made.found] == [("b", "no-answer", "nothing is known of its network")]
    assert made.notes[-1] == "GPUs were not measured, because they are AMD's: a"


def groups(**times: float) -> list[Group]:
    """Of eight hosts, as measured; `wrong-a-b` in place of a time is a wrong result."""
    names = "abcdefgh"
    levels = [["ab", "cd", "ef", "gh"], ["bc", "de", "fg", "ah"], ["abcd", "efgh"], [names]]
    return [
        Group(hosts=tuple(each), us=abs(times.get(each, 900.0)), wrong=int(times.get(each, 1) < 0)) for level in levels for each in level
    ]


def test_growing_groups_show_the_host_or_the_link() -> None:
    assert decisions.of_groups(groups(ab=1200, abcdefgh=9000)) == []
    bad = {"cd": -900, "de": -900, "abcd": -900, "abcdefgh": -900}
    assert [(each.host, each.id) for each in decisions.of_groups(groups(**bad))] == [("d", "wrong-sums")]
    assert [(each.where, each.host, each.id) for each in decisions.of_groups(groups(ef=60_000))] == [("e – f", "f", "slow-allreduce")]
    (found,) = decisions.of_groups(groups(abcd=-1, abcdefgh=-1))
    assert (found.host, found.where) == (None, "cluster")
    assert "a, b and 2 more gave 1 wrong" in found.what


def test_a_fabric_that_is_not_used_is_an_error() -> None:
    port = {"device": "mlx5_0", "port": 1, "state": "active", "link_layer": "InfiniBand"}
    ib = [
        {"name": "eth0", "addresses": ["10.0.0.1/24"], "up": True},
        {"name": "ib0", "addresses": ["10.1.0.1/24"], "up": True, "kind": "infiniband"},
    ]
    gpus = host(cuda="12.2", gpus=8, infiniband=[port])
    eth = dict.fromkeys("abc", Target(address="", interface="eth0"))
    assert list(fabric.unused({"a": gpus, "b": gpus}, eth, OURS)) == []
    off = changed(gpus, {"environment": {"variables": {"NCCL_IB_DISABLE": "1"}}})
    (found,) = fabric.unused({"a": off, "b": gpus}, eth, OURS)
    assert found.id == "fabric-not-used"
    assert "NCCL_IB_DISABLE=1" in found.what
    down = changed(gpus, infiniband=[{**port, "state": "down"}])
    assert [(each.id, each.host) for each in fabric.unused({"a": gpus, "b": gpus, "c": down}, eth, OURS)] == [("fabric-down", "c")]
    cpus = host(infiniband=[port], interfaces=ib)
    (found,) = fabric.unused({"a": cpus, "b": cpus}, eth, OURS)
    assert found.hint == "provision_interface=ib0 in the inventory"
    assert list(fabric.unused({"a": cpus, "b": cpus}, dict.fromkeys("ab", Target(address="", interface="ib0")), OURS)) == []
    efa = changed(gpus, efa_plugin=None, missing=[], infiniband=[{**port, "vendor": "1d0f", "link_layer": None}])
    assert ["EFA is up and not used" in each.what for each in fabric.unused({"a": efa, "b": efa}, eth, OURS)] == [True]


def script(order: dict[str, object], stdin: bytes | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", resources.script("certify.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(stdin or json.dumps(order).encode())
    process.stdin.close()
    process.stdin = None
    return process


def answer(process: subprocess.Popen[bytes]) -> ssh.Answer:
    out, err = process.communicate(timeout=60)
    return ssh.Answer(process.returncode, out.decode(), err.decode())


def orders(*names: str) -> dict[str, dict[str, object]]:
    """Of two hosts that are a pair, or of one alone."""
    planned = Round((), (("a", "b"),)) if names == ("a", "b") else Round(names, ())
    return measure.orders(State(targets("a", "b"), rounds=1), planned)


def test_the_script_measures_two_hosts_and_answers_only_who_knows_the_key() -> None:
    pair = orders("a", "b")
    listening = script(pair["b"])
    found = measure._read(PairMeasured, answer(script({**pair["a"], "key": "00" * 32, "wait": 2})))
    assert "no connection in 2 s" in str(found.error)
    found = measure._read(PairMeasured, answer(script(pair["a"])))
    assert (found.error, found.lost, found.big_lost) == (None, 0, 0)
    assert min(found.latency_us, found.up_mbps, found.down_mbps) > 0
    assert answer(listening).code == 0


def test_the_script_measures_a_host_and_is_ended_in_time() -> None:
    found = measure._read(HostMeasured, answer(script({**orders("a")["a"], "seconds": 30})))
    assert found.memory_gbs > 0, found.error
    assert all(core.speed > 0 and core.made >= 5 and not core.wrong for core in found.cores)
    late = measure._read(PairMeasured, answer(script({**orders("a", "b")["a"], "seconds": 1})))
    assert "did not end" in str(late.error)


def test_a_host_that_cannot_start_processes_or_measure_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    space = script_space()

    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    cores = HostMeasured.model_validate_json(json.dumps(space["document"](orders("a")["a"]))).cores
    assert {(core.made, core.speed) for core in cores} == {(0, 0.0)}
    assert space["document"]({"task": "host"}) == {"error": "KeyError: 'times'"}


def test_the_checksum_is_that_of_the_product() -> None:
    space = script_space()
    left, right = np.array([(7 * at * at + 13 * at) % 2039 for at in range(3200)]).reshape(2, 40, 40)
    assert zlib.crc32(repr((left @ right.T).tolist()).encode()) == space["CHECKSUM"] == space["product"]()
    space["sum"] = lambda numbers: __builtins__["sum"](numbers) ^ 4  # a bit that flips
    assert space["product"]() != space["CHECKSUM"]


def script_space() -> dict[str, Any]:
    """What the script defines."""
    space: dict[str, Any] = {"__name__": "script"}
    exec(resources.script("certify.py"), space)  # noqa: S102  our own
    return space


@pytest.mark.parametrize(
    "claim",
    [
        {"sent": 500, "lost": 501},
        {"sent": 500, "up_mbps": -1.0},
        {"sent": 500, "down_mbps": 1e99},
        {"sent": 500, "latency_us": float("nan")},
        {"error": "x" * 301},
        {},
        [],
        "what",
    ],
)
def test_a_claim_beyond_bounds_is_no_measurement(claim: object) -> None:
    text = f"{measure._BEGIN}\n{json.dumps(claim)}\n===END==="
    found = measure._read(PairMeasured, ssh.Answer(0, text, ""))
    assert found.error
    assert len(found.error) <= 300
    assert found.sent == 0


def test_an_answer_of_a_hostile_host_gets_on_the_page_as_text_only() -> None:
    attack = "<script>alert(1)</script>"
    pair = Measured(round=2, caller="a", answerer="b", measured=PairMeasured(error=attack))
    state = State(targets("a", "b"), rounds=4, pairs=[pair] * 3, measured={name: [HostMeasured(memory_gbs=1)] for name in "ab"})
    made = certificate(found=decisions.findings(state), pairs=(pair,), targets=state.hosts, measured={"a": state.measured["a"][0]})
    assert made.found
    shown = page.render(made)
    assert attack not in shown
    assert "&lt;script&gt;" in shown


def certificate(**values: object) -> Certificate:
    known = {"when": "2026-11-29T10:00:00+00:00", "ok": not values.get("found"), "seconds": 1.0, "rounds": 4, "hosts": ("a", "b")}
    rest = {"quarantined": (), "found": (), "notes": (), "targets": {}, "measured": {}, "pairs": (), "groups": ()}
    return Certificate.model_validate({**known, **rest, **values})


def test_the_command_ends_with_1_and_quarantines_the_guilty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    file = tmp_path / "quarantine"
    guilty = Problem("error", "1 Mbit/s, where 900 are usual", id="slow-network", host="b")
    monkeypatch.setattr(command, "certified", lambda _session: certificate(found=(guilty,), quarantined=("b",)))
    done = CliRunner().invoke(app, ["certify", "a,b", "--json", "--quarantine", str(file), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["found"][0]["host"] == "b"
    assert file.read_text() == "b\n"
    assert "slow-network" in (tmp_path / "page.html").read_text()
    seen = []
    monkeypatch.setattr(command, "certified", lambda session: seen.append(session) or certificate(hosts=("a",)))
    assert CliRunner().invoke(app, ["certify", "a,b", "--limit", f"!@{file}"]).exit_code == 0
    assert [each.name for each in seen[0].inventory.hosts] == ["a"]
    assert file.read_text() == "b\n"
    cluster = Problem("error", "timed out", id="no-connection")
    monkeypatch.setattr(command, "certified", lambda _session: certificate(found=(cluster,)))
    assert CliRunner().invoke(app, ["certify", "a,b", "--quarantine", str(file)]).exit_code == 1
    assert file.read_text() == "b\n"  # of a fault of the cluster, no host is known to be good


def test_the_list_is_written_before_a_page_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    guilty = Problem("error", "1 Mbit/s", id="slow-network", host="b")
    monkeypatch.setattr(command, "certified", lambda _session: certificate(found=(guilty,), quarantined=("b",)))
    (tmp_path / "page.html").symlink_to("/dev/full")
    file = tmp_path / "quarantine"
    done = CliRunner().invoke(app, ["certify", "a,b", "--quarantine", str(file), "-o", str(tmp_path / "page.html")])
    assert isinstance(done.exception, ProvisionError)
    assert file.read_text() == "b\n"
    done = CliRunner().invoke(app, ["certify", "a,b", "--quarantine", str(tmp_path / "none/file")])
    assert isinstance(done.exception, UsageError)
