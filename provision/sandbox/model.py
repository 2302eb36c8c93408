"""A sandbox as data, and the inventory that describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from provision.sandbox import names
from provision.sandbox.containers import ssh_keys

SudoMode = Literal["nopasswd", "password", "none"]
#: What runs the hosts: a container engine, or Linux namespaces of this machine.
EngineName = Literal["docker", "namespaces"]
Say = Callable[[str], None]
#: os-release of a host -> its files in ``host_files.FOLDER``, by name.
Files = Callable[[Mapping[str, str]], Mapping[str, str]]


@dataclass(frozen=True)
class SandboxHost:
    """One throw-away host, ``node1`` and on.

    ``address``: IPv4, on the sandbox's own network; empty while it is stopped. ``container``: its container's name, or its network
    namespace's. ``base``: as the user named it, such as ``debian:12``. ``state``: the engine's word: ``running``, ``exited``, ``paused`` …
    """

    name: str
    address: str
    container: str
    base: str
    sudo: str = ""
    state: str = "running"


@dataclass(frozen=True)
class Sandbox:
    """Throw-away hosts, in the order of their numbers, and a folder with the files that reach them.

    ``user``: the ordinary user on every host; root takes the same key.
    """

    name: str
    hosts: list[SandboxHost]
    folder: Path
    engine: EngineName = "docker"
    user: ClassVar[str] = names.USER

    @property
    def inventory(self) -> Path:
        return self.folder / "hosts.ini"

    @property
    def key(self) -> Path:
        """The private key (mode 0600)."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The hosts' public keys, read through the engine and so trusted from the first connection."""
        return self.folder / "known_hosts"

    @property
    def become_password(self) -> Path | None:
        """The file with the user's password for sudo (mode 0600); None unless sudo asks for one."""
        file = self.folder / "become_password"
        return file if file.exists() else None

    @property
    def running(self) -> bool:
        """True when there is at least one host and none of them is stopped."""
        return bool(self.hosts) and all(host.state == "running" for host in self.hosts)

    def inventory_text(self, slots: int) -> str:
        """An Ansible inventory in INI form, commented for the person who opens it. ``slots``: ranks per host."""
        width = max(len(host.name) for host in self.hosts)
        hosts = "\n".join(f"{host.name:<{width}}  ansible_host={host.address}  slots={slots}" for host in self.hosts)
        quoted = [option if " " not in option else '"' + option.replace('"', '\\"') + '"' for option in ssh_keys.options(self.known_hosts)]
        become = f"\n# {self.user}'s sudo asks for the password in {self.become_password}\n" if self.become_password else ""
        return f"""\
# Throw-away hosts of the sandbox '{self.name}', made by `provision sandbox up`. `{names.command("down", self.name)}` removes them.
# One line per host: its name, its address, and how many ranks it may run (slots).
{hosts}

# How to log in. The hosts' keys are known beforehand, so an impostor is refused. User root takes the same key.
[all:vars]
ansible_user={self.user}
ansible_ssh_private_key_file={self.key}
ansible_ssh_common_args='{" ".join(quoted)}'
ansible_python_interpreter=/usr/bin/python3
{become}"""
