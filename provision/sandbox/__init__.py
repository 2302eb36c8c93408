"""Throw-away hosts on this machine, with sshd, that look to the rest of the toolkit like any other Linux host: containers, or namespaces.

``up`` makes them, ``status`` and ``every`` describe them, ``down`` removes every trace. They have nothing that a bare host would not have.
"""

from provision.sandbox.containers.container_engine import engine_available
from provision.sandbox.lifecycle import down, engine_for_hosts, every, status, up
from provision.sandbox.model import EngineName, Sandbox, SandboxHost, SudoMode

__all__ = ["EngineName", "Sandbox", "SandboxHost", "SudoMode", "down", "engine_available", "engine_for_hosts", "every", "status", "up"]
