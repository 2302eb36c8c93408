"""An image of a host on which everything is installed, so that one test module installs and the others begin where it ends.

test_up.py hands over one of the hosts on which it has installed; where that module has not run, a host is made for it. The image is
kept by the container engine from one run of the tests to the next, as long as nothing that is installed changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import docker.errors
from hosts import container, good, provision

from provision import sandbox as sandboxes
from provision.base import paths, process_locks
from provision.sandbox import Sandbox, SandboxHost, names

REPOSITORY = "provision-tests/ready"
#: What decides about the content of the image.
SOURCES = ("provision", "playbooks", "collective_core")
#: What tools leave among them: a look by lint makes no other host.
NOT_SOURCES = {"__pycache__", "build", ".ruff_cache", ".mypy_cache", ".pytest_cache"}
#: Seconds: a first installation, with the engine's build, on a machine that does other things too.
LIMIT_S = 900

# What a sandbox gives each host when it starts; a host that starts from the image gets its own.
FORGET = "rm -rf /etc/provision-sandbox /etc/ssh/ssh_host_* /home/trainer/.ssh /root/.ssh && : > /etc/environment"


def image(engine: docker.DockerClient, sandbox_factory: Callable[..., Sandbox]) -> str:
    """Name of the image; it is made where the engine does not have it. Test processes that need it at once make it once."""
    with being_made():
        if not _is_there(engine):
            sandbox: Sandbox = sandbox_factory(1, "debian:12", name="to-be-ready")
            good(provision("up", str(sandbox.inventory), "--no-smoke"))
            keep(engine, sandbox.hosts[0])
            sandboxes.down(sandbox.name, say=lambda _line: None)
    return _name()


@contextlib.contextmanager
def being_made() -> Iterator[None]:
    """Other test processes that need the image wait while somebody installs what it is going to be made of."""
    with process_locks.acquired(paths.cache() / "locks" / "ready.lock", LIMIT_S) as lock:
        assert lock is not None, "another test process has been making the image for too long"
        yield


def keep(engine: docker.DockerClient, host: SandboxHost) -> None:
    """Make the image of a host on which everything is installed, within `being_made`; the host goes on as it is."""
    if _is_there(engine):
        return
    for old in engine.images.list(REPOSITORY):
        with contextlib.suppress(docker.errors.APIError):  # another checkout's tests are using it
            engine.images.remove(old.tags[0])
    # The empty label: the image is no sandbox's, and stays when the sandbox goes.
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
    """Checksum of all files that are installed or decide what is."""
    digest = hashlib.sha256()
    checkout = Path(__file__).parents[2]
    for folder in SOURCES:
        for path in sorted((checkout / folder).rglob("*")):
            if path.is_file() and not NOT_SOURCES.intersection(path.parts):
                digest.update(f"{path.relative_to(checkout)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
