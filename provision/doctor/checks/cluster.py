"""Checks of all hosts together: what differs between them, networks, and connections from one to another."""

from __future__ import annotations

import ipaddress
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable

from provision.base.problems import Severity
from provision.base.text import joined
from provision.doctor.checks.registry import Connections, Hosts, Observation, Observations, check
from provision.survey import Facts, links
from provision.survey.model import Interface


def _differing(hosts: Hosts, what: str, value: Callable[[Facts], object]) -> Observations:
    """Hosts whose value is not that of most hosts; those without a value are left out."""
    values = {name: found for name, facts in hosts.items() if (found := value(facts))}
    if len(set(values.values())) < 2:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    like = next(name for name, found in values.items() if found == usual)
    for name, found in values.items():
        if found != usual:
            yield Observation(f"{what} is {found}", f"{usual}, as on {like}", host=name)


def _first_open_mpi(facts: Facts) -> object:
    return next((each.version for each in facts.mpi.found if each.path == facts.mpi.first and each.flavour == "openmpi"), None)


def _same(name: str, what: str, value: Callable[[Facts], object], severity: Severity | None = None) -> None:
    """Register a check that a value is the same on all hosts."""
    check(name, severity)(lambda hosts: _differing(hosts, what, value))


_same("driver-differs", "the NVIDIA driver", lambda facts: facts.driver.version if facts.driver else None)
_same("nccl-version-mismatch-hosts", "NCCL", lambda facts: next((each.version for each in facts.nccl.libraries), None), "warning")
# mpirun starts what the non-interactive PATH finds; what we installed is started by its path.
_same("ompi-version-mismatch", "the Open MPI that mpirun finds first", _first_open_mpi)
_same("ompi-version-mismatch", "the installed Open MPI", lambda facts: facts.installed.packages.get("openmpi"))
_same(
    "python-version-differs", "the environment's Python", lambda facts: ".".join((facts.installed.venv.python_version or "").split(".")[:2])
)
_same("torch-differs", "PyTorch", lambda facts: facts.installed.packages.get("torch"))
_same("engine-differs", "the engine", lambda facts: facts.installed.packages.get("collective_core"))
_same("mtu-differs", "the MTU of its network", lambda facts: picked.mtu if (picked := facts.network.picked) else None)


@check("orte-unpack-past-end", "warning")
def _hwloc(hosts: Hosts) -> Observations:
    """Only where Open MPI is the distribution's, which uses the system's hwloc."""
    distribution = {name: facts for name, facts in hosts.items() if any("openmpi" in package for package in facts.packages)}
    yield from _differing(distribution, "hwloc", lambda facts: next((each.file for each in facts.hwloc.libraries), None))


@check("hostname-loopback-mpi", "warning")
def _loopback(hosts: Hosts) -> Observations:
    """A single host may map its name to 127.0.1.1; in a cluster it tells the others that address."""
    if len(hosts) < 2:
        return
    for name, facts in hosts.items():
        wrong = [address for address in facts.hosts_file if address.startswith("127.")]
        address = facts.network.ssh_connection.server_address if facts.network.ssh_connection else None
        if wrong and (len(wrong) == len(facts.hosts_file) or facts.hosts_file[0].startswith("127.")):
            expected = address or "its address in the network of the others"
            edit = f"s/^{wrong[0]}[[:space:]].*/{address or 'ADDRESS'} {facts.hostname}/"
            fix = (f"sudo sed -i {shlex.quote(edit)} /etc/hosts",)
            yield Observation(f"/etc/hosts maps its own name {facts.hostname} to {wrong[0]}", expected, fix, name)


@check("btl-tcp-unexpected-peer", "warning")
def _same_address(hosts: Hosts) -> Observations:
    owners: dict[str, list[str]] = defaultdict(list)
    for name, facts in hosts.items():
        for interface in facts.network.interfaces:
            if not interface.virtual and not interface.loopback and interface.up:
                for cidr in interface.addresses:
                    owners[cidr.split("/")[0]].append(name)
    for address, names in owners.items():
        if len(set(names)) > 1 and not address.startswith("fe80:"):
            yield Observation(f"{address} is an address of {' and '.join(names)}", "one host per address", host=names[-1])


@check("btl-tcp-docker0", "warning")
def _bridges(hosts: Hosts) -> Observations:
    """Unless Open MPI is told which network to use, it also tries the bridges that every host with containers has."""
    bridges: dict[str, dict[str, str]] = defaultdict(dict)
    for name, facts in hosts.items():
        chosen = facts.signs.mca_params.get("btl_tcp_if_include") or facts.environment.variables.get("OMPI_MCA_btl_tcp_if_include")
        if facts.mpi.found and not chosen:
            for interface in facts.network.interfaces:
                if interface.kind == "container" and interface.up:
                    for cidr in interface.addresses:
                        bridges[cidr][name] = interface.name
    for cidr, owners in bridges.items():
        if len(owners) > 1 and ":" not in cidr:
            name, bridge = next(iter(owners.items()))
            what = f"{cidr} ({bridge}) exists on {' and '.join(owners)}, and no setting excludes it from Open MPI"
            yield Observation(what, "btl_tcp_if_include = the hosts' network", host=name)


def _subnets(interface: Interface | None) -> set[str]:
    return {
        str(ipaddress.ip_interface(cidr).network) for cidr in (interface.addresses if interface else ()) if not cidr.startswith("fe80:")
    }


@check("mpi-other-network")
def _other_network(hosts: Hosts) -> Observations:
    """Hosts on which MPI would use a network that most others are not in."""
    subnets = {name: found for name, facts in hosts.items() if (found := _subnets(facts.network.picked))}
    count = Counter(subnet for found in subnets.values() for subnet in found)
    if not count:
        return
    usual, members = count.most_common(1)[0]
    for name, found in subnets.items():
        if usual not in found and members > 1:
            picked = hosts[name].network.picked
            what = f"MPI would use {picked.name if picked else '?'} ({', '.join(sorted(found))})"
            yield Observation(what, f"an interface in {usual}, as on {members} others", host=name)


@check("mpi-faster-network")
def _faster_network(hosts: Hosts) -> Observations:
    """Another network that all hosts share and that is faster everywhere than the one that MPI would use."""
    used = {name: picked for name, facts in hosts.items() if (picked := facts.network.picked)}
    for link in links.faster(hosts) if len(used) == len(hosts) else ():
        is_sure = all(better.speed for better, _ in link.members.values()) and all(picked.mbps < link.mbps for picked in used.values())
        for name, (better, _) in link.members.items() if is_sure else ():
            current = f"{used[name].name} ({used[name].mbps} Mbit/s)"
            what = f"MPI would use {current}; {better.name} has {better.mbps} Mbit/s and is on all hosts' network"
            yield Observation(what, better.name, (f"provision_interface={better.name}   # next to the host in the inventory",), name)


@check("btl-tcp-firewall")
def _blocked(connections: Connections) -> Observations:
    """Hosts that listened and were not reached."""
    for target, theirs in connections.items():
        unreached_from: dict[str, list[str]] = defaultdict(list)
        for source, mine in connections.items():
            if theirs.port is not None and (error := mine.tcp.get(target, {}).get(theirs.port)):
                unreached_from[error].append(source)
        for error, sources in unreached_from.items():
            yield Observation(f"a port that it opened was not reached from {joined(sources)}: {error}", "a connection", host=target)


@check("host-warning")
def _cannot_listen(connections: Connections) -> Observations:
    for name, mine in connections.items():
        if mine.port is None:
            yield Observation(f"it could not open a port on its own address: {mine.problem}", "a free port", host=name)
