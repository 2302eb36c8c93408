"""An image of a host on which everything is installed, so that one test module installs and the others begin where it ends.

It is kept by the container engine from one run of the tests to the next, as long as nothing that is installed changes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

import docker
import docker.errors
from hosts import container, good, provision, root

from provision import sandbox as sandboxes
from provision.base import paths, process_locks
from provision.sandbox import Sandbox, names

REPOSITORY = "provision-tests/ready"
#: What decides about the content of the image.
SOURCES = ("provision", "playbooks", "collective_core")
#: Seconds: a first installation, with the engine's build, on a machine that does other things too.
LIMIT_S = 900

# What a sandbox gives each host when it starts; a host that starts from the image gets its own.
FORGET = "rm -rf /etc/provision-sandbox /etc/ssh/ssh_host_* /home/trainer/.ssh /root/.ssh && : > /etc/environment"


def image(engine: docker.DockerClient, sandbox_factory: Callable[..., Sandbox]) -> str:
    """Name of the image; it is made where the engine does not have it. Test processes that need it at once make it once."""
    name = f"{REPOSITORY}:{_key()}"
    with process_locks.acquired(paths.cache() / "locks" / "ready.lock", LIMIT_S) as lock:
        assert lock is not None, "another test process has been making the image for too long"
        try:
            engine.images.get(name)
        except docker.errors.ImageNotFound:
            _make(engine, sandbox_factory, name)
    return name


def _make(engine: docker.DockerClient, sandbox_factory: Callable[..., Sandbox], name: str) -> None:
    for old in engine.images.list(REPOSITORY):
        with contextlib.suppress(docker.errors.APIError):  # another checkout's tests are using it
            engine.images.remove(old.tags[0])
    sandbox: Sandbox = sandbox_factory(1, "debian:12", name="to-be-ready")
    good(provision("up", str(sandbox.inventory), "--no-smoke"))
    (host,) = sandbox.hosts
    root(host, FORGET)
    # The empty label: the image is no sandbox's, and stays when the sandbox goes.
    container(host).commit(REPOSITORY, name.rpartition(":")[2], changes=f'LABEL {names.LABEL}="" {names.ROLE}="image"')
    sandboxes.down(sandbox.name, say=lambda _line: None)


def _key() -> str:
    """Checksum of all files that are installed or decide what is."""
    digest = hashlib.sha256()
    checkout = Path(__file__).parents[2]
    for folder in SOURCES:
        for path in sorted((checkout / folder).rglob("*")):
            if path.is_file() and not {"__pycache__", "build"}.intersection(path.parts):
                digest.update(f"{path.relative_to(checkout)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
