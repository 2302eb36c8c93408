"""Removes every trace of a sandbox: found by label in the engine, never from notes that a crash may have kept from being written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.models.images import Image

from provision.base import paths
from provision.base.errors import ProvisionError
from provision.sandbox import debootstrap, images, names

#: What the engine was asked for just before a crash may still come to be; a second look finds it.
SETTLE_SECONDS = 1.0
MAX_LOOKS = 30


def sweep(client: DockerClient, sandbox: str, say: Callable[[str], None]) -> list[str]:
    """Removes containers, networks, images and files of one sandbox, until a look finds none.

    Args:
        client: the engine.
        sandbox: its name.
        say: told of each thing that was removed.

    Returns:
        What was removed, one phrase each, such as ``container provision-default-node1``; empty when there was nothing.

    Raises:
        ProvisionError: something comes back or cannot be removed.
    """
    removed: list[str] = []
    for _ in range(MAX_LOOKS):
        found = _containers(client, sandbox) + _networks(client, sandbox) + _images(client, sandbox)
        for one in found:
            say(f"removed {one}")
        removed += found
        if not found:
            break
        time.sleep(SETTLE_SECONDS)
    else:
        raise ProvisionError(
            f"The engine does not let go of: {', '.join(found)}.", where=f"sandbox {sandbox}", hint="Run `provision sandbox down` again."
        )
    files = _files(sandbox) + debootstrap.remove_orphans()
    for one in files:
        say(f"removed {one}")
    return removed + files


def hosts(client: DockerClient, sandbox: str) -> list[Container]:
    """The sandbox's host containers, running or not, in the order of their numbers."""
    found = client.containers.list(all=True, filters={"label": [f"{names.LABEL}={sandbox}", f"{names.ROLE}=host"]}, ignore_removed=True)
    return sorted(found, key=lambda container: int(container.labels[names.HOST].removeprefix("node")))


def folder(client: DockerClient, sandbox: str) -> Path | None:
    """Where the keys and the inventory of the sandbox lie, as its network says; None where there is none."""
    found = client.networks.list(filters={"label": f"{names.LABEL}={sandbox}"})
    labels = [(network.attrs.get("Labels") or {}) for network in found]
    return next((Path(label[names.FOLDER]) for label in labels if names.FOLDER in label), None)


def _containers(client: DockerClient, sandbox: str) -> list[str]:
    removed = []
    for container in client.containers.list(all=True, filters={"label": f"{names.LABEL}={sandbox}"}, ignore_removed=True):
        if container.labels.get(names.ROLE) not in {"host", "builder"}:
            continue  # someone's own container, run from an image of ours: it inherits the image's label
        _wait_until_committed(container)
        try:
            container.remove(force=True, v=True)
            removed.append(f"container {container.name}")
        except docker.errors.NotFound:
            continue
        except docker.errors.APIError as failure:
            if failure.status_code != 409:  # 409: being removed already
                raise
    return removed


def _wait_until_committed(container: Container) -> None:
    """A builder stands still while it is made into an image; taken away then, it would leave the half-made image behind."""
    for _ in range(60):
        try:
            container.reload()
        except docker.errors.NotFound:
            return
        if container.labels.get(names.ROLE) != "builder" or container.status != "paused":
            return
        time.sleep(1)


def _networks(client: DockerClient, sandbox: str) -> list[str]:
    removed = []
    for network in client.networks.list(filters={"label": f"{names.LABEL}={sandbox}"}):
        network.reload()
        labels = network.attrs.get("Labels") or {}
        removed += [f"image {base}" for base in labels.get(names.PULLS, "").split(",") if base and _untag(client, base)]
        removed += _remove_folder(Path(labels.get(names.FOLDER, names.folder(sandbox))), sandbox)
        try:
            network.remove()
            removed.append(f"network {network.name}")
        except docker.errors.NotFound:
            continue
    return removed


def _untag(client: DockerClient, base: str) -> bool:
    """Removes an image that the sandbox pulled; one that someone else's container runs by now stays."""
    try:
        client.images.remove(base)
    except docker.errors.ImageNotFound:
        return False
    except docker.errors.APIError as failure:
        if failure.status_code == 409:
            return False
        raise
    return True


def _images(client: DockerClient, sandbox: str) -> list[str]:
    removed = []
    for image in client.images.list(all=True, filters={"label": f"{names.LABEL}={sandbox}"}):
        if any(not tag.startswith(f"{names.REPOSITORY}/") for tag in image.tags):
            continue  # a user's image, built on one of ours: it inherits the label
        try:
            client.images.remove(str(image.id), force=True)
            removed.append(f"image {_called(image)}")
        except docker.errors.ImageNotFound:
            continue
        except docker.errors.APIError as failure:
            if failure.status_code != 409:  # 409: an image on top of it goes first, this one at the next look
                raise
    return removed


def _called(image: Image) -> str:
    return image.tags[0] if image.tags else str(image.short_id)


def _files(sandbox: str) -> list[str]:
    removed = []
    for path in (paths.cache() / "sandbox").glob(images.unfinished(Path("*"), sandbox).name):
        path.unlink(missing_ok=True)
        removed.append(f"unfinished copy {path}")
    return removed + _remove_folder(names.folder(sandbox), sandbox)


def _remove_folder(folder: Path, sandbox: str) -> list[str]:
    """Removes a sandbox's folder of keys and the folder above it, if that is empty then."""
    if folder.parts[-2:] != names.folder(sandbox).parts[-2:] or not folder.exists():
        return []  # a label is only text: nothing but a folder of sandboxes is believed
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
    return [f"folder {folder}"]
