"""Hosts to plan for whose facts lie in a file, so that none of them is touched."""

from __future__ import annotations

from pathlib import Path

from provision import facts
from provision.base.errors import UsageError
from provision.base.problems import Problem
from provision.base.text import joined
from provision.facts import Facts
from provision.inventory import Inventory, by_name, last_run


def read(path: Path, inventory: Inventory | None, limit: str | None = None) -> tuple[Inventory, dict[str, Facts], list[Problem]]:
    """(the hosts to plan for, the facts of those that were surveyed, what is odd about them), from a file and without touching a host.

    Without an inventory it is the hosts of the file, after ``limit``.

    Raises:
        UsageError: the file cannot be used, or holds facts of none of the hosts.
    """
    found = facts.load_file(path)
    if inventory is None:
        if limit and last_run.FAILED in limit.split(","):
            raise UsageError(f"--limit {limit}: a file of facts knows no last run", hint="name HOSTS besides --facts")
        inventory = by_name(str(path), list(found), limit)
    known, problems = {}, []
    for host in inventory.hosts:
        each = found.get(host.name)
        if isinstance(each, Facts):
            known[host.name] = facts.with_python(each, host.python, f"{inventory.where}, host {host.name}")
        elif each is not None:
            problems.append(facts.unsurveyed(host.name, each))
    if not known:
        again = f"make them again: provision survey {inventory.argument} --json"
        said = "; ".join(map(str, problems)) or "the facts are of none of the inventory's hosts"
        raise UsageError(said, where=str(path), hint=again)
    untested: dict[str, list[str]] = {}
    for name, each in known.items():
        if odd := facts.untested(each.os):
            untested.setdefault(odd, []).append(name)
    return inventory, known, [*problems, *(Problem("warning", odd, host=joined(names)) for odd, names in untested.items())]
