"""Builds an image through the container engine's own builder, on a network of the build's own whose only door is the gateway.

An image gets its name when all of it is there: what fails or is interrupted leaves nothing but the engine's cache, which the next build
goes on from.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
from docker import DockerClient
from docker.models.networks import Network

from provision.base import paths, signals
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import architectures
from provision.diagnosis.logs.reading import explain
from provision.image import labels, origins
from provision.image.asking import Asked
from provision.image.gateway import Gateway
from provision.image.render import File, context
from provision.image.stream import Failed, Made, events
from provision.image.view import View, short
from provision.install import artifacts
from provision.plan.options import Options
from provision.sandbox import bases, engine
from provision.sandbox import settings as controller

NETWORK_LABEL = "org.provision.build"  # its value is the process that builds


@dataclass(frozen=True)
class Built:
    """A finished image: its name, its id, how large it is in bytes, how long it took, and where the log is."""

    tag: str
    image: str
    size: int
    seconds: float
    log: Path


def build(asked: Asked, tag: str, options: Options, *, mirror: str | None = None, cache: bool = True) -> Built:
    """Build one image and name it ``tag``.

    Args:
        mirror: where the base's distribution is taken from, instead of where this machine takes its own from.
        cache: use what earlier builds left.

    Raises:
        ProvisionError: no engine, no base, no wheel that an earlier run was given, a step that failed (with its last lines), a full disk.
    """
    began = time.monotonic()
    settings = controller.read(os.environ, prefix=Path(sys.prefix))
    host = asked.target.host
    artifacts.torch_wheel(host, options.wheels)  # of the user's: it must be at hand
    files = context(asked.target, asked.engine, locked=asked.locked)
    client = engine.connect()
    named = False
    try:
        with signals.also_when_ended(), engine.explained(f"building {tag}"), _log(asked.target.name) as (log, path), View(log) as view:
            _refuse_other_processor(client, host.arch)
            sweep(client)
            base_image(client, asked.target.base.reference, view)
            places = origins.Origins(
                settings,
                distribution=host.system.split()[0],
                mirror=mirror,
                wheels=options.wheels,
                index=options.index_url,
                torch_index=host.torch.index if host.torch else None,
            )
            with _network(client) as (network, address), _gateway(address, places) as gateway:
                image = _run(client, files, network, gateway, view, path, cache=cache, torch=bool(host.torch and host.torch.index))
            with signals.held_back():
                client.images.get(image).tag(*labels.parted(tag))
                named = True
            size = int(client.images.get(image).attrs["Size"])
    except KeyboardInterrupt:
        what = f"interrupted after the build: {tag} is there" if named else "interrupted; no image was named, and no step runs any more"
        raise ProvisionError(what, todo="run the same command again: it goes on from the cache") from None
    finally:
        client.close()
    return Built(tag, image, size, time.monotonic() - began, path)


def _refuse_other_processor(client: DockerClient, arch: str) -> None:
    """An image is built by running its steps, so the engine's machine must be of its kind."""
    there = architectures.kernel_name(str(client.info().get("Architecture", arch)))
    if there != arch:
        what = f"this machine's container engine runs on {there}, and the image is for {arch}"
        raise ProvisionError(what, todo="build it on a machine of that kind: provision image render … -o DIR, then docker build there")


def check_mirror(mirror: str | None, made: Sequence[Asked]) -> None:
    """Raise UsageError where a mirror is named for a distribution whose packages do not go through it."""
    others = [each.target.name for each in made if each.target.host.family != "debian"]
    if mirror is not None and others:
        what = "--mirror: only Debian's and Ubuntu's packages can be taken from a mirror"
        raise UsageError(what, where=", ".join(others), todo="leave it out, and begin with an image that names your mirror: --base IMAGE")


def checked_tag(tag: str) -> str:
    """A name for an image, ``NAME:TAG`` (``:latest`` where there is none). Raises UsageError."""
    if "@" in tag:
        raise UsageError(f"'{tag}': an image that is made now cannot be named by a digest.", todo="Name it like mine:1.")
    return bases.checked(tag)


def base_image(client: DockerClient, reference: str, view: View) -> None:
    """Have the base here: it is there already, or it is pulled, with each layer shown. Raises ProvisionError where it cannot be had."""
    try:
        client.images.get(reference)
        return
    except docker.errors.ImageNotFound:
        view.line(f"pulling {reference}")
    try:
        for event in events(client.api.pull(reference, stream=True, decode=True)):
            view.note(event)
            if isinstance(event, Failed):
                raise docker.errors.APIError(event.why)
        client.images.get(reference)
    except docker.errors.APIError as failure:
        text = str(failure.explanation or failure).strip()
        if "no space left" in text.lower():
            raise
        raise ProvisionError(
            f"the base image cannot be had: {text}",
            where=reference,
            todo="see that its registry can be reached; or load it by hand (`docker load`); or begin with another: --base IMAGE",
        ) from failure


def sweep(client: DockerClient) -> None:
    """Remove the networks of builds that were killed, with the containers of their last steps."""
    for network in client.networks.list(filters={"label": NETWORK_LABEL}):
        owner = (network.attrs.get("Labels") or {}).get(NETWORK_LABEL, "")
        if not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            _take_down(client, network)


def _run(
    client: DockerClient, files: Mapping[str, File], network: str, gateway: Gateway, view: View, log: Path, *, cache: bool, torch: bool
) -> str:
    """The build itself; returns the image's id."""
    arguments = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), gateway.proxy)  # never kept by the engine
    arguments |= {"PIP_INDEX_URL": origins.INDEX_URL, "PIP_TRUSTED_HOST": origins.PACKAGES_HOST}
    if torch:
        arguments["TORCH_INDEX_URL"] = origins.TORCH_INDEX_URL
    said = client.api.build(
        fileobj=io.BytesIO(_tar(files)),
        custom_context=True,
        rm=True,
        forcerm=True,
        nocache=not cache,
        decode=True,
        network_mode=network,
        buildargs=arguments,
        use_config_proxy=False,
    )
    image = None
    for event in events(said):
        view.note(event)
        if isinstance(event, Made):
            image = event.image
        elif isinstance(event, Failed):
            raise _failure(event.why, view, gateway, log)
    if image is None:
        raise ProvisionError(
            "the engine ended the build without an image and without a word", where=view.step or "the build", todo=f"read {log}"
        )
    return image


def _failure(why: str, view: View, gateway: Gateway, log: Path) -> ProvisionError:
    if "no space left on device" in (why + "\n".join(view.tail)).lower():
        return engine.explain(docker.errors.APIError("no space left on device"), view.step)
    code = re.search(r"returned a non-zero code: (\d+)$", why)  # before it the engine repeats the whole step
    what = f"it failed with exit code {code[1]}; its last lines:" if code else f"it failed: {why}"
    lines = [*(line.rstrip() for line in view.tail), *(f"could not be had: {said}" for said in gateway.refused[-3:])]
    known = explain("\n".join([*lines, why]), view.step)
    advice = f"{known.title}: {known.fix[0]}; the whole log: {log}" if known else f"read the whole log: {log}"
    return ProvisionError("\n    ".join([what, *lines]), where=short(view.step) or "before the first step", todo=advice)


def _tar(files: Mapping[str, File]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, file in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(file.content), 0o755 if file.executable else 0o644
            tar.addfile(entry, io.BytesIO(file.content))
    return buffer.getvalue()


@contextlib.contextmanager
def _network(client: DockerClient) -> Iterator[tuple[str, str]]:
    """(name, this machine's address on it) of a network from which nothing but this machine can be reached; gone afterwards."""
    name = f"provision-build-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    with signals.held_back():
        network = client.networks.create(name, driver="bridge", internal=True, labels={NETWORK_LABEL: str(os.getpid())})
    try:
        network.reload()
        yield name, str(network.attrs["IPAM"]["Config"][0]["Gateway"])
    finally:
        with signals.ignored():
            _take_down(client, network)


def _take_down(client: DockerClient, network: Network) -> None:
    """Remove a build's network; a step that still runs on it ends with it."""
    for _ in range(20):
        with contextlib.suppress(docker.errors.NotFound):
            network.reload()
            for container in network.attrs.get("Containers") or {}:
                with contextlib.suppress(docker.errors.APIError):
                    client.api.remove_container(container, force=True, v=True)
        try:
            network.remove()
            return
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:  # a step's container is being taken down at this moment
            time.sleep(0.25)


@contextlib.contextmanager
def _gateway(address: str, places: origins.Origins) -> Iterator[Gateway]:
    try:
        gateway = Gateway(address, places)
    except OSError as error:
        raise ProvisionError(
            f"this machine has no address on the build's network ({address}: {error.strerror})",
            where="container engine",
            todo="build where the engine runs: DOCKER_HOST names another machine's",
        ) from error
    with gateway:
        yield gateway


@contextlib.contextmanager
def _log(name: str) -> Iterator[tuple[Any, Path]]:
    folder = paths.home() / "builds"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{name}.log"
        with path.open("w", encoding="utf-8") as log:
            yield log, path
    except OSError as error:
        if error.filename is not None and str(folder) in str(error.filename):
            raise ProvisionError(f"the build's log cannot be written: {error.strerror}", where=str(folder)) from error
        raise
