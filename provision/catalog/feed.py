"""The feed: the whole catalogue as one signed file, for what was learned after this release of provision.

It takes the place of our files where it is newer than they; the user's own files are merged over it. It counts only with a signature by a
key of this package, which is verified whenever the feed is read.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from provision import catalog
from provision.base import downloads, process_locks, uv_support, validation
from provision.base.aptsources import without_logins
from provision.base.documents import Document
from provision.base.downloads import Unavailable
from provision.base.errors import ProvisionError, UsageError
from provision.catalog.models import FILES

NAME = "catalog.feed"  # in a catalogue folder: the lines of its signature, then the feed, so that both are replaced at once
SIGNATURE = ".minisig"
LARGEST_BYTES = 4 << 20  # ours has 100 kB
_SECONDS = 120.0  # for either file
_CLOCKS_DIFFER = datetime.timedelta(days=1)
HINT = "take one again: provision catalog update --feed URL|FILE; or remove this, to go back to provision's own catalogue"
_UNCHANGED = "nothing has changed here: take another one, with its signature, from where feeds for this release of provision are published"
#: In the feed as JSON: what Ansible would render, attributes that Python's formatting would look up, detours of paths, control characters.
_TRICK = re.compile(r'.{0,9}(\{[{%#]|\{\w*[.!:\[]|["/]\.\.["/]|\\u00[01]).{0,20}')


class _Document(validation.Model):
    schema_number: Literal[1] = Field(alias="schema")
    created: Annotated[AwareDatetime, Field(lt=datetime.datetime(9000, 1, 1, tzinfo=datetime.timezone.utc))]
    files: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Feed:
    """A feed whose signature was verified. ``files``: the content of each of the catalogue's files; ``key``: the ID of the signing key."""

    path: str
    created: datetime.datetime
    key: str
    files: Mapping[str, Document]

    def __str__(self) -> str:
        return f"feed of {self.created:%Y-%m-%d %H:%M} UTC, signed with the key {self.key}: {self.path}"


def public_keys() -> str:
    """The public keys that feeds are signed with, in minisign's format."""
    return resources.files("provision.catalog").joinpath("feed.pub").read_text(encoding="utf-8")


def _signed_by(content: bytes, signature: str, where: str, hint: str) -> str:
    """The ID of the key that has signed a feed. Raises UsageError where it is none of ours."""
    from provision.base import minisign  # it needs much that commands without a feed do not

    try:
        return minisign.verify(content, signature, public_keys())
    except ValueError as error:
        raise UsageError(f"the feed is not used: {error}", where=where, hint=hint) from error


def _parsed(content: bytes, key: str, where: str, hint: str) -> Feed:
    """A feed, whose files are not looked at. Raises UsageError for anything else."""
    read = validation.parse(_Document, content, where, "json", hint)
    return Feed(where, read.created.astimezone(datetime.timezone.utc), key, read.files)


def check(files: Mapping[str, Document], where: str) -> None:
    """Raises UsageError unless these are all of the catalogue's files, valid, without a text that could be more than data."""
    wrong = [f"the file {name!r} is {'missing' if name in FILES else 'unknown'}" for name in sorted(set(files) ^ set(FILES))]
    for name in FILES if not wrong else ():
        validation.validate(FILES[name], files[name], where, at=("files", name), hint=_UNCHANGED)
        if found := _TRICK.search(json.dumps(files[name])):
            wrong.append(f"a template, a detour of a path or a control character in `files.{name}`: {found[0]}")
    if wrong:
        raise UsageError(f"the feed is not used: {'; '.join(wrong)}", where=where, hint=_UNCHANGED)


def stored(folder: Path) -> Feed | None:
    """The feed in a catalogue folder; None without one that is newer than our files. Raises UsageError for an invalid one."""
    path = folder / NAME
    try:
        *signature, content = downloads.file_content(path, 2 * LARGEST_BYTES, "it").split(b"\n", 4)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (Unavailable, OSError) as error:
        raise UsageError(f"the feed cannot be read: {getattr(error, 'strerror', error)}", where=str(path), hint=HINT) from error
    feed = _parsed(content, "", str(path), HINT)
    if feed.created.date().isoformat() <= catalog.date_of_ours():
        return None  # also with the signature of a key that this release has no more
    return replace(feed, key=_signed_by(content, b"\n".join(signature).decode("utf-8", "replace"), str(path), HINT))


def take(place: str | Path, folder: Path) -> Feed:
    """Fetch a feed with its signature, verify it, and store both in a catalogue folder.

    Raises:
        ProvisionError: it cannot be read or stored; what was there is unchanged.
        UsageError: it is not signed by one of our keys, or invalid, or older than the stored one or our own files; likewise.
    """
    content, signature = _fetched(str(place)), _fetched(f"{place}{SIGNATURE}").decode("utf-8", "replace").splitlines()
    where = without_logins(str(place))
    feed = _parsed(content, _signed_by(content, "\n".join(signature), where, _UNCHANGED), where, _UNCHANGED)
    check(feed.files, where)
    if feed.created > catalog.now() + _CLOCKS_DIFFER:
        what = f"the feed is of {feed.created:%Y-%m-%d %H:%M} UTC, which is still to come"
        raise UsageError(what, where=where, hint="correct the clock of this machine, or of the one that has made the feed")
    older = f"the feed is of {feed.created:%Y-%m-%d %H:%M} UTC, and %s: the older one is not used"
    if feed.created.date().isoformat() <= catalog.date_of_ours():
        raise UsageError(older % f"provision's own catalogue of {catalog.date_of_ours()}", where=where, hint=_UNCHANGED)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with process_locks.acquired(folder / f".{NAME}.lock", wait=_SECONDS) as lock:
            if lock is None:
                raise ProvisionError("another process stores a feed", where=str(folder), hint="run it again when that has ended")
            before = None
            with contextlib.suppress(UsageError):  # what is invalid there is replaced
                before = stored(folder)
            if before is not None and feed.created < before.created:
                hint = f"to go back all the same, remove {before.path} first"
                raise UsageError(older % f"the stored one of {before.created:%Y-%m-%d %H:%M}", where=where, hint=hint)
            downloads.store(folder / NAME, "".join(f"{line}\n" for line in signature).encode() + content)
    except OSError as error:
        hint = "name another folder: --out DIR"
        raise ProvisionError(f"the feed cannot be stored: {error.strerror or error}", where=str(folder), hint=hint) from error
    return replace(feed, path=str(folder / NAME))


def _fetched(place: str) -> bytes:
    """What a file holds, or a server, which is reached as pip reaches it."""
    try:
        if (path := downloads.local_path(place)) is not None:
            return downloads.file_content(path, LARGEST_BYTES, "it")
        opener = downloads.index_opener(place, uv_support.online(uv_support.pip_settings(os.environ, sys.prefix)))
        return downloads.read(place, largest=LARGEST_BYTES, seconds=_SECONDS, opener=opener)
    except (Unavailable, OSError) as error:
        what = f"the feed, or the signature without which it is not used, cannot be read: {getattr(error, 'strerror', error)}"
        raise ProvisionError(what, where=without_logins(place), hint="name another one: --feed URL|FILE") from error
