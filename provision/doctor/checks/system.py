"""Checks of one host: limits, disks, ssh, ports and firewalls."""

from __future__ import annotations

import ipaddress

from provision.doctor.checks.registry import Observation, Observations, check
from provision.survey import Facts
from provision.survey.model import Limits

FEW_FILES = 4096  # a rank with eight data loader workers and 64 peers passes 1024
LITTLE_DISK_MB = 1024
MASTER_PORT = 29500  # PyTorch's default


@check("too-many-open-files", "warning")
def _files(facts: Facts) -> Observations:
    limit = facts.limits.get("nofile", Limits()).soft
    if isinstance(limit, int) and limit < FEW_FILES:
        yield Observation(f"ulimit -n is {limit} in a non-interactive shell", f"{FEW_FILES} or more")


@check("disk-full", "warning")
def _disk(facts: Facts) -> Observations:
    checked = set()
    for disk in (facts.disk.prefix, facts.disk.tmp, facts.disk.home):
        free, total = disk.free_mb, disk.total_mb
        if free is not None and free < LITTLE_DISK_MB and (free, total) not in checked:
            checked.add((free, total))
            yield Observation(f"{disk.path} has {free:.0f} MB free", f"{LITTLE_DISK_MB} MB or more", (f"df -h {disk.path}",))


@check("ompi-session-dir")
def _tmp(facts: Facts) -> Observations:
    mode = facts.signs.modes.get("/tmp")
    if mode and mode not in ("1777", "0777"):
        yield Observation(f"/tmp has mode {mode}", "1777", ("sudo chmod 1777 /tmp",))


@check("ssh-permission-denied", "warning")
def _ssh_modes(facts: Facts) -> Observations:
    """sshd and ssh refuse keys that other users can read or change."""
    for file in facts.ssh.files:
        path, mode = file.path, int(file.mode, 8)
        private = path.rpartition("/")[2].startswith("id_")
        if mode & (0o077 if private else 0o022):
            is_file = private or path.endswith(("authorized_keys", "config", "known_hosts"))
            wanted = "0600" if is_file else "0700" if path.endswith(".ssh") else "0755"
            yield Observation(f"{path} has mode {file.mode}", wanted, (f"chmod {wanted} {path}",))


@check("master-port-in-use", "warning")
def _port(facts: Facts) -> Observations:
    if MASTER_PORT in facts.signs.listening:
        yield Observation(
            f"a program listens on port {MASTER_PORT}, PyTorch's default", "a free port", (f"ss -ltnp 'sport = :{MASTER_PORT}'",)
        )


@check("firewall-active")
def _firewall(facts: Facts) -> Observations:
    active = [name for name, on in (("ufw", facts.security.ufw), ("firewalld", facts.security.firewalld)) if on]
    if active:
        yield Observation(f"{' and '.join(active)} is active", "a firewall that lets the other hosts through")


@check("btl-tcp-if-include-bad")
def _if_include(facts: Facts) -> Observations:
    for source, settings in (("OMPI_MCA_", facts.environment.variables), ("", facts.signs.mca_params)):
        for name in ("btl_tcp_if_include", "oob_tcp_if_include"):
            for wanted in filter(None, settings.get(source + name, "").split(",")):
                if not _has(facts, wanted):
                    yield Observation(f"{name} is {wanted}, which this host does not have", "an interface or a subnet of this host")


def _has(facts: Facts, wanted: str) -> bool:
    interfaces = facts.network.interfaces
    if "/" not in wanted:
        return any(each.name == wanted for each in interfaces) or not interfaces
    try:
        subnet = ipaddress.ip_network(wanted, strict=False)
        return any(ipaddress.ip_interface(cidr).ip in subnet for each in interfaces for cidr in each.addresses)
    except ValueError:
        return False
