"""What the sandbox's things are called. ``down`` finds them all by these names and labels alone, so nothing is made without them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from provision.base import paths
from provision.base.errors import UsageError

USER = "trainer"

#: On every container, network and image of a sandbox; the value is the sandbox's name.
LABEL = "org.provision.sandbox"
ROLE = f"{LABEL}.role"  # on containers: "host", or "builder" for the one an image is made in
HOST = f"{LABEL}.host"
BASE = f"{LABEL}.base"
SUDO = f"{LABEL}.sudo"
PULLS = f"{LABEL}.pulls"  # on the network: images that were not here before, which `down` may therefore remove
FOLDER = f"{LABEL}.folder"  # on the network: where the keys are, for a `down` that runs with another PROVISION_HOME

#: Images that the sandbox makes lie under this name. A user's image built on one of them inherits its labels but not its name.
REPOSITORY = "provision-sandbox"

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")


def checked(name: str) -> str:
    """The name itself, if it can stand in the names of containers, images and folders.

    Raises:
        UsageError: it cannot.
    """
    if not _NAME.fullmatch(name) or ".." in name or name[-1] in "._-":
        raise UsageError(
            f"'{name}' cannot name a sandbox.", hint="Use at most 40 of a-z, 0-9, '-', '_' and '.', with a letter or digit at both ends."
        )
    return name


def network(sandbox: str) -> str:
    return f"provision-{sandbox}"


def container(sandbox: str, host: str) -> str:
    return f"provision-{sandbox}-{host}"


def builder(sandbox: str, base: str) -> str:
    return f"provision-{sandbox}-build-{_slug(base)}"


def image_tag(sandbox: str, kind: str, base: str) -> str:
    """The tag, without repository, of the sandbox's own image of one base. Two sandboxes never share a tag."""
    return f"{kind}-{sandbox}-{_slug(base)}"


def folder(sandbox: str) -> Path:
    """Keys, known hosts and inventory of one sandbox."""
    return paths.sandbox() / sandbox


def lock(what: str) -> Path:
    """The file of the lock on one sandbox, or on one base that is being made."""
    return paths.cache() / "locks" / f"{what}.lock"


def _slug(base: str) -> str:
    readable = re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")[-40:].strip("-")
    return f"{readable}-{hashlib.sha256(base.encode()).hexdigest()[:6]}"  # "a/b" and "a:b" must not meet
