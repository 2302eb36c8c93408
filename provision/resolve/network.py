"""The network for MPI: the interface at which the other hosts reach this one."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from provision.plan.model import Network
from provision.resolve.remedies import Conflict, Proposal, exclude
from provision.survey import Facts
from provision.survey.model import Interface


def network(name: str, host: Facts, requested: str | None, *, alone: bool) -> Network:
    """The requested interface, else the one that carried our own connection, else the default route's. Never docker0.

    Raises:
        Conflict: there is none.
    """
    interfaces = {entry.name: entry for entry in host.network.interfaces}
    connection = host.network.ssh_connection
    if requested is not None and (requested not in interfaces or not interfaces[requested].ipv4):
        wrong = "has no IPv4 address" if requested in interfaces else f"{name} has no such interface"
        raise Conflict("network-interface", name, f"provision_interface={requested}: {wrong}", _proposals(name, host, alone=alone))
    candidates = [
        (requested, "requested in the inventory"),
        (connection.interface, "it carried our own connection"),
        (host.network.default_route_interface, "it has the default route"),
        *((entry, "the first that is up") for entry in sorted(interfaces)),
    ]
    for interface, why in candidates:
        entry = interfaces.get(interface or "")
        if entry is None or (interface != requested and (entry.loopback or entry.virtual or not entry.up)):
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
    other = Proposal("provision_interface=NAME in the inventory, of an interface that the other hosts reach")
    what = "no network interface with an IPv4 address besides loopback and container bridges"
    raise Conflict("network", name, what, (exclude([name]), other))


def _proposals(name: str, host: Facts, *, alone: bool) -> Iterator[Proposal]:
    """Remedies for a requested interface that is unavailable."""
    try:
        found = network(name, host, None, alone=alone)
        yield Proposal(f"leave it out: the plan takes {found.interface or 'the one that the survey finds'}")
    except Conflict:
        pass
    usable = [each.name for each in host.network.interfaces if each.ipv4 and not each.loopback]
    if usable:
        yield Proposal(f"provision_interface={' or '.join(sorted(usable))}")
    yield exclude([name])


def _ipv4(interface: Interface, preferred: str | None) -> str | None:
    """The interface's IPv4 address with its prefix length: the preferred one if it is among them, else the first."""
    found = interface.ipv4
    return next((cidr for cidr in found if cidr.split("/")[0] == preferred), found[0] if found else None)


def notes(networks: Iterable[Network]) -> list[str]:
    """A note for hosts that do not share one network."""
    found = sorted({network.cidr for network in networks if network.cidr})
    if len(found) <= 1:
        return []
    listed = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return [f"hosts are in different networks ({listed}): MPI needs a route between them, without NAT"]
