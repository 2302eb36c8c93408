"""What lets containers of an image reach each other by SSH: the files in the home of the image's user, made for one run. Pure."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Mapping
from typing import Any

import jinja2

from provision import catalog
from provision.base import resources

HOST_KEY = ".provision-sshd/host_ed25519"
AUTHORIZED = ".ssh/authorized_keys"
KEY = ".ssh/provision_ed25519"


def home() -> str:
    """Where the image's user lives."""
    return f"/home/{catalog.images().user.name}"


def member(address: str, port: int, host_key: str) -> dict[str, Any]:
    """A container as the others know it."""
    return {"address": address, "port": port, "login": catalog.images().user.name, "host_keys": [host_key.strip()]}


def known(members: Mapping[str, Any]) -> dict[str, str]:
    """The files by which a container knows all members, as the playbook's role writes them on hosts."""
    return {f".ssh/provision_{part}": text(part, members) for part in ("known_hosts", "config")}


def text(part: str, members: Mapping[str, Any]) -> str:
    """One of these files: ``known_hosts`` or ``config``."""
    return _templates().get_template(f"{part}.j2").render(provision_members=members)


@functools.cache
def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(resources.folder("playbooks") / "roles/ssh_mesh/templates")
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)  # noqa: S701


def archive(files: Mapping[str, str]) -> bytes:
    """A tar of these files for the home of the image's user, his own and for him alone."""
    uid = catalog.images().user.uid
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in sorted({path.partition("/")[0] for path in files}):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o700, uid, uid
            tar.addfile(entry)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.uid, entry.gid = len(content.encode()), 0o600, uid, uid
            tar.addfile(entry, io.BytesIO(content.encode()))
    return buffer.getvalue()
