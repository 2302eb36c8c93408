"""Which network the survey chooses between hosts; what really reaches what is tested on wirings of namespaces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from invented_hosts import host, plan_for

from provision.catalog import OURS
from provision.doctor.checks import examine
from provision.inventory import Host
from provision.plan.model import Network
from provision.remote.session import Session
from provision.resolve import HostRequirements
from provision.survey import Facts, links, reachability
from provision.survey.reachability import Reachability


def facts(number: int, *, speed: int | None = 100_000, earlier: str = "", kind: str = "ethernet", name: str = "eth1") -> Facts:
    """A host that was reached by eth0, of 1 Gb/s, and has a cable, too. ``earlier``: the network of its last run."""
    interfaces = [
        {"name": "eth0", "addresses": [f"10.0.0.{number}/24"], "up": True, "speed": 1000, "kind": "ethernet"},
        {"name": name, "addresses": [f"10.1.0.{number}/24"], "up": True, "speed": speed, "kind": kind},
    ]
    found = host(network={"interfaces": interfaces, "ssh_connection": {"server_address": f"10.0.0.{number}", "interface": "eth0"}})
    if earlier:
        plan = replace(plan_for({"a": found}).hosts["a"], network=Network("eth1", "10.1.0.1", earlier, "requested in the inventory"))
        found = with_(found, "installed", manifest=SimpleNamespace(host=plan))
    return found


def with_(found: Facts, section: str, **values: Any) -> Facts:
    return found.model_copy(update={section: getattr(found, section).model_copy(update=values)})


def in_rack(number: int) -> Facts:
    """Reached by a fast network of its rack's own, behind a router; what all racks share is slow."""
    found = facts(number, speed=100_000)
    fast, slow = (each.model_copy(update={"speed": speed}) for each, speed in zip(found.network.interfaces, (100_000, 1000), strict=True))
    fast = fast.model_copy(update={"addresses": [f"10.0.{number}.1/24"]})
    return with_(found, "network", interfaces=[fast, slow])


def beside_a_controller(number: int) -> Facts:
    """With the interface of its board's controller, which connects no hosts."""
    found = facts(number, speed=None)
    usb = found.network.interfaces[1].model_copy(update={"addresses": [f"169.254.0.{number}/16"]})
    return with_(found, "network", interfaces=[found.network.interfaces[0], usb])


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each test of connections answers: the first of these, which is taken away."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(reachability, "check", lambda *_, **__: ({"a": Reachability(7, **given.pop(0))}, []))
    return given


def surveyed(hosts: dict[str, Facts], interface: str | None = None, *, tries: bool = True) -> dict[str, Facts]:
    inventory = SimpleNamespace(hosts=[Host(name, name, variables={}) for name in hosts])
    if interface:
        inventory.hosts = [SimpleNamespace(interface=interface)]
    return dict(links.with_networks(cast(Session, SimpleNamespace(inventory=inventory)), hosts, tries=tries))


def chosen(hosts: dict[str, Facts], interface: str | None = None) -> list[str | None]:
    """The interface of each host that MPI would use."""
    return [each.network.picked and each.network.picked.name for each in surveyed(hosts, interface).values()]


def not_used(hosts: dict[str, Facts]) -> str:
    (note,) = (note for note in plan_for(hosts).notes if note.startswith("faster networks are not used: "))
    return note.partition(": ")[2]


@pytest.mark.parametrize(
    ("answer", "expected"), [({}, "eth1"), ({"tcp": {"b": {7: "timed out"}}}, "eth0"), ({"ssh": {"b": "refused"}}, "eth0")]
)
def test_a_faster_network_is_chosen_where_all_reach_each_other(answers, answer, expected) -> None:
    answers.append(answer)
    assert chosen({"a": facts(1), "b": facts(2)}) == [expected] * 2
    assert answers == []


@pytest.mark.parametrize(
    "hosts",
    [
        {"a": facts(1)},
        {"a": facts(1), "b": facts(2, speed=1000)},
        {"a": facts(1), "b": facts(2, speed=None, kind="wireless")},
        {"a": facts(1), "b": facts(1)},
        {"a": facts(1), "b": host("10.0.0.9")},
        {"a": in_rack(1), "b": in_rack(2)},
        {"a": beside_a_controller(1), "b": beside_a_controller(2)},
    ],
)
def test_nothing_is_tested_where_no_network_of_all_is_faster(answers, hosts) -> None:
    assert chosen(hosts) == ["eth0"] * len(hosts)


CABLE, LAN = "10.1.0.0/24", "10.0.0.0/24"


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ({"a": facts(1, earlier=CABLE), "b": facts(2, earlier=CABLE)}, ["eth1", "eth1"]),
        ({"a": facts(1, earlier=CABLE), "b": facts(2, earlier=CABLE, name="ens5")}, ["eth1", "ens5"]),
        ({"a": facts(1, earlier=LAN), "b": facts(2, earlier=LAN)}, ["eth0", "eth0"]),
        ({"a": facts(1, earlier=CABLE)}, ["eth1"]),
        ({"a": facts(1, earlier=CABLE), "b": facts(2, earlier=CABLE), "c": host("10.0.0.9")}, ["eth0"] * 3),
        ({"a": facts(1, earlier=CABLE), "b": facts(2, speed=10, earlier=LAN)}, ["eth0"] * 2),
        (
            {"a": facts(1, earlier=CABLE), "b": with_(facts(2, earlier=CABLE), "network", interfaces=facts(2).network.interfaces[:1])},
            ["eth0"] * 2,
        ),
    ],
    ids=["kept", "renamed", "the LAN's", "alone, with --limit", "a host is added", "in two networks", "a cable is pulled out"],
)
def test_the_network_of_the_last_run_stays_only_where_all_hosts_have_it(answers, hosts, expected) -> None:
    assert chosen(hosts) == expected
    assert len({each.network.cidr for each in plan_for(surveyed(hosts)).hosts.values()}) == 1
    assert not any("requested" in note for note in plan_for(surveyed(hosts)).notes)


def test_the_inventory_wins(answers) -> None:
    assert chosen({"a": facts(1), "b": facts(2)}, interface="eth0") == ["eth0"] * 2
    answers.append({})
    known = surveyed({"a": facts(1), "b": facts(2)})
    made = plan_for(known)
    assert made.hosts["a"].network == Network("eth1", "10.1.0.1", CABLE, "the hosts reach each other in it")
    assert f"network {CABLE} (100 Gb/s) instead of eth0: the hosts reach each other in it" in made.notes
    assert plan_for(known, a=HostRequirements(interface="eth0")).hosts["a"].network.address == "10.0.0.1"


def test_it_is_said_why_a_faster_network_is_not_used_and_the_doctor_offers_none_that_failed(answers) -> None:
    fresh = {"a": facts(1), "b": facts(2)}
    installed = surveyed({"a": facts(1, earlier=LAN), "b": facts(2, earlier=LAN)})
    assert not_used(installed) == not_used(fresh) == f"{CABLE} (100 Gb/s, not tried: provision_interface takes it)"
    assert "mpi-faster-network" in {each.id for each in examine(installed, catalog=OURS)}
    answers.append({"tcp": {"b": {7: "timed out"}}})
    tested = surveyed(fresh)
    assert not_used(tested) == f"{CABLE} (100 Gb/s, the hosts have not reached each other in it)"
    assert examine(tested, catalog=OURS) == []
    assert not_used({**fresh, "c": host("10.0.0.9")}) == f"{CABLE} (100 Gb/s, without c)"


def test_what_hosts_say_of_the_choice_counts_for_nothing() -> None:
    liar = with_(facts(1), "network", instead_of="ib0", unreached=[LAN])
    assert links.cleared(liar) == facts(1)


def test_only_what_plans_tries(answers) -> None:
    assert [each.network.instead_of for each in surveyed({"a": facts(1), "b": facts(2)}, tries=False).values()] == [None, None]
