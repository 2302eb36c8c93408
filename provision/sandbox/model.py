"""What a sandbox is, as data. No behaviour, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SudoMode = Literal["nopasswd", "password", "none"]


@dataclass(frozen=True)
class SandboxHost:
    """One throw-away host.

    Attributes:
        name: its host name, ``node1`` and on.
        address: its IPv4 address on the sandbox's own network; empty while it is stopped.
        container: the container's name.
        base: the base the user asked for, such as ``debian:12``.
        state: the engine's word for it: ``running``, ``exited``, ``paused`` …
    """

    name: str
    address: str
    container: str
    base: str
    state: str = "running"


@dataclass(frozen=True)
class Sandbox:
    """A set of throw-away hosts and the files that reach them.

    Attributes:
        name: the sandbox's name; several may live side by side.
        hosts: in the order of their numbers.
        inventory: the inventory file, made for the user to look at.
        user: the ordinary user on every host; root takes the same key.
        key: the private key (mode 0600).
        known_hosts: the hosts' public keys, read through the engine and so true from the first connection.
        become_password: file with ``user``'s password for sudo (mode 0600); None unless sudo asks for one.
    """

    name: str
    hosts: list[SandboxHost]
    inventory: Path
    user: str
    key: Path
    known_hosts: Path
    become_password: Path | None = None

    @property
    def running(self) -> bool:
        """True when there is at least one host and none of them is stopped."""
        return bool(self.hosts) and all(host.state == "running" for host in self.hosts)
