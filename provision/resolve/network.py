"""The network for MPI: the interface at which the other hosts reach this one."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from provision.base.text import few, joined, shortened
from provision.plan.model import Network
from provision.resolve.remedies import Conflict, Proposal, exclude
from provision.survey import Facts, links
from provision.survey.model import Interface

_CHOSEN = "the hosts reach each other in it"


def network(name: str, host: Facts, requested: str | None, *, alone: bool) -> Network:
    """The requested interface, else that of the survey's connection or choice, else the default route's. Never docker0.

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
        (connection.interface, _CHOSEN if host.network.instead_of else "it carried our own connection"),
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


def notes(networks: Mapping[str, Network], hosts: Mapping[str, Facts]) -> Iterator[str]:
    """What to know of several hosts' networks: whether it is one, why it is not that of our connection, its MTU, and what is faster."""
    if len(hosts) < 2:
        return
    found = sorted({network.cidr for network in networks.values() if network.cidr})
    if len(found) > 1:
        yield f"hosts are in different networks ({few(found)}): MPI needs a route between them, without NAT"
    used = {name: each for name, host in hosts.items() for each in host.network.interfaces if each.name == networks[name].interface}
    mbps = min((each.mbps for each in used.values()), default=0)
    if carriers := {str(host.network.instead_of) for name, host in hosts.items() if networks[name].why == _CHOSEN}:
        yield f"network {joined(found)} ({mbps / 1000:g} Gb/s) instead of {joined(sorted(carriers))}: {_CHOSEN}"
    sizes = sorted({each.mtu for each in used.values() if each.mtu})
    if len(sizes) > 1:
        listed = "; ".join(f"{size} on {shortened([name for name in used if used[name].mtu == size])}" for size in sizes)
        yield f"the MTU of {joined(found)} differs ({listed}): long packets may be lost: ip link set dev INTERFACE mtu {sizes[0]}"
    faster, unused = [link for link in links.shared(hosts) if link.mbps > mbps and link.cidr not in found], []
    for link in faster:
        absent = shortened([name for name in hosts if name not in link.members])
        has_failed = any(link.cidr in host.network.unreached for host in hosts.values())
        why = "the hosts have not reached each other in it" if has_failed else "not tried: provision_interface takes it"
        unused.append(f"{link.cidr} ({link.mbps / 1000:g} Gb/s, {f'without {absent}' if absent else why})")
    rdma = {each for host in hosts.values() for port in host.infiniband for each in port.interfaces}
    real = [each for host in hosts.values() for each in host.network.interfaces if each.up and not each.virtual and each.name not in rdma]
    bare = [each.name for each in real if each.mbps > mbps and each.addresses and not each.ipv4]
    unused += [f"{joined(sorted(set(bare)))} (no IPv4 address)"] if len(bare) > 1 else []
    if unused:
        is_web = {name for link in faster if 2 == len(link.members) < len(hosts) for name in link.members} == hosts.keys()
        remedy = "; bridges (with STP) or a switch would make the cables one network" * is_web
        yield f"faster networks are not used: {joined(unused)}{remedy}"
