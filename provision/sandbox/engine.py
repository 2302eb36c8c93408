"""What a sandbox needs of what runs its hosts: a container engine, or namespaces of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from provision.sandbox.containers.controller_settings import Settings
from provision.sandbox.model import EngineName, SandboxHost

Say = Callable[[str], None]
#: os-release of a host -> its files in ``host_files.FOLDER``, by name.
Files = Callable[[Mapping[str, str]], Mapping[str, str]]


class Engine(Protocol):
    """Runs hosts. Everything that it makes carries the sandbox's name, from which alone it is found and removed."""

    name: EngineName

    # Names of all sandboxes that have hosts; whether anything of one exists; its hosts, running or not, in the order of their numbers.
    def sandboxes(self) -> set[str]: ...
    def has(self, sandbox: str) -> bool: ...
    def hosts(self, sandbox: str) -> list[SandboxHost]: ...

    # Make the network of these hosts; the image or tree of a base; a host of it, with labels.
    def create_network(self, sandbox: str, hosts: Sequence[str]) -> None: ...
    def image(self, sandbox: str, base: str, settings: Settings, say: Say) -> str: ...
    def start(self, sandbox: str, host: str, image: str, labels: Mapping[str, str], settings: Settings, files: Files) -> SandboxHost: ...

    # The number of its first process on this machine; 0 where it does not run, or not here.
    def process(self, host: SandboxHost) -> int: ...

    # Its public ssh keys, not read over its network, None until its first start is complete; whether it runs; its output.
    def public_keys(self, host: SandboxHost) -> str | None: ...
    def is_running(self, host: SandboxHost) -> bool: ...
    def last_lines(self, host: SandboxHost) -> str: ...

    # Remove everything but the sandbox's folder; `note` is called with what was removed.
    def remove(self, sandbox: str, note: Say) -> None: ...
