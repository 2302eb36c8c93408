"""Hosts that look at each other: the script on their side, what it is told, and what is made of its answers."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from invented_hosts import stated
from loading import load

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.doctor import reach
from provision.doctor.checks import Answer, examine
from provision.facts import Facts
from provision.inventory import Host

SCRIPT = resources.hostside("reach.py")


def facts(number: int, **more: Any) -> Facts:
    connection = {"client_address": "127.0.0.1", "server_address": f"127.0.0.{number + 1}", "server_port": 22, "interface": "lo"}
    known = {
        "python": {"executable": sys.executable},
        "user": {"name": "trainer"},
        "network": {"ssh_connection": connection},
        "mpi": {"found": []},
        **more,
    }
    return stated(known)


def made(count: int, *, bandwidth: bool = False) -> dict[str, Any]:
    group = [Host(f"h{number}", f"127.0.0.{number + 1}") for number in range(count)]
    return reach.orders(group, {host.name: facts(number) for number, host in enumerate(group)}, bandwidth=bandwidth)


def start(order: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(order))
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def test_all_reach_each_other_and_measure_the_way() -> None:
    running = {name: start(each["order"]) for name, each in made(3, bandwidth=True).items()}
    answers = {name: reach.read(process.communicate(timeout=60)[0]) for name, process in running.items()}
    for name, answer in answers.items():
        others = answers.keys() - {name}
        assert answer.tcp == {other: {} for other in others}
        assert answer.mbit.keys() == others
        assert all(mbit > 0 for mbit in answer.mbit.values())


def test_a_peer_that_is_not_there_is_told_with_what_each_port_said() -> None:
    order = made(2)["h0"]["order"]
    answer = reach.read(start({**order, "seconds": 0.5}).communicate(timeout=60)[0])
    assert answer.port in order["ports"]
    assert answer.tcp == {"h1": dict.fromkeys(order["peers"][0]["ports"], "Connection refused")}


def test_who_does_not_know_the_key_gets_no_answer_and_disturbs_nobody() -> None:
    orders = {name: each["order"] for name, each in made(2).items()}
    first = start(orders["h0"])
    port = orders["h0"]["ports"][0]
    until = time.monotonic() + 5
    while True:
        try:
            stranger = socket.create_connection((orders["h0"]["address"], port), timeout=5)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)
    with stranger:
        assert len(stranger.recv(100)) == 16  # the challenge
        stranger.sendall(b"c" + hashlib.sha256(b"h1").digest()[:16] + b"x" * 32)
        assert stranger.recv(100) == b""
    second = start(orders["h1"])
    for process in (first, second):
        assert all(not errors for errors in reach.read(process.communicate(timeout=60)[0]).tcp.values())


def test_hosts_measure_each_other_although_another_is_absent() -> None:
    """Each gives up the absent one at its own deadline, and listens on for those that began later, not for what cannot come."""
    orders = {name: each["order"] for name, each in made(4, bandwidth=True).items()}
    running = {}
    for name in ("h0", "h1", "h2"):
        running[name] = start({**orders[name], "seconds": 2.5, "flow_seconds": 300})
        time.sleep(0.4)
    for name, process in running.items():
        answer = reach.read(process.communicate(timeout=100)[0])
        assert answer.mbit.keys() == running.keys() - {name}


@pytest.mark.parametrize("count", [2, 3, 8, 9])
def test_everybody_meets_everybody_in_rounds_of_pairs(count: int) -> None:
    """The n-th peer of a host has it as the n-th of its own, where a host that pairs with itself rests for a round."""
    rounds = {}
    for name, each in made(count).items():
        me = int(name[1:])
        others = iter([peer["name"] for peer in each["order"]["peers"]])
        rounds[name] = [name if (2 * me - total) % count == 0 else next(others) for total in range(count)]
        assert sorted(rounds[name]) == sorted(made(count))
    for name, met in rounds.items():
        assert [rounds[other][number] for number, other in enumerate(met)] == [name] * count


@pytest.mark.parametrize("busy", ["h0", "h1"])
@pytest.mark.parametrize("caller", ["h0", "h1"])
def test_a_measurement_waits_until_neither_host_sends_nor_takes_another(caller: str, busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("reach_on_hosts", SCRIPT)
    monkeypatch.setattr(script, "FLOW_S", 0.05)
    orders = {name: each["order"] for name, each in made(2, bandwidth=True).items()}
    listeners = {name: script.Listener(order) for name, order in orders.items()}
    (peer,) = orders[caller]["peers"]
    measured: list[float | None] = []
    measurement = threading.Thread(
        target=lambda: measured.append(script.measure(orders[caller], peer, listeners[peer["name"]].port, listeners[caller].one_flow))
    )
    with listeners[busy].one_flow:
        measurement.start()
        measurement.join(1)
        assert measured == []
    measurement.join(30)
    for listener in listeners.values():
        listener.socket.close()
    (mbit,) = measured
    assert mbit is not None
    assert mbit > 0


def test_orders_have_one_key_that_stands_on_no_command_line() -> None:
    given = {name: each["order"] for name, each in made(4).items()}
    assert len({order["key"] for order in given.values()}) == 1
    assert made(2)["h0"]["order"]["key"] != given["h0"]["key"]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "bash: python3: not found",
        "{}",
        '{"port": 1}',
        '{"port": "x", "problem": null, "peers": {}}',
        '{"port": 1, "problem": null, "peers": [1]}',
    ],
)
def test_an_answer_that_is_none_is_an_error_and_no_crash(said: str) -> None:
    with pytest.raises(ProvisionError):
        reach.read(f"===PROVISION-REACH-BEGIN===\n{said}\n===END===" if said.startswith("{") else said)


def found(answers: dict[str, Answer]) -> dict[tuple[str, str | None], str]:
    return {(each.id, each.host): each.seen for each in examine({name: stated({}) for name in answers}, (), answers)}


def test_a_host_that_listened_and_was_not_reached_is_behind_a_firewall() -> None:
    answers = {"a": Answer(7, tcp={"b": {7: "refused", 8: "timed out"}}), "b": Answer(8, tcp={"a": {}})}
    assert found(answers) == {("btl-tcp-firewall", "b"): "a free port that it opened was not reached from a: timed out"}


def test_a_host_that_could_not_listen_is_not_behind_a_firewall() -> None:
    answers = {"a": Answer(7, tcp={"b": {8: "refused"}}), "b": Answer(None, problem="no permission", tcp={"a": {}})}
    assert found(answers).keys() == {("host-warning", "b")}


def test_what_ssh_said_comes_under_the_ids_of_its_messages() -> None:
    said = {"b": "Host key verification failed.", "c": None, "d": "something new"}
    assert found({"a": Answer(7, ssh=said)}).keys() == {("ssh-host-key-verification", "a"), ("ssh-between-hosts", "a")}


def test_a_link_at_less_than_half_of_the_usual_is_slow() -> None:
    answers = {name: Answer(7, mbit={other: 900.0 for other in "abc" if other != name}) for name in "abc"}
    answers["b"] = Answer(7, mbit={"a": 90.0, "c": 910.0})
    assert found(answers) == {("slow-link", "b"): "to a it sends 90 Mbit/s"}


def interface(name: str, cidr: str, speed: int | None) -> dict[str, Any]:
    return {
        "name": name,
        "addresses": [cidr],
        "virtual": False,
        "loopback": False,
        "up": True,
        "kind": "ethernet",
        "mtu": 1500,
        "speed": speed,
    }


def network(number: int, *, asked: str | None = None, first: str = "10.0.0") -> Facts:
    interfaces = [interface("eth0", f"{first}.{number}/24", 1000), interface("eth1", f"10.9.0.{number}/24", 100_000)]
    return stated({"network": {"interfaces": interfaces, "default_route_interface": "eth0", "ssh_connection": None, "asked_for": asked}})


def test_the_interface_that_mpi_would_pick() -> None:
    hosts = {f"h{number}": network(number) for number in (1, 2, 3)}
    assert {(each.id, each.host) for each in examine(hosts)} == {("mpi-faster-network", name) for name in hosts}
    assert examine({f"h{number}": network(number, asked="eth1") for number in (1, 2)}) == []
    hosts = {"a": network(1, asked="eth1"), "b": network(2, asked="eth1"), "c": network(3)}
    assert [(each.id, each.host) for each in examine(hosts)] == [("mpi-other-network", "c")]
