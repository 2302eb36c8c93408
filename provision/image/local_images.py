"""Images on this machine: what one says of itself.

An image that is made from ours inherits its labels; a verification counts only for the very layers and settings that were run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import docker.errors
from docker import DockerClient

from provision.base.documents import Document
from provision.base.errors import UsageError
from provision.image.recipe import LABEL
from provision.sandbox.containers import container_engine

VERIFIED = f"{LABEL}.verified"  # when
VERIFIED_LAYERS = f"{LABEL}.verified.layers"  # of what
VERIFIED_BY = f"{LABEL}.verified.by"  # how, in a sentence
#: What of an image's settings changes how it runs; its labels do not.
_SETTINGS = ("Env", "Cmd", "Entrypoint", "User", "WorkingDir", "Healthcheck", "Volumes", "ExposedPorts", "StopSignal", "Shell")


@dataclass(frozen=True)
class ImageInfo:
    """An image of ours.

    Attributes:
        name: its tag, or its short id.
        id: ``sha256:…``
        ready: whether these very layers were verified.
    """

    name: str
    id: str
    labels: Mapping[str, str]
    ready: bool

    def of(self, component: str) -> str:
        """``of("torch")``: the version that it says it holds; empty without one."""
        return self.labels.get(f"{LABEL}.{component}", "")


class Attributes(TypedDict, total=False):
    """What an engine says of an image (`docker image inspect`), as far as it is read."""

    Id: str
    Size: int
    Architecture: str
    RepoDigests: list[str] | None
    Config: Mapping[str, Any] | None
    RootFS: Document | None


def info(name: str, attributes: Attributes) -> ImageInfo:
    """What the engine's attributes of an image say. Raises UsageError where it is not one of ours."""
    labels = (attributes.get("Config") or {}).get("Labels") or {}
    if LABEL not in labels:
        raise UsageError("not an image of provision: its labels are missing", where=name, hint="make one: provision image build")
    ready = labels.get(VERIFIED_LAYERS) == layers_digest(attributes)
    return ImageInfo(name, attributes["Id"], labels, ready)


def layers_digest(attributes: Attributes) -> str:
    """A digest of the image's layers and of the settings with which they run."""
    config: Mapping[str, object] = attributes.get("Config") or {}
    found = [(attributes.get("RootFS") or {}).get("Layers") or [], {name: config.get(name) or None for name in _SETTINGS}]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def split_name(name: str) -> tuple[str, str]:
    """``registry:5000/mine:1`` → (``registry:5000/mine``, ``1``); ``latest`` where no tag is named."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")


def engine() -> closing[DockerClient]:
    """A client of this machine's engine, closed at the end."""
    return closing(container_engine.connect())


def attributes(client: DockerClient, name: str) -> Attributes:
    """What the engine says of an image."""
    return cast(Attributes, client.images.get(name).attrs)


def get(client: DockerClient, name: str) -> ImageInfo:
    """An image of ours by its name. Raises UsageError where there is none."""
    with container_engine.explained(f"inspecting {name}"):
        try:
            return info(name, attributes(client, name))
        except docker.errors.ImageNotFound as error:
            hint = f"docker image ls --filter label={LABEL} lists those that are"
            raise UsageError("unknown image", where=name, hint=hint) from error
