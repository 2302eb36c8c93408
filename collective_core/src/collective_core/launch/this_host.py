"""What the starter of a job must know of a host on which ranks shall run."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from collective_core.runtime import network
from collective_core.version import __version__


def python() -> str:
    """The interpreter's version as far as functions depend on it when they travel."""
    return "{}.{}".format(*sys.version_info[:2])


def facts() -> dict[str, Any]:
    """``address``: at which ssh reached this host, ``controller``: from where; both empty without ssh. ``port``: a free one."""
    reached = os.environ.get("SSH_CONNECTION", "").split()
    address = reached[2] if len(reached) > 2 else ""
    return {
        "version": __version__,
        "python": python(),
        "address": address,
        "controller": reached[0] if reached else "",
        "port": network.free_port(socket.AF_INET6 if ":" in address else socket.AF_INET),
    }
