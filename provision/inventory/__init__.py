"""The inventory: who the hosts are. Read through Ansible's own parser, checked before any connection is made.

    inventory = load("hosts.ini")        # or "localhost", or "node1,admin@node2:2222"
    for host in inventory.hosts: ...

`load` collects every problem with its place and raises one `InventoryError`; warnings are in `Inventory.problems`.
"""

from __future__ import annotations

from provision.inventory.loading import by_name, is_meant_as_file, listed, load
from provision.inventory.model import ENCRYPTED, Host, Inventory, InventoryError

__all__ = ["ENCRYPTED", "Host", "Inventory", "InventoryError", "by_name", "is_meant_as_file", "listed", "load"]
