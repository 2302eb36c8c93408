"""Choice of the address of this host that the others use: decided from lists of interfaces; nothing is probed or sent.

The order of preference:

1. ``COLLECTIVE_ADDRESS``;
2. the address inside the first network of ``COLLECTIVE_NETWORK`` that matches, or of the interface that it names;
3. an address in a network that all other hosts are in as well;
4. the address from which the system would send to the other hosts.

Loopback and the bridges of container engines are never chosen in 3 and 4, and neither is an address that another host has as
well: 172.17.0.1 is ``docker0`` everywhere and leads nowhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from typing import NamedTuple, Sequence

from collective_core.errors import CollectiveError

#: Interfaces that end inside their own host, by the start of their names.
INNER = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "lxcbr", "lxdbr", "podman", "kube-", "dummy", "tunl")


class Interface(NamedTuple):
    name: str
    address: str
    prefix: int

    def network(self) -> str:
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)


def candidates(own: Sequence[Interface], others: Sequence[Sequence[Interface]]) -> list[Interface]:
    """Own interfaces that may lead to other hosts: not inner ones, none whose address another host has as well."""
    taken = {interface.address for host in others for interface in host}
    return [i for i in own if not i.name.startswith(INNER) and i.address not in taken]


def in_networks(own: Sequence[Interface], networks: Sequence[str], variable: str = "COLLECTIVE_NETWORK") -> str | None:
    """Own address in the first of ``networks`` (CIDR, or names of interfaces) that has one. A name need not be there on every host."""
    for text in networks:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            if re.fullmatch(r"[A-Za-z][\w.@-]*", text):
                named = [interface.address for interface in own if interface.name == text]
                if named:
                    return named[0]
                continue
            raise CollectiveError(f"{variable}: {error}", "invalid") from error
        for interface in own:
            if ipaddress.ip_address(interface.address) in network:
                return interface.address
    return None


def shared_network(own: Sequence[Interface], others: Sequence[Sequence[Interface]]) -> str | None:
    """Own address in a network in which every other host has a candidate address of its own."""
    for interface in candidates(own, others):
        network = interface.network()
        everywhere = all(any(o.network() == network and not o.name.startswith(INNER) for o in host) for host in others)
        if everywhere:
            return interface.address
    return None


def source_address(target: str) -> str | None:
    """The address from which the system would send to ``target``. A connected datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def choose_address(
    own: Sequence[Interface],
    others: Sequence[Sequence[Interface]],
    address: str | None = None,
    networks: Sequence[str] = (),
) -> str:
    """The address of this host for the other hosts. Raises :class:`CollectiveError` listing what there is to choose from."""
    if address:
        return address
    if networks:
        found = in_networks(own, networks)
    else:
        found = shared_network(own, others)
        if not found:
            found = _routed(own, others)
    if found:
        return found
    wish = f"in COLLECTIVE_NETWORK={','.join(networks)}" if networks else "that leads to the other hosts"
    raise CollectiveError(f"{socket.gethostname()} has no address {wish}; {_described(own)}", "invalid")


def choose_rails(own: Sequence[Interface], address: str, networks: Sequence[str]) -> list[str]:
    """The address of this host in each of ``networks``, of the kind of ``address`` and on another interface (but loopback's).

    Raises :class:`CollectiveError` where one has none.
    """
    first = ipaddress.ip_address(address)
    taken = {first}
    rails: list[str] = []
    for network in networks:
        cards = {i.name for i in own if ipaddress.ip_address(i.address) in taken and not ipaddress.ip_address(i.address).is_loopback}
        free = [i for i in own if i.name not in cards and ipaddress.ip_address(i.address).version == first.version]
        found = in_networks([i for i in free if ipaddress.ip_address(i.address) not in taken], [network], "COLLECTIVE_RAILS")
        if not found:
            text = (
                f"{socket.gethostname()} has no address in COLLECTIVE_RAILS={network} on another card than {', '.join([address, *rails])}"
            )
            raise CollectiveError(f"{text}; {_described(own)}", "invalid")
        taken.add(ipaddress.ip_address(found))
        rails.append(found)
    return rails


def _described(own: Sequence[Interface]) -> str:
    return "its interfaces: " + (", ".join(f"{i.name} {i.address}/{i.prefix}" for i in own) or "none")


def _routed(own: Sequence[Interface], others: Sequence[Sequence[Interface]]) -> str | None:
    usable = {i.address for i in candidates(own, others)}
    for host in others:
        for target in candidates(host, [own]):
            found = source_address(target.address)
            if found in usable:
                return found
    return None


def interfaces_of(rows: Sequence[tuple[str, str, int]]) -> list[Interface]:
    return [Interface(*row) for row in rows]


def interface_of(own: Sequence[Interface], address: str, networks: Sequence[str] = ()) -> str | None:
    """The name of the interface with this host's address in ``networks``, where they are given, else with ``address``."""
    wanted = in_networks(own, networks) if networks else address
    return next((interface.name for interface in own if interface.address == wanted), None)


def free_port(family: int = socket.AF_INET) -> int:
    """A TCP port that nobody uses now."""
    return free_ports(1, family)[0]


def free_ports(count: int, family: int = socket.AF_INET) -> list[int]:
    """TCP ports that nobody uses now, all different."""
    with contextlib.ExitStack() as probes:
        found = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket(family))
            probe.bind(("", 0))
            found.append(int(probe.getsockname()[1]))
        return found
