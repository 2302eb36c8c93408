"""The hosts of the cluster that this host belongs to, as the toolkit that installed this engine has left them beside it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Sequence

from collective_core.launch.hosts import Host
from collective_core.launch.remote import SSH

#: With which the login of a host reaches the others: its keys, and theirs.
SSH_CONFIG = "~/.ssh/provision_config"


def reached(hosts: Sequence[Host], ssh: Sequence[str]) -> list[Host]:
    """``hosts``, those that the toolkit has told this host of with the configuration that reaches them.

    What the user says counts more: with an ``ssh`` of theirs, or with a configuration in it, nothing is added, and the options that a
    host brings with it come later and win.
    """
    if tuple(ssh[: len(SSH)]) != SSH or "-F" in ssh:
        return list(hosts)
    known = _told_of()
    config = ("-F", os.path.expanduser(SSH_CONFIG))
    return [
        host._replace(way=(*config, *(host.way or (host.name,)))) if not host.is_here and (host.way or (host.name,))[-1] in known else host
        for host in hosts
    ]


def _told_of() -> set[str]:
    try:
        lines = Path(SSH_CONFIG).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {name for line in lines if line.startswith("Host ") for name in line.split()[1:]} - {"*"}


def find() -> list[Host] | None:
    """All hosts with their slots, this one as ``localhost``; None where this environment is not the toolkit's."""
    try:
        manifest = json.loads((Path(sys.prefix).parent / "manifest.json").read_text(encoding="utf-8"))
        own = manifest["host"]["name"]
        members = manifest.get("members") or {own: {"slots": manifest["host"]["slots"]}}
        return [Host("localhost" if name == own else name, int(member["slots"])) for name, member in members.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
