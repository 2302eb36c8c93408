"""Members of the cluster: hosts that reach each other by ssh key, and the networks that MPI uses between them. Pure.

A run with ``--limit`` must not drop the other members: they are read from the manifests of the hosts in the run.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from provision.inventory import Inventory
from provision.plan.model import PUBLIC_KEY, HostPlan, Plan
from provision.survey import Facts

# A host's address, port and login, its host keys, and its own public key (None: not known yet).
Member = dict[str, Any]

WORD = re.compile(r"[^\s\"'*?!]+")


def cluster_id(inventory: Inventory) -> str:
    """Identifies the set of hosts in the marker lines of files that several clusters share."""
    members = ",".join(sorted(f"{host.address}:{host.port or 22}" for host in inventory.everyone))
    return hashlib.sha256(members.encode()).hexdigest()[:12]


def members(plan: Plan, inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, Member]:
    """All members by name: the plan's hosts first, then those outside ``--limit`` that their manifests name."""
    found = {name: _member(host, facts.get(name)) for name, host in plan.hosts.items()}
    left_out = inventory.left_out
    for name in plan.hosts if left_out else ():
        for other, known in remembered(facts.get(name)).items():
            if other in left_out:
                found.setdefault(other, known)
    return found


def remembered(facts: Facts | None) -> dict[str, Member]:
    """The members that a host's manifest names, without entries that could break out of a line of a file: a host may say anything."""
    members = facts.installed.manifest.members if facts and facts.installed.manifest else {}
    return {name: member for name, member in members.items() if _is_valid(name, member)} if not isinstance(members, str) else {}


def _is_valid(name: str, member: Any) -> bool:
    try:
        ipaddress.ip_address(member["address"])
        ipaddress.ip_network(member["network"])
        keys = [*member["host_keys"], *([member["key"]] if member["key"] is not None else [])]
        return bool(
            isinstance(member["port"], int)
            and all(WORD.fullmatch(text) for text in (name, member["login"]))
            and all(PUBLIC_KEY.fullmatch(key) for key in keys)
        )
    except (KeyError, TypeError, ValueError):
        return False


def public_key(text: object) -> str | None:
    """``text`` where it is one line with a public key, else None."""
    return text if isinstance(text, str) and PUBLIC_KEY.fullmatch(text) else None


def networks(members: Mapping[str, Member]) -> list[str]:
    """The networks that MPI may use, each once, in the members' order."""
    return list(dict.fromkeys(member["network"] for member in members.values() if member["network"]))


def _member(host: HostPlan, facts: Facts | None) -> Member:
    return {
        "address": host.network.address,
        "network": host.network.cidr,
        "port": host.ssh_port,
        "login": host.login,
        "slots": host.slots,
        "host_keys": list(host.ssh_host_keys),
        "key": public_key(facts.ssh.mesh_key if facts else None),
    }
