"""The networks that hosts share: which are faster than the one by which they were reached, and whether they connect the hosts."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from provision.remote.session import Session
from provision.survey import reachability
from provision.survey.model import Facts, Interface


class Link(NamedTuple):
    """A network (CIDR) of two or more hosts: a cable, a switch, or what is behind it. ``members``: host → (interface, address)."""

    cidr: str
    members: Mapping[str, tuple[Interface, str]]
    mbps: int


def _ways(facts: Facts) -> dict[str, tuple[Interface, str]]:
    """Network → (interface, address) by which others may reach the host; that of the survey's connection where there are several."""
    real = [each for each in facts.network.interfaces if each.up and not each.loopback and not each.virtual]
    found = [(each, way) for each in real for cidr in each.ipv4 if not (way := ipaddress.IPv4Interface(cidr)).is_link_local]
    # The last one stays.
    found.sort(key=lambda way: (str(way[1].ip) == facts.network.ssh_connection.server_address, way[0].mbps))
    return {str(cidr.network): (each, str(cidr.ip)) for each, cidr in found}


def shared(hosts: Mapping[str, Facts]) -> list[Link]:
    """The networks of two or more hosts, the fastest first, except those of containers and tunnels."""
    found: dict[str, dict[str, tuple[Interface, str]]] = defaultdict(dict)
    for host, facts in hosts.items():
        for cidr, way in _ways(facts).items():
            found[cidr][host] = way
    several = {cidr: members for cidr, members in found.items() if len({address for _, address in members.values()}) > 1}
    links = [Link(cidr, members, min(each.mbps for each, _ in members.values())) for cidr, members in several.items()]
    return sorted(links, key=lambda link: -link.mbps)


def faster(hosts: Mapping[str, Facts]) -> list[Link]:
    """The networks of all hosts that are faster than the one now used, the fastest first; none in which a test has failed."""
    failed = {cidr for facts in hosts.values() for cidr in facts.network.unreached}
    links = [link for link in shared(hosts) if len(link.members) == len(hosts) and link.cidr not in failed]
    slowest = min((picked.mbps if (picked := facts.network.picked) else 0 for facts in hosts.values()), default=0)
    return [link for link in links if link.mbps > slowest]


def cleared(facts: Facts) -> Facts:
    """Without a choice: what a host says of it counts for nothing."""
    return _with(facts, instead_of=None, unreached=[])


def with_networks(session: Session, hosts: Mapping[str, Facts], *, tries: bool) -> Mapping[str, Facts]:
    """The hosts, as they reach each other: in the network of the last run, if it was one and all have it; else, with ``tries``, in the
    fastest of all in which they do, at a port and at sshd's; else as the survey reached them. Where the inventory chooses none is tried."""
    last = {facts.installed.plan and facts.installed.plan.network.cidr for facts in hosts.values()}
    if any(host.interface for host in session.inventory.hosts):
        return hosts
    if len(last) == 1 and all(last & _ways(facts).keys() for facts in hosts.values()):
        return {name: _by(facts, *_ways(facts)[str(*last)]) for name, facts in hosts.items()}
    unreached: list[str] = []
    for link in faster(hosts)[: 2 * tries]:  # each takes seconds
        there = {name: _by(facts, *link.members[name]) for name, facts in hosts.items()}
        answers, problems = reachability.check(session, there, logins=False)
        if not problems and not any(any((*each.tcp.values(), *each.ssh.values())) for each in answers.values()):
            return there
        unreached.append(link.cidr)
    return {name: _with(facts, unreached=unreached) for name, facts in hosts.items()}


def _by(facts: Facts, interface: Interface, address: str) -> Facts:
    carrier = facts.network.ssh_connection.interface
    if facts.network.picked and facts.network.picked.name == interface.name:
        return facts
    connection = facts.network.ssh_connection.model_copy(update={"interface": interface.name, "server_address": address})
    return _with(facts, ssh_connection=connection, instead_of=carrier)


def _with(facts: Facts, **known: object) -> Facts:
    return facts.model_copy(update={"network": facts.network.model_copy(update=known)})
