"""Client of the container engine, and the errors of the engine as errors that a user can act on."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import docker.errors
import requests.exceptions
from docker import DockerClient

from provision.base.errors import ProvisionError

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
PING_SECONDS = 10
#: An engine that sends nothing for this long is considered hung: a slow mirror can keep apt quiet for minutes.
SILENCE_SECONDS = 600
FAILURES = (docker.errors.DockerException, requests.exceptions.RequestException, OSError)


def engine_available() -> tuple[bool, str]:
    """Whether a container engine answers, and a sentence for the user: which one, or why none does and how to get one."""
    try:
        with contextlib.closing(docker.from_env(timeout=PING_SECONDS)) as client:
            version = client.version()
    except FAILURES as failure:
        what, hint = unavailable(failure)
        return False, f"{what} {hint}"
    return True, f"The container engine answers (version {version.get('Version', 'unknown')})."


def connect() -> DockerClient:
    """A client of an engine that answers.

    Raises:
        ProvisionError: none answers; the error says why and how to get one.
    """
    try:
        with contextlib.closing(docker.from_env(timeout=PING_SECONDS)) as client:
            client.ping()
        return docker.from_env(timeout=SILENCE_SECONDS)
    except FAILURES as failure:
        what, hint = unavailable(failure)
        raise ProvisionError(what, where="container engine", hint=hint) from failure


@contextmanager
def explained(step: str) -> Iterator[None]:
    """Turn failures of the engine and the disk within the block into errors that a user can act on.

    Args:
        step: what was being done, such as ``starting node1``.

    Raises:
        ProvisionError: in place of the engine's own exceptions.
    """
    try:
        yield
    except FAILURES as failure:
        raise explain(failure, step) from failure


def explain(failure: Exception, step: str) -> ProvisionError:
    """The error a user sees for a failure of the engine or the disk."""
    text = getattr(failure, "explanation", None) or str(failure)
    if getattr(failure, "errno", None) == errno.ENOSPC or "no space left on device" in text.lower():
        return ProvisionError(
            "The disk is full.", where=step, hint="Free some space (`docker system df` and `df -h` show where it went), then try again."
        )
    if "non-overlapping IPv4 address pool" in text:
        return ProvisionError(
            "The container engine has no addresses left for another network.",
            where=step,
            hint="Remove networks that no one uses: `docker network ls`, `docker network prune`.",
        )
    if isinstance(failure, requests.exceptions.ConnectionError):
        return ProvisionError(
            "The container engine stopped answering.", where=step, hint="Check that it runs (`docker info`), then try again."
        )
    if isinstance(failure, OSError) and not isinstance(failure, requests.exceptions.RequestException):
        return ProvisionError(f"{failure.strerror or failure}: {failure.filename or 'unknown file'}", where=step)
    return ProvisionError(f"The container engine refused: {text.strip()}", where=step)


def unavailable(failure: Exception) -> tuple[str, str]:
    """Why no engine answers, and what to do. ``failure``: what the attempt raised."""
    address = os.environ.get("DOCKER_HOST") or DEFAULT_SOCKET
    socket = Path(address.removeprefix("unix://"))
    if _caused_by(failure, PermissionError) and address.startswith("unix://"):
        return (
            f"This user may not use the container engine ({socket}).",
            "Join its group with `sudo usermod -aG docker $USER` and log in again, or use sudo.",
        )
    if "DOCKER_HOST" in os.environ:
        return f"No container engine answers at DOCKER_HOST={address}.", "Unset DOCKER_HOST to use this machine's own engine."
    if shutil.which("dockerd") is None and not socket.exists():
        return "No container engine is installed.", "On Debian or Ubuntu: `sudo apt-get install docker.io`."
    start = "`sudo systemctl start docker`" if Path("/run/systemd/system").is_dir() else "`sudo dockerd &` (this machine runs no systemd)"
    return "The container engine is installed but does not run.", f"Start it: {start}."


def _caused_by(failure: BaseException, kind: type[BaseException]) -> bool:
    """Whether an exception of that kind is among the causes; the SDK and requests also wrap it as an argument."""
    causes = [failure]
    for one in causes:
        related = (one.__cause__, one.__context__, *one.args)
        causes += [each for each in related if isinstance(each, BaseException) and not any(each is known for known in causes)]
    return any(isinstance(one, kind) for one in causes)
