"""What a sandbox needs of whatever runs its hosts: a container engine, or namespaces of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from provision.containers.controller_settings import Settings
from provision.sandbox.model import EngineName, SandboxHost

Say = Callable[[str], None]


@dataclass(frozen=True)
class Base:
    """What hosts of one base start from: the base as the user named it, and the engine's own name or path of it."""

    name: str
    image: str


class Engine(Protocol):
    """Runs hosts. Everything that it makes carries the sandbox's name, from which alone it is found and removed."""

    name: EngineName

    def sandboxes(self) -> set[str]:
        """The names of all sandboxes that have hosts."""

    def has(self, sandbox: str) -> bool:
        """Whether anything of that sandbox exists outside its folder."""

    def hosts(self, sandbox: str) -> list[SandboxHost]:
        """Its hosts, running or not, in the order of their numbers."""

    def create_network(self, sandbox: str, hosts: Sequence[str]) -> None:
        """Make the network of the hosts of these names, which reach each other and what this machine reaches."""

    def base(self, sandbox: str, base: str, settings: Settings, say: Say) -> Base:
        """Fetch or make what hosts of that base start from. Raises ProvisionError where it can be neither."""

    def start(
        self, sandbox: str, host: str, base: Base, sudo: str, settings: Settings, files: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> SandboxHost:
        """Start a host. ``files`` makes the files of ``host_files.FOLDER`` from its os-release."""

    def public_keys(self, host: SandboxHost) -> str | None:
        """The host's public ssh keys, read without its network; None until its first start is complete."""

    def require_running(self, host: SandboxHost) -> None:
        """Raise ProvisionError, with the last lines that the host printed, if it has stopped."""

    def last_lines(self, host: SandboxHost) -> str:
        """What the host printed last."""

    def remove(self, sandbox: str, note: Callable[[str], None]) -> None:
        """Remove everything of the sandbox outside its folder; ``note`` is told what."""
