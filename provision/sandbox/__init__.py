"""Throw-away hosts on this machine: containers with sshd that look to the rest of the toolkit like any other Linux host.

``up`` makes them, ``status`` and ``every`` describe them, ``down`` removes every trace. They have nothing that a bare host would not have.
"""

from provision.containers.container_engine import engine_available
from provision.sandbox.lifecycle import down, every, status, up
from provision.sandbox.model import Sandbox, SandboxHost, SudoMode

__all__ = ["Sandbox", "SandboxHost", "SudoMode", "down", "engine_available", "every", "status", "up"]
