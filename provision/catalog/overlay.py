"""The user's own catalogue files, merged over ours: what is newer than this release of provision, or what only they know.

A file has the name and the keys of one of ours and says only the rows that it adds or replaces. Mappings are merged key by key; the entries
of a list of mappings come in front of ours; everything else takes the place of ours. The result must match the same model as ours alone.
Where a folder has a `feed` that is newer than ours, the files are merged over that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from provision import catalog
from provision.base import downloads, validation
from provision.base.documents import Document, Json
from provision.base.downloads import Unavailable
from provision.base.errors import UsageError
from provision.catalog import OURS, Catalog, feed
from provision.catalog.feed import Feed
from provision.catalog.models import FILES, Sourced

LARGEST_BYTES = 1 << 20  # ours have at most 20 kB
HINT = (
    "correct the file or remove it, or let `provision catalog update` (with `--out` for another folder than yours) set it aside; "
    "`provision catalog show` lists the rest"
)


class Head(Sourced):
    """The head of such a file: where its rows come from, and when they were read. ``only_gaps``: not what a newer feed has."""

    schema_number: Literal[1] = Field(alias="schema")
    only_gaps: bool = False


@dataclass(frozen=True)
class OverlayFile:
    """One of the user's files. ``rows``: its content without the head."""

    path: str
    text: str
    head: Head
    rows: Mapping[str, Any]


@dataclass(frozen=True)
class Overlay:
    """The user's files, by the name of the catalogue file that each is merged over: the feed's, or ours.

    ``digest``: of their rows, empty without any.
    """

    files: Mapping[str, OverlayFile]
    digest: str
    feed: Feed | None = None

    def merged(self, name: str) -> Any:
        """The file ``name`` of the feed, or ours, with the user's over it. Raises UsageError naming the user's file and line."""
        at: validation.KeyPath = ()
        if self.feed is not None and name in self.feed.files:
            base, where, at = self.feed.files[name], self.feed.path, ("files", name)
        else:
            base, where = catalog.ours(name)
        if (file := self.files.get(name)) is not None:
            return validation.validate(FILES[name], merge(base, file.rows), file.path, text=file.text, kind="yaml", hint=HINT)
        return validation.validate(FILES[name], base, where, at=at, kind="yaml", hint=feed.HINT)


def folder_of_user() -> Path:
    """``$XDG_CONFIG_HOME/provision/catalog``, else ``~/.config/provision/catalog``."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "provision" / "catalog"


def read(folders: Iterable[Path]) -> Overlay | None:
    """The files of these folders, those of later ones over those of earlier ones, and the newest feed; None without any.

    Raises:
        UsageError: a file cannot be read, is too large, is none of the catalogue's, or is invalid; names file and line.
    """
    found, invalid = usable(folders)
    for error in invalid.values():
        raise error
    return found


def own(*folders: Path) -> Catalog:
    """Our catalogue with the user's own files over it, and those of these folders over them. Raises UsageError as `read`."""
    found = read([folder_of_user(), *folders])
    return Catalog(found) if found else OURS


def usable(folders: Iterable[Path], newest: Feed | None = None) -> tuple[Overlay | None, dict[Path, UsageError]]:
    """As `read`, of what is valid, and what is wrong with each of the others. ``newest``: a feed, unless a folder has a newer one."""
    files: dict[str, OverlayFile] = {}
    invalid: dict[Path, UsageError] = {}
    folders = [folder for folder in folders if folder.is_dir() or folder.is_symlink()]
    for folder in folders:
        try:
            newest = max(filter(None, (newest, feed.stored(folder))), key=lambda each: each.created, default=None)
        except UsageError as error:
            invalid[folder / feed.NAME] = error
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        try:
            file = _read(path)
            if newest and file.head.only_gaps and file.head.date <= newest.created.date():
                file = replace(file, rows=_lacking(newest.files.get(path.stem, {}), file.rows))
            if path.stem in files:  # messages are about the later one, as the earlier was valid alone
                file = replace(file, rows=merge(files[path.stem].rows, file.rows))
            Overlay({path.stem: file}, "", newest).merged(path.stem)
        except UsageError as error:
            invalid[path] = error
        else:
            files[path.stem] = file
    rows = json.dumps({name: file.rows for name, file in files.items() if file.rows}, sort_keys=True, default=str)
    digest = hashlib.sha256(rows.encode()).hexdigest() if rows != "{}" else ""
    return Overlay(files, digest, newest) if files or newest else None, invalid


def _read(path: Path) -> OverlayFile:
    where = str(path)
    if path.stem not in FILES:
        known = ", ".join(f"{name}.yaml" for name in FILES)
        raise UsageError(
            f"it is none of the catalogue's files{validation.did_you_mean(path.stem, FILES)}", where=where, hint=f"one of {known}"
        )
    try:
        text = validation.decoded(downloads.file_content(path, LARGEST_BYTES, "it"), where, HINT)
    except (Unavailable, OSError) as error:
        raise UsageError(f"cannot be read: {getattr(error, 'strerror', error)}", where=where, hint=HINT) from error
    data = validation.read(text, where, "yaml", HINT)
    if not isinstance(data, dict):
        raise UsageError("it must be a mapping", where=where, hint=HINT)
    keys = [field.alias or name for name, field in Head.model_fields.items()]
    head = validation.validate(Head, {name: data[name] for name in keys if name in data}, where, text=text, kind="yaml", hint=HINT)
    return OverlayFile(where, text, head, {name: value for name, value in data.items() if name not in keys})


def _lacking(ours: Document, theirs: Document) -> Document:
    """What ``theirs`` has of versions that ``ours`` does not have, in mappings by version; of lists of mappings the other entries."""
    left: dict[str, Json] = {}
    for name, value in theirs.items():
        before = ours.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            value = _lacking(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            value = [each for each in value if isinstance(each, dict) and each not in before]
        if name[:1].isdigit() if name not in ours else value and isinstance(value, dict | list):
            left[name] = value
    return left


def merge(ours: Document, theirs: Document) -> Document:
    """``theirs`` over ``ours``, as plain data."""
    both = dict(ours)
    for name, value in theirs.items():
        before = both.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            both[name] = merge(before, value)
        elif isinstance(before, list) and isinstance(value, list) and any(isinstance(each, dict) for each in (*before, *value)):
            # In front: lines of messages are those of the user's file.
            both[name] = [*value, *(each for each in before if each not in value)]
        else:
            both[name] = value
    return both
