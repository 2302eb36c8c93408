"""The image that a base's hosts run: the base is found, pulled or made, then gets what a host has and a minimal base may lack.

Every image made here bears the sandbox's label and is under the sandbox's repository name, so that `down` finds it.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import docker.errors
from docker import DockerClient
from docker.models.containers import Container

from provision.base import process_locks, signals
from provision.base.errors import ProvisionError
from provision.containers.container_engine import explained
from provision.containers.controller_settings import Settings, parse_os_release
from provision.sandbox import bases, debootstrap, hostfiles, names

Say = Callable[[str], None]


def absent(client: DockerClient, base: str) -> bool:
    """Whether making a host of this base would begin with a pull that brings a new image to this machine."""
    return not _local(client, base) and not _can_do_without_pull(base)


def host_image(client: DockerClient, sandbox: str, base: str, settings: Settings, say: Say) -> str:
    """The image for hosts of that base; made now unless this machine keeps a copy from an earlier time.

    Args:
        client: the engine.
        sandbox: whose image it will be.
        base: a checked base.
        settings: the controller's; none of them stays in the image.
        say: told in one line what takes long.

    Returns:
        The image's name with its tag.

    Raises:
        ProvisionError: the base can be neither pulled nor made, or holds no Debian-like system.
    """
    suite = bases.suite_of(base)
    with explained(f"preparing base {base}"):
        if suite is None or _local(client, base):
            return _build(client, sandbox, base, _base_image(client, sandbox, base, settings, say), settings, say)
        with process_locks.acquired(names.lock(f"host-{suite}"), debootstrap.LOCK_SECONDS):  # sandboxes that begin together make it once
            if _is_fresh(suite):
                return _import(client, kept(suite), sandbox, "host", base)
            source = _base_image(client, sandbox, base, settings, say)
            return _build(client, sandbox, base, source, settings, say, keep_as=None if source == base else kept(suite))


def release_of(container: Container) -> dict[str, str]:
    """The container's os-release; empty when it has none."""
    for path in ("/etc/os-release", "/usr/lib/os-release"):  # the first is often a link, which the engine does not follow
        try:
            chunks, _ = container.get_archive(path)
        except docker.errors.NotFound:
            continue
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            entry = next((member for member in tar if member.isfile()), None)
            file = tar.extractfile(entry) if entry else None
            if file:
                return parse_os_release(file.read().decode(errors="replace"))
    return {}


def kept(suite: str) -> Path:
    """Where the finished host image of a suite is kept; the recipe is part of the name, so that an old one is never taken."""
    recipe = "\n".join([*hostfiles.PACKAGES, *map(hostfiles.script, ("build.sh", "sshd.conf", "debootstrap.sh"))])
    return debootstrap.kept(suite).with_suffix(f".host-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar")


def _is_fresh(suite: str) -> bool:
    """Kept, and no newer base was made since."""
    base = debootstrap.kept(suite)
    return kept(suite).exists() and (not base.exists() or base.stat().st_mtime <= kept(suite).stat().st_mtime)


def _can_do_without_pull(base: str) -> bool:
    suite = bases.suite_of(base)
    return suite is not None and (kept(suite).exists() or debootstrap.kept(suite).exists())


def _local(client: DockerClient, base: str) -> bool:
    try:
        client.images.get(base)
    except docker.errors.ImageNotFound:
        return False
    return True


def _base_image(client: DockerClient, sandbox: str, base: str, settings: Settings, say: Say) -> str:
    if _local(client, base):
        return base
    suite = bases.suite_of(base)
    if suite is None or not debootstrap.kept(suite).exists():
        say(f"pulling {base}")
        try:
            client.images.pull(base)
        except docker.errors.DockerException as failure:
            reason = str(getattr(failure, "explanation", None) or failure).strip().rstrip(".")
            _refuse_unless_makeable(base, suite, reason)
            say(f"{base} cannot be pulled ({reason})")
        else:
            return base
    assert suite is not None  # noqa: S101 - _refuse_unless_makeable has seen to it
    return _import(client, debootstrap.make(suite, settings, say), sandbox, "base", base)


def _refuse_unless_makeable(base: str, suite: str | None, reason: str) -> None:
    if suite is None:
        raise ProvisionError(
            f"The base cannot be pulled: {reason}.",
            where=f"base {base}",
            hint="See that the registry can be reached, load the image by hand (`docker load`), or take debian:12 or debian:13.",
        )
    if lack := debootstrap.lacking():
        raise ProvisionError(
            f"The base can be neither pulled ({reason}) nor made here ({lack}).",
            where=f"base {base}",
            hint="As root: `apt-get install debootstrap`, then `provision sandbox up`; or load the image by hand (`docker load`).",
        )


def _import(client: DockerClient, tar: Path, sandbox: str, kind: str, base: str) -> str:
    repository, tag = f"{names.REPOSITORY}/{kind}", names.image_tag(sandbox, kind, base)
    with signals.held_back():
        client.api.import_image(
            str(tar), repository, tag, changes=[f"LABEL {key}={value}" for key, value in _labels(sandbox, base).items()]
        )
    return f"{repository}:{tag}"


def _labels(sandbox: str, base: str) -> Mapping[str, str]:
    return {names.LABEL: sandbox, names.BASE: base}


def _build(client: DockerClient, sandbox: str, base: str, source: str, settings: Settings, say: Say, keep_as: Path | None = None) -> str:
    say(f"installing sshd, sudo and python3 on {base}")
    with signals.held_back():
        builder = client.containers.create(
            source,
            name=names.builder(sandbox, base),
            entrypoint=["sleep"],
            command=["infinity"],
            init=True,
            user="root",
            labels={**_labels(sandbox, base), names.ROLE: "builder"},
            network=names.network(sandbox),
            use_config_proxy=False,  # the engine's own proxies would stay in the image's environment
        )
    builder.put_archive("/", hostfiles.archive(hostfiles.BUILD_FOLDER, hostfiles.build_files(settings, release_of(builder))))
    builder.start()
    code, output = builder.exec_run(["sh", f"/{hostfiles.BUILD_FOLDER}/build.sh"])
    if code != 0:
        tail = " / ".join(cast(bytes, output).decode(errors="replace").strip().splitlines()[-4:])
        raise ProvisionError(
            f"The base could not be made into a host: {tail}",
            where=f"base {base}",
            hint="See that apt's mirror can be reached from a container, and that the base is Debian or a relative of it.",
        )
    repository, tag = f"{names.REPOSITORY}/host", names.image_tag(sandbox, "host", base)
    with signals.held_back():
        # An image inherits the builder's labels, and a container of the user's would inherit them in turn: it is no builder.
        builder.commit(repository=repository, tag=tag, changes=f"LABEL {names.ROLE}=image")
    if keep_as:
        _keep(builder, sandbox, keep_as, say)
    builder.remove(force=True, v=True)
    return f"{repository}:{tag}"


def _keep(builder: Container, sandbox: str, path: Path, say: Say) -> None:
    """Writes the host's file system into the cache, whole or not at all. Without room for it the sandbox does as well."""
    partial = unfinished(path, sandbox)
    try:
        with partial.open("wb") as file:
            for chunk in builder.export():
                file.write(cast(bytes, chunk))  # the stubs have it wrong
        for old in path.parent.glob(f"{path.name.partition('.')[0]}.host-*.tar"):
            old.unlink(missing_ok=True)
        partial.replace(path)
    except OSError as failure:
        say(f"warning: no copy of the host image is kept for the next time: {failure}")
    finally:
        partial.unlink(missing_ok=True)


def unfinished(path: Path, sandbox: str) -> Path:
    """Where a file of the cache is while a sandbox writes it."""
    return path.with_name(f"{path.name}.partial-{sandbox}")
