"""Image of a host on which everything is installed, so that only one test module installs and the others start from its result.

The image is a host of test_up.py after its installation; if that module has not run, a host is installed for it. The container engine
keeps the image between runs of the tests, until something that is installed changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import docker.errors
from hosts import RUN_S, container, good, provision

from provision import sandbox as sandboxes
from provision.base import paths, process_locks
from provision.sandbox import Sandbox, SandboxHost, names

REPOSITORY = "provision-tests/ready"
#: The sources of everything that is in the image.
SOURCES = ("provision", "playbooks", "collective_core")
#: Caches of tools among them, which do not count.
NOT_SOURCES = {"__pycache__", "build", ".ruff_cache", ".mypy_cache", ".pytest_cache"}
#: Seconds for who waits: as long as a first installation may take, and what is made before and after it.
LIMIT_S = RUN_S + 900

# Removes what a sandbox creates for each host at its start; a host started from the image gets its own.
FORGET = "rm -rf /etc/provision-sandbox /etc/ssh/ssh_host_* /home/trainer/.ssh /root/.ssh && : > /etc/environment"


def image(engine: docker.DockerClient, sandbox_factory: Callable[..., Sandbox]) -> str:
    """Name of the image, which is built if the engine does not have it. Test processes that need it at the same time build it once."""
    with being_made():
        if not _is_there(engine):
            sandbox: Sandbox = sandbox_factory(1, "debian:12", name="to-be-ready")
            good(provision("up", str(sandbox.inventory), "--no-smoke"))
            keep(engine, sandbox.hosts[0])
            sandboxes.down(sandbox.name, say=lambda _line: None)
    return _name()


@contextlib.contextmanager
def being_made() -> Iterator[None]:
    """Lock for the installation that the image is built from; other test processes that need the image wait."""
    with process_locks.acquired(paths.cache() / "locks" / "ready.lock", LIMIT_S) as lock:
        assert lock is not None, "another test process has been making the image for too long"
        yield


def keep(engine: docker.DockerClient, host: SandboxHost) -> None:
    """Commit a host on which everything is installed as the image, within `being_made`; the host keeps running."""
    if _is_there(engine):
        return
    for old in engine.images.list(REPOSITORY):
        with contextlib.suppress(docker.errors.APIError):  # tests of another checkout use it
            engine.images.remove(old.tags[0])
    # The empty label: the image belongs to no sandbox, and stays when this one is removed.
    labels = f'LABEL {names.LABEL}="" {names.ROLE}="image"'
    as_it_is = container(host).commit(changes=labels)
    engine.images.build(fileobj=io.BytesIO(f"FROM {as_it_is.id}\nRUN {FORGET}\n{labels}\n".encode()), tag=_name(), rm=True)


def _name() -> str:
    return f"{REPOSITORY}:{_key()}"


def _is_there(engine: docker.DockerClient) -> bool:
    try:
        engine.images.get(_name())
    except docker.errors.ImageNotFound:
        return False
    return True


def _key() -> str:
    """Checksum of all sources."""
    digest = hashlib.sha256()
    checkout = Path(__file__).parents[2]
    for folder in SOURCES:
        for path in sorted((checkout / folder).rglob("*")):
            if path.is_file() and not NOT_SOURCES.intersection(path.parts):
                digest.update(f"{path.relative_to(checkout)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
