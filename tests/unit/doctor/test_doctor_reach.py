"""Connections between hosts: the script on the hosts, its orders, and what follows from its answers."""

from __future__ import annotations

import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from invented_hosts import stated

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.catalog import OURS
from provision.doctor.checks import Reachability, examine
from provision.inventory import Host
from provision.survey import Facts, reachability

SCRIPT = resources.script("reach.py")


def facts(number: int, **more: Any) -> Facts:
    connection = {"client_address": "127.0.0.1", "server_address": f"127.0.7.{number + 1}", "server_port": 22, "interface": "lo"}
    known = {
        "python": {"executable": sys.executable},
        "user": {"name": "trainer"},
        "network": {"ssh_connection": connection},
        "mpi": {"found": []},
        **more,
    }
    return stated(known)


def made(count: int) -> dict[str, Any]:
    """At addresses of their own: no connection of this machine has one of the ports there."""
    group = [Host(f"h{number}", f"127.0.7.{number + 1}") for number in range(count)]
    return reachability.orders(group, {host.name: facts(number) for number, host in enumerate(group)})


def start(order: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(order))
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def test_hosts_reach_each_other() -> None:
    running = {name: start({**each, "seconds": 30}) for name, each in made(3).items()}
    answers = {name: reachability.parse(process.communicate(timeout=60)[0]) for name, process in running.items()}
    for name, answer in answers.items():
        assert answer.tcp == {other: {} for other in answers.keys() - {name}}


def test_each_port_of_an_absent_peer_has_its_error() -> None:
    order = made(2)["h0"]
    answer = reachability.parse(start({**order, "seconds": 0.5}).communicate(timeout=60)[0])
    assert answer.port in order["ports"]
    assert answer.tcp == {"h1": dict.fromkeys(order["peers"][0]["ports"], "Connection refused")}


def test_a_caller_without_the_key_gets_no_answer_and_disturbs_nobody() -> None:
    orders = {name: {**each, "seconds": 30} for name, each in made(2).items()}
    first = start(orders["h0"])
    until = time.monotonic() + 25
    while True:
        try:
            stranger = socket.create_connection((orders["h0"]["address"], orders["h0"]["ports"][0]), timeout=30)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)
    with stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(100) == b""
    second = start(orders["h1"])
    for process in (first, second):
        assert all(not errors for errors in reachability.parse(process.communicate(timeout=60)[0]).tcp.values())


def test_another_program_on_the_port_is_not_the_peer() -> None:
    order = made(2)["h0"]
    (peer,) = order["peers"]

    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"x" * 32)

    with socketserver.TCPServer((peer["address"], peer["ports"][0]), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        answer = reachability.parse(start({**order, "seconds": 3}).communicate(timeout=60)[0])
        other.shutdown()
    assert answer.tcp["h1"][peer["ports"][0]] == "another program answers"


def test_an_address_is_never_an_option_of_ssh(tmp_path, monkeypatch) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\necho "$@" >&2; exit 1\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    order = made(2)["h0"]
    peer = {**order["peers"][0], "address": "-oProxyCommand=id"}
    answer = reachability.parse(start({**order, "peers": [peer], "ssh": True, "seconds": 0.1}).communicate(timeout=60)[0])
    assert str(answer.ssh["h1"]).endswith(" -- -oProxyCommand=id true")


def test_without_logins_sshd_s_port_must_be_reached() -> None:
    group = [Host(name, name) for name in ("h0", "h1")]
    orders = reachability.orders(group, {host.name: facts(number) for number, host in enumerate(group)}, logins=False)
    with socket.create_server(("127.0.7.2", 0)) as sshd:
        peers = [{**orders["h0"]["peers"][0], "name": name, "ssh_port": port} for name, port in (("h1", sshd.getsockname()[1]), ("h2", 1))]
        answer = reachability.parse(start({**orders["h0"], "peers": peers, "seconds": 0.1}).communicate(timeout=60)[0])
    assert answer.ssh == {"h1": None, "h2": "[Errno 111] Connection refused"}


def test_orders_have_one_key_for_each_run() -> None:
    given = made(4)
    assert len({order["key"] for order in given.values()}) == 1
    assert made(2)["h0"]["key"] != given["h0"]["key"]


@pytest.mark.parametrize(
    "output",
    [
        "",
        "bash: python3: not found",
        "{}",
        '{"tcp": {}}',
        '{"port": "x", "problem": null, "tcp": {}, "ssh": {}}',
        '{"port": Infinity, "problem": null, "tcp": {}, "ssh": {}}',
        '{"port": 1, "problem": null, "tcp": [1], "ssh": {}}',
    ],
)
def test_an_invalid_answer_is_an_error(output: str) -> None:
    with pytest.raises(ProvisionError):
        reachability.parse(f"===PROVISION-REACH-BEGIN===\n{output}\n===END===" if output.startswith("{") else output)


def found(answers: dict[str, Reachability]) -> dict[tuple[str, str | None], str]:
    return {(each.id, each.host): each.observed for each in examine({name: stated({}) for name in answers}, (), answers, catalog=OURS)}


def test_a_host_that_listened_and_was_not_reached_is_behind_a_firewall() -> None:
    answers = {"a": Reachability(7, tcp={"b": {7: "refused", 8: "timed out"}}), "b": Reachability(8, tcp={"a": {}})}
    assert found(answers) == {("btl-tcp-firewall", "b"): "a port that it opened was not reached from a: timed out"}


def test_a_host_that_could_not_listen_is_not_behind_a_firewall() -> None:
    answers = {"a": Reachability(7, tcp={"b": {8: "refused"}}), "b": Reachability(None, problem="no permission", tcp={"a": {}})}
    assert found(answers).keys() == {("host-warning", "b")}


def test_failed_logins_are_known_errors() -> None:
    said = {"b": "Host key verification failed.", "c": None, "d": "something new"}
    assert found({"a": Reachability(7, ssh=said)}).keys() == {("ssh-host-key-verification", "a"), ("ssh-between-hosts", "a")}


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
    assert {(each.id, each.host) for each in examine(hosts, catalog=OURS)} == {("mpi-faster-network", name) for name in hosts}
    assert examine({f"h{number}": network(number, asked="eth1") for number in (1, 2)}, catalog=OURS) == []
    hosts = {"a": network(1, asked="eth1"), "b": network(2, asked="eth1"), "c": network(3)}
    assert [(each.id, each.host) for each in examine(hosts, catalog=OURS)] == [("mpi-other-network", "c")]
