"""Facts that the starter of a job must know of a host on which ranks shall run."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any, Sequence

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import network
from collective_core.version import __version__


def python() -> str:
    """The interpreter's version as far as functions depend on it when they travel."""
    return "{}.{}".format(*sys.version_info[:2])


def facts() -> dict[str, Any]:
    """``address``: at which ssh reached this host, ``controller``: from where; both empty without ssh.

    ``port``, ``master_port``: free ones, for the engine's own meeting and for torch.distributed's.
    """
    reached = os.environ.get("SSH_CONNECTION", "").split()
    address = reached[2] if len(reached) > 2 else ""
    port, master_port = network.free_ports(2, socket.AF_INET6 if ":" in address else socket.AF_INET)
    return {
        "version": __version__,
        "python": python(),
        "address": address,
        "controller": reached[0] if reached else "",
        "port": port,
        "master_port": master_port,
    }


def gpus() -> int:
    """GPUs of this host that this process may use; AMD's where HIP_VISIBLE_DEVICES names them."""
    visible = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def interface(address: str, networks: Sequence[str]) -> str | None:
    """The name of the interface with this host's address in ``networks``, where there are any, else with ``address``; None: none has."""
    # Where the engine's library cannot be opened, or a network cannot be read, the ranks say so themselves.
    with contextlib.suppress(CollectiveError, OSError):
        return network.interface_of(network.interfaces_of(_native.interfaces()), address, networks)
    return None
