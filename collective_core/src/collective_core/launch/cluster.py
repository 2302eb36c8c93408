"""The hosts of the cluster that this host belongs to, as the toolkit that installed this engine has left them beside it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple, Sequence

from collective_core.launch.hosts import Host

#: With which the login of a host reaches the others.
SSH_CONFIG = "~/.ssh/provision_config"


def reached(host: Host) -> Host:
    """``host``, with the way to it where it is one that the toolkit has told this host of, and no other way is known."""
    if host.way or host.is_here or host.name not in _told_of():
        return host
    return host._replace(way=("-F", os.path.expanduser(SSH_CONFIG), host.name))


def _told_of() -> set[str]:
    try:
        lines = Path(SSH_CONFIG).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {name for line in lines if line.startswith("Host ") for name in line.split()[1:]} - {"*"}


class Cluster(NamedTuple):
    """``ssh_options``: with which ssh reaches the other hosts; empty where there are none."""

    hosts: list[Host]
    ssh_options: Sequence[str]


def find() -> Cluster | None:
    """All hosts with their slots, this one as ``localhost``; None where this environment is not the toolkit's."""
    try:
        manifest = json.loads((Path(sys.prefix).parent / "manifest.json").read_text(encoding="utf-8"))
        own = manifest["host"]["name"]
        members = manifest.get("members") or {own: {"slots": manifest["host"]["slots"]}}
        hosts = [Host("localhost" if name == own else name, int(member["slots"])) for name, member in members.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Cluster(hosts, ("-F", os.path.expanduser(SSH_CONFIG)) if len(hosts) > 1 else ())
