"""The network for MPI: the interface at which the other hosts reach this one."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from provision.facts import Facts
from provision.facts.model import Interface
from provision.plan.model import Network
from provision.resolve.blocked import Attempt, Blocked, leave_out


def network(name: str, host: Facts, asked: str | None, *, alone: bool) -> Network:
    """The interface for MPI: the one asked for, else the one that carried our own connection, else the default route's. Never docker0."""
    interfaces = {entry.name: entry for entry in host.network.interfaces}
    connection = host.network.ssh_connection
    if asked is not None and (asked not in interfaces or not interfaces[asked].ipv4):
        wrong = "has no IPv4 address" if asked in interfaces else f"{name} has no such interface"
        raise Blocked(name, f"provision_interface={asked}: {wrong}", _instead_of(name, host, alone=alone))
    candidates = [
        (asked, "asked for in the inventory"),
        (connection.interface, "it carried our own connection"),
        (host.network.default_route_interface, "it holds the default route"),
        *((entry, "the first that is up") for entry in sorted(interfaces)),
    ]
    for interface, why in candidates:
        entry = interfaces.get(interface or "")
        if entry is None or (interface != asked and (entry.loopback or entry.virtual or not entry.up)):
            continue
        cidr = _ipv4(entry, connection.server_address)
        if cidr:
            return Network(entry.name, cidr.split("/")[0], str(ipaddress.ip_interface(cidr).network), why)
    unknown = not interfaces and "network" in host.missing
    if alone:
        why = "nothing is known of its network" if unknown else "it has no other network"
        return Network("lo", "127.0.0.1", "127.0.0.0/8", f"the only host, and {why}")
    if unknown:
        return Network("", "", "", "nothing is known of its network: the plan is for reading, not for installing")
    raise Blocked(
        name,
        "no network interface with an IPv4 address besides loopback and container bridges",
        (leave_out([name]), Attempt("provision_interface=NAME in the inventory, of an interface that the others reach")),
    )


def _instead_of(name: str, host: Facts, *, alone: bool) -> Iterator[Attempt]:
    """What can be done about an interface that was asked for and cannot be had."""
    try:
        found = network(name, host, None, alone=alone)
        yield Attempt(f"leave it out: the plan takes {found.interface or 'what the survey finds'}")
    except Blocked:
        pass
    usable = [each.name for each in host.network.interfaces if each.ipv4 and not each.loopback]
    if usable:
        yield Attempt(f"provision_interface={' or '.join(sorted(usable))}")
    yield leave_out([name])


def _ipv4(interface: Interface, preferred: str | None) -> str | None:
    """The interface's IPv4 address with its prefix length; the one that our connection used if it is among them."""
    found = interface.ipv4
    return next((cidr for cidr in found if cidr.split("/")[0] == preferred), found[0] if found else None)


def notes(networks: Iterable[Network]) -> list[str]:
    """What to know where hosts do not share one network."""
    found = sorted({network.cidr for network in networks if network.cidr})
    if len(found) <= 1:
        return []
    listed = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return [f"hosts sit in different networks ({listed}): MPI needs a route between them, without NAT"]
