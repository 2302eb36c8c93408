"""Names and labels of everything that a sandbox consists of. Removal finds things by these alone, so nothing is made without them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from provision.base import paths
from provision.base.errors import UsageError
from provision.base.text import counted
from provision.sandbox.containers import image_names

USER = "trainer"

#: On every container, network and image of a sandbox; the value is the sandbox's name.
LABEL = "org.provision.sandbox"
ROLE = f"{LABEL}.role"  # "host" on the containers of a sandbox; a user's container of the same image does not have it
HOST = f"{LABEL}.host"
BASE = f"{LABEL}.base"
SUDO = f"{LABEL}.sudo"

#: Repository of the images that are made here. A user's image that is built on one inherits its labels but not its name.
REPOSITORY = "provision-sandbox"

DEFAULT_BASE = "debian:12"

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")


def check(name: str) -> None:
    """Raise UsageError unless the name can be part of the names of containers, images and folders."""
    if not _NAME.fullmatch(name) or ".." in name or name[-1] in "._-":
        raise UsageError(
            f"'{name}' cannot name a sandbox.", hint="Use at most 40 of a-z, 0-9, '-', '_' and '.', with a letter or digit at both ends."
        )


def base_images(count: int, base: str | Sequence[str] | None) -> list[str]:
    """The base image of each host: host i gets the i-th base, beginning again where there are fewer bases than hosts.

    Args:
        count: number of hosts, at least 1.
        base: one image, several, or None for ``DEFAULT_BASE``.

    Raises:
        UsageError: no hosts, more bases than hosts, or a base that is not the name of an image.
    """
    if count < 1:
        raise UsageError(f"A sandbox needs at least one host, not {count}.", hint="Say how many: -n 2")
    requested = [base] if isinstance(base, str) else list(base or [DEFAULT_BASE])
    if len(requested) > count:
        raise UsageError(f"{len(requested)} bases for {counted(count, 'host')}", hint=f"Start as many hosts: -n {len(requested)}")
    checked = [image_names.checked(one) for one in requested]
    return [checked[i % len(checked)] for i in range(count)]


def command(verb: str, sandbox: str) -> str:
    """What to type about one sandbox, such as ``provision sandbox down --name mine``."""
    return f"provision sandbox {verb}" + (f" --name {sandbox}" if sandbox != "default" else "")


def network(sandbox: str) -> str:
    return f"provision-{sandbox}"


def container(sandbox: str, host: str) -> str:
    return f"provision-{sandbox}-{host}"


def number(host: str) -> int:
    return int(host.removeprefix("node"))


def image_tag(sandbox: str, base: str) -> str:
    """The tag, without repository, of the image that a sandbox imports for a base. Two sandboxes never share a tag."""
    readable = re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")[-40:].strip("-")
    return f"base-{sandbox}-{readable}-{hashlib.sha256(base.encode()).hexdigest()[:6]}"  # "a/b" and "a:b" must differ


def folder(sandbox: str) -> Path:
    """Keys, known hosts and inventory of one sandbox."""
    return paths.sandbox() / sandbox


def script(name: str) -> str:
    """The text of a script for hosts (``host/``)."""
    return resources.files("provision.sandbox").joinpath("host", name).read_text(encoding="utf-8")


def lock(what: str) -> Path:
    """The file of the lock on one sandbox, or on one base that is being made."""
    return paths.cache() / "locks" / f"{what}.lock"
