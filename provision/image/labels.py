"""What an image says of itself: which plan it holds, and whether it was proven. Pure: reads what the engine tells of an image.

An image made from ours inherits its labels; the proof counts only for the very layers and settings that were run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from provision.base.errors import UsageError
from provision.image.recipe import LABEL

VERIFIED = f"{LABEL}.verified"  # when
VERIFIED_LAYERS = f"{LABEL}.verified.layers"  # of what
VERIFIED_BY = f"{LABEL}.verified.by"  # how, in a sentence


@dataclass(frozen=True)
class Told:
    """An image of ours.

    Attributes:
        name: as it is tagged, or its short id.
        labels: all of them.
        size: bytes.
        ready: whether these very layers were run and found good.
    """

    name: str
    image: str
    labels: Mapping[str, str]
    size: int
    ready: bool

    def of(self, what: str) -> str:
        """``of("torch")``: the version that it says it holds; empty without one."""
        return self.labels.get(f"{LABEL}.{what}", "")


def read(name: str, attributes: Mapping[str, Any]) -> Told:
    """What the engine's attributes of an image tell. Raises UsageError for one that is none of ours."""
    labels: Mapping[str, str] = (attributes.get("Config") or {}).get("Labels") or {}
    if LABEL not in labels:
        raise UsageError("it is no image of provision: it lacks its labels", where=name, hint="make one: provision image build")
    ready = labels.get(VERIFIED_LAYERS) == layers(attributes)
    return Told(name, str(attributes["Id"]), labels, int(attributes["Size"]), ready)


#: What of an image's settings changes how it runs; its labels do not.
_SETTINGS = ("Env", "Cmd", "Entrypoint", "User", "WorkingDir", "Healthcheck", "Volumes", "ExposedPorts", "StopSignal", "Shell")


def layers(attributes: Mapping[str, Any]) -> str:
    """A digest of the image's layers and of the settings with which they run."""
    config = attributes.get("Config") or {}
    found = [(attributes.get("RootFS") or {}).get("Layers") or [], {name: config.get(name) or None for name in _SETTINGS}]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def parted(name: str) -> tuple[str, str]:
    """``registry:5000/mine:1`` → (``registry:5000/mine``, ``1``); ``latest`` where no tag is named."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")
