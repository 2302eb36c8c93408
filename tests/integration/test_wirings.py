"""The network that `provision plan`, and so `up` and `run`, chooses for hosts that are network namespaces, wired as desks are.

Each host reaches this machine by eth0, of 1 Gb/s, in 10.77.0.0/24; what a wiring adds has 100 Gb/s where nothing else is said. The kernel
knows no speed of such interfaces: a host's login puts one in its place. A socket listens on sshd's port.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import missing
from hosts import good, provision, report, wait_until
from switched_hosts import run

LAN = "10.77.0.0/24"
_LOGIN = """#!/bin/sh
for word; do host=$last; last=$word; done
number=${host##*.}
export SSH_CONNECTION="10.77.0.254 50000 $host 22"
exec ip netns exec NAME-$number unshare --uts sh -c 'hostname node$2; cd FOLDER/$2
for file in *; do mount --bind $file /sys/class/net/$file/speed; done; cd /; exec sh -c "$1"' sh "$last" "$number"
"""


class Wiring(NamedTuple):
    """Hosts and what connects them besides the LAN.

    Attributes:
        cables: (host, interface, address, host, interface, address) …
        switches: what is at each of them: (host, interface, address) …
        commands: (host, arguments of ``ip``) … afterwards; behind ``||`` what stands in where the kernel has no such interface.
        speeds: (host, interface) → Mbit/s other than 100 Gb/s; -1 as of a wireless or virtual one.
        network: the one that is chosen.
        notes: what each note about networks begins with, and what it ends with.
    """

    network: str
    notes: tuple[tuple[str, str], ...] = ()
    hosts: int = 2
    cables: tuple[tuple[int, str, str, int, str, str], ...] = ()
    switches: tuple[tuple[tuple[int, str, str], ...], ...] = ()
    commands: tuple[tuple[int, str], ...] = ()
    speeds: tuple[tuple[int, str, int], ...] = ()


def chosen(cidr: str, rate: str = "100 Gb/s") -> tuple[str, str]:
    return f"network {cidr} ({rate}) instead of eth0", "the hosts reach each other in it"


def unused(*each: str, remedy: str = "") -> tuple[str, str]:
    return f"faster networks are not used: {each[0]}", each[-1] + remedy


def at(port: str, network: str, hosts: tuple[int, ...]) -> tuple[tuple[int, str, str], ...]:
    """Hosts at a switch, by the interface of that name."""
    return tuple((number, port, network.replace("N", str(number))) for number in hosts)


RING = (
    (1, "eth1", "10.1.2.1/30", 2, "eth1", "10.1.2.2/30"),
    (2, "eth2", "10.2.3.1/30", 3, "eth1", "10.2.3.2/30"),
    (3, "eth2", "10.3.1.1/30", 1, "eth2", "10.3.1.2/30"),
)
SWITCH = at("eth1", "10.1.0.N/24", (1, 2, 3))
PAIR = (1, "eth1", "10.1.0.1/24", 2, "eth1", "10.1.0.2/24")
WIRINGS = {
    "a cable between two": Wiring("10.1.0.0/24", (chosen("10.1.0.0/24"),), cables=(PAIR,)),
    "a cable with a network of two addresses": Wiring(
        "10.1.0.0/31", (chosen("10.1.0.0/31"),), cables=((1, "eth1", "10.1.0.0/31", 2, "eth1", "10.1.0.1/31"),)
    ),
    "a switch": Wiring("10.1.0.0/24", (chosen("10.1.0.0/24"),), 3, switches=(SWITCH,)),
    "a ring of three, each cable a network": Wiring(
        LAN,
        (
            unused(
                "10.1.2.0/30 (100 Gb/s, without node3), 10.3.1.0/30 (100 Gb/s, without node2) and",
                "10.2.3.0/30 (100 Gb/s, without node1)",
                remedy="; bridges (with STP) or a switch would make the cables one network",
            ),
        ),
        3,
        RING,
    ),
    "a ring of three that bridges make one network": Wiring(
        "10.1.0.0/24",
        (chosen("10.1.0.0/24"),),
        3,
        tuple((a, b, "", c, d, "") for a, b, _, c, d, _ in RING),
        commands=tuple(
            (number, command)
            for number in (1, 2, 3)
            for command in (
                "link add desk type bridge stp_state 1 forward_delay 200",
                *(f"link set eth{port} master desk" for port in (1, 2)),
                f"address add 10.1.0.{number}/24 dev desk",
                "link set desk up",
            )
        ),
        speeds=tuple((number, "desk", 100_000) for number in (1, 2, 3)),
    ),
    "two switches, one of them faster": Wiring(
        "10.2.0.0/24",
        (chosen("10.2.0.0/24", "200 Gb/s"),),
        3,
        switches=(SWITCH, at("eth2", "10.2.0.N/24", (1, 2, 3))),
        speeds=tuple((number, "eth2", 200_000) for number in (1, 2, 3)),
    ),
    "two switches that nothing connects": Wiring(
        LAN,
        (unused("10.1.0.0/24 (100 Gb/s, the hosts have not reached each other in it)"),),
        4,
        switches=(at("eth1", "10.1.0.N/24", (1, 2)), at("eth1", "10.1.0.N/24", (3, 4))),
    ),
    "a switch that one host is not at": Wiring(LAN, (unused("10.1.0.0/24 (100 Gb/s, without node3)"),), 3, switches=(SWITCH[:2],)),
    "a cable beside a wireless network": Wiring(
        "10.1.0.0/24",
        (chosen("10.1.0.0/24", "1 Gb/s"),),
        cables=(PAIR,),
        speeds=(*((n, "eth1", 1000) for n in (1, 2)), *((n, "eth0", 54) for n in (1, 2))),
    ),
    "a slower cable": Wiring(LAN, cables=(PAIR,), speeds=((1, "eth1", 100), (2, "eth1", 100))),
    "long packets at one end only": Wiring(
        "10.1.0.0/24",
        (chosen("10.1.0.0/24"), ("the MTU of 10.1.0.0/24 differs (1500 on node2; 9000 on node1)", "ip link set dev INTERFACE mtu 1500")),
        cables=(PAIR,),
        commands=((1, "link set eth1 mtu 9000"),),
    ),
    "one network on two cables to elsewhere": Wiring(
        LAN,
        (unused("10.1.0.0/24 (100 Gb/s, the hosts have not reached each other in it)"),),
        switches=(at("eth1", "10.1.0.N/24", (1,)), at("eth1", "10.1.0.N/24", (2,))),
    ),
    "a cable without IPv4": Wiring(
        LAN,
        (unused("eth1 (no IPv4 address)"),),
        cables=((1, "eth1", "", 2, "eth1", ""),),
    ),
    "container bridges of one network": Wiring(
        LAN,
        commands=tuple(
            (number, command)
            for number in (1, 2)
            for command in (
                "link add docker0 type bridge",
                "address add 172.17.0.1/16 dev docker0",
                "link set docker0 up",
                "link add br0 type bridge",
                "address add 172.18.0.1/16 dev br0",
                "link set br0 up",
            )
        ),
        speeds=tuple((number, name, 100_000) for number in (1, 2) for name in ("docker0", "br0")),
    ),
    "a VLAN of the faster cable": Wiring(
        "10.5.0.0/24",
        (chosen("10.5.0.0/24"),),
        cables=((1, "eth1", "", 2, "eth1", ""),),
        commands=tuple(
            (number, command)
            for number in (1, 2)
            for command in (
                "link add link eth1 name eth1.5 type vlan id 5 || link add link eth1 name eth1.5 type macvlan mode bridge",
                f"address add 10.5.0.{number}/24 dev eth1.5",
                "link set eth1.5 up",
            )
        ),
        speeds=tuple((number, "eth1.5", 100_000) for number in (1, 2)),
    ),
    "a bond of two cables": Wiring(
        "10.6.0.0/24",
        (chosen("10.6.0.0/24", "200 Gb/s"),),
        cables=((1, "eth1", "", 2, "eth1", ""), (1, "eth2", "", 2, "eth2", "")),
        commands=tuple(
            (number, command)
            for number in (1, 2)
            for command in (
                "link add bond0 type bond mode balance-rr miimon 100 || link add bond0 type bridge stp_state 1 forward_delay 200",
                *(f"link set eth{port} {how}" for port in (1, 2) for how in ("down", "master bond0", "up")),
                f"address add 10.6.0.{number}/24 dev bond0",
                "link set bond0 up",
            )
        ),
        speeds=tuple((number, "bond0", 200_000) for number in (1, 2)),
    ),
}
#: The others take minutes.
QUICK = ("a switch", "a ring of three, each cable a network", "long packets at one end only")


class Desk:
    """Hosts of a wiring, as a context manager."""

    def __init__(self, folder: Path, wiring: Wiring) -> None:
        self.name, self.folder, self.wiring = f"desk{os.getpid()}", folder, wiring
        self.inventory, self.sockets = folder / "hosts.ini", list[socket.socket]()

    def __enter__(self) -> Desk:
        login = self.folder / "login"
        login.write_text(_LOGIN.replace("NAME", self.name).replace("FOLDER", str(self.folder)))
        login.chmod(0o755)
        numbers = range(1, self.wiring.hosts + 1)
        self.inventory.write_text("".join(f"node{n} ansible_host=10.77.0.{n} ansible_ssh_executable={login}\n" for n in numbers))
        for number in numbers:
            run("ip", "netns", "add", f"{self.name}-{number}")
            (self.folder / str(number)).mkdir()
            self.inside(number, "link set lo up")
        for place, ports in enumerate((at("eth0", "10.77.0.N/24", tuple(numbers)), *self.wiring.switches)):
            run("ip", "netns", "add", f"{self.name}-s{place}")
            self.inside(f"s{place}", "link add bridge0 type bridge")
            self.inside(f"s{place}", "link set bridge0 up")
            for number, port, address in ports:
                self.cable(number, port, address, f"s{place}", f"port{number}", "")
                self.inside(f"s{place}", f"link set port{number} master bridge0")
        for cable in self.wiring.cables:
            self.cable(*cable)
        for number, command in self.wiring.commands:
            self.inside(number, command)
        for number, command in self.wiring.commands:
            if "stp_state" in command:  # it looks for rings first
                wait_until(lambda number=number, command=command: " UP " in self.shown(number, command.split()[2]))
        for number, name, mbps in (*((number, "eth0", 1000) for number in numbers), *self.wiring.speeds):
            (self.folder / str(number) / name).write_text(f"{mbps}\n")
            self.listen(number)
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.sockets:
            each.close()
        for path in Path("/run/netns").glob(f"{self.name}-*"):
            run("ip", "netns", "delete", path.name)

    def inside(self, name: object, command: str) -> None:
        first, *others = (("ip", "-n", f"{self.name}-{name}", *each.split()) for each in command.split(" || "))
        try:
            run(*first)
        except subprocess.CalledProcessError:
            if not others:
                raise
            run(*others[0])

    def shown(self, number: int, name: str) -> str:
        command = ("ip", "-n", f"{self.name}-{number}", "-br", "link", "show", name)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def cable(self, one: object, port: str, address: str, other: object, other_port: str, other_address: str) -> None:
        far = ("peer", "name", other_port, "netns", f"{self.name}-{other}")
        self.inside(one, " ".join(("link add name", port, "type veth", *far)))
        for host, name, cidr in ((one, port, address), (other, other_port, other_address)):
            self.inside(host, f"link set {name} up")
            if cidr:
                self.inside(host, f"address add {cidr} dev {name}")
            if isinstance(host, int):
                (self.folder / str(host) / name).write_text("100000\n")

    def listen(self, number: int) -> None:
        """The kernel answers calls of sshd's port on a host."""

        def inside() -> None:
            with open(f"/run/netns/{self.name}-{number}") as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0  # of this thread
            self.sockets.append(socket.create_server(("", 22), backlog=64, reuse_port=True))

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()


@pytest.fixture
def desk(tmp_path: Path, wiring: Wiring) -> Iterator[Desk]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        missing("network namespaces need root, and ip")
    made = Desk(tmp_path, wiring)
    try:
        yield made.__enter__()
    finally:
        made.__exit__()


@pytest.mark.parametrize(
    "wiring", [pytest.param(each, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, each in WIRINGS.items()]
)
def test_the_fastest_common_network_is_chosen_and_told(desk: Desk, wiring: Wiring) -> None:
    plan = report(good(provision("plan", str(desk.inventory), "--json", "--cpu")))
    assert {host["network"]["cidr"] for host in plan["hosts"].values()} == {wiring.network}
    said = [note for note in plan["notes"] if any(word in note for word in ("network", "cable", "MTU", "interface"))]
    assert len(said) == len(wiring.notes), said
    for note, (begin, end) in zip(said, wiring.notes, strict=True):
        assert (note[: len(begin)], note[len(note) - len(end) :]) == (begin, end)
