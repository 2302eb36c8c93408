"""Containers of an image as hosts: keys and files by which they reach each other over ssh, and the plan of what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from provision.base import resources
from provision.catalog import Catalog
from provision.install.ssh_mesh import Member
from provision.inventory import Inventory
from provision.plan.model import Plan
from provision.resolve import network
from provision.sandbox.containers import ssh_keys
from provision.sandbox.host_files import private_tar
from provision.survey import Facts, installed

HOST_KEY = ".provision-sshd/host_ed25519"
AUTHORIZED = ".ssh/authorized_keys"
KEY = ".ssh/provision_ed25519"


@dataclass(frozen=True)
class Key:
    """A key pair: the private one's file, and both as text."""

    file: Path
    private: str
    public: str


def make_keys(folder: Path, names: Iterable[str]) -> dict[str, Key]:
    """A key pair for each name; its files are in ``folder``, numbered."""
    found = {}
    for number, name in enumerate(names):
        file = folder / f"key-{number}"
        public = ssh_keys.make_pair(file, f"provision {name}")
        found[name] = Key(file, file.read_text(encoding="utf-8"), public)
    return found


def home(catalog: Catalog) -> str:
    """The home of the image's user."""
    return f"/home/{catalog.images().user.name}"


def member(address: str, port: int, host_key: str, catalog: Catalog) -> Member:
    """A container as the others know it."""
    return {"address": address, "port": port, "login": catalog.images().user.name, "host_keys": [host_key.strip()]}


def ssh_files(members: Mapping[str, Member]) -> dict[str, str]:
    """The files by which a container knows all members, below its home, as the role ssh_mesh writes them on hosts."""
    return {f".ssh/provision_{name}": ssh_file(name, members) for name in ("known_hosts", "config")}


def ssh_file(name: str, members: Mapping[str, Member]) -> str:
    """The text of one of them: ``known_hosts`` or ``config``."""
    loader = jinja2.FileSystemLoader(resources.folder("playbooks") / "roles/ssh_mesh/templates")
    known = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)  # noqa: S701
    return known.get_template(f"{name}.j2").render(provision_members=members)


def home_archive(files: Mapping[str, str], catalog: Catalog) -> bytes:
    """A tar of these files for the home of the image's user, which only they can read."""
    return private_tar(sorted({path.partition("/")[0] for path in files}), files, catalog.images().user.uid)


def plan_of(inventory: Inventory, facts: Mapping[str, Facts], *, alone: bool, slots: Mapping[str, int] | None = None) -> Plan:
    """The plan in the image's manifest, which is among the facts, with the containers' own names, networks and slots."""
    made = installed.plan(inventory, facts)
    hosts = {}
    for name, held in made.hosts.items():
        found = facts[name]
        place = network.network(name, found, inventory.host(name).interface, alone=alone)
        taken = slots[name] if slots else held.slots
        hosts[name] = replace(held, hostname=str(found.hostname or name), network=place, slots=taken, root=False)
    return replace(made, hosts=hosts)
