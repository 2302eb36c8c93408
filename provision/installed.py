"""What hosts hold, as the manifests say that earlier runs left there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from provision.errors import ProvisionError
from provision.inventory import Inventory
from provision.plan import HostPlan, Plan


def without_manifest(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The hosts, of those whose facts are given, on which no run has come to its end."""
    return [name for name, each in facts.items() if not _manifest(each)]


def plan(inventory: Inventory, facts: Mapping[str, Mapping[str, Any]]) -> Plan:
    """What the manifests say, with the slots that the inventory says now, in the inventory's order.

    Raises:
        ProvisionError: a manifest cannot be read.
    """
    hosts: dict[str, HostPlan] = {}
    for name in (host.name for host in inventory.hosts if host.name in facts):
        try:
            found = HostPlan.from_dict(_manifest(facts[name])["host"])
        except (KeyError, TypeError) as error:
            again = f"provision up {inventory.argument}"
            raise ProvisionError("its manifest was written by another version or is damaged", where=name, todo=again) from error
        hosts[name] = replace(found, name=name, slots=inventory.host(name).slots or found.slots)
    return Plan(hosts)


def _manifest(facts: Mapping[str, Any]) -> Any:
    return (facts.get("installed") or {}).get("manifest")
