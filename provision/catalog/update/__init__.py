"""Newer rows for the catalogue, read from package indexes' wheels and NVIDIA's lists: an overlay that later runs merge over ours.

Of NCCL and PyTorch the releases that the catalogue lacks are looked at, from the oldest known on. CUDA, NCCL and the GPUs that a build has
code for are read from the wheels; of a wheel on a server that knows ranges only the library with GPU code is fetched, which is compressed,
so whole. Which releases are defaults and which are bad, no index tells: that is in a feed (`provision.catalog.feed`).
Everything that comes from a server or a given folder is data: bounded in size, validated by models, and nothing of it is run.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from provision import catalog
from provision.base import downloads
from provision.base.downloads import Unavailable
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import feed, overlay
from provision.catalog.models import FILES
from provision.catalog.update.nvidia import add_branches, add_images, add_toolkits
from provision.catalog.update.package_index import unknown_wheels
from provision.catalog.update.sources import Sources, Update, sentence, shown
from provision.catalog.update.wheels import add_release

PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "torch")
#: File of the catalogue → what must have been seen for its knowledge to be of today.
_SUBJECTS = {"nccl": {*PACKAGES[:2]}, "pytorch": {PACKAGES[2]}, **{name: {name} for name in ("cuda", "driver", "cuda_images")}}
_HEAD = """\
# Written by `provision catalog update`: merged over provision's own catalogue. Remove the file to go back to that.
"""


def update(sources: Sources, folder: Path, today: datetime.date, say: Callable[[str], None]) -> Update:
    """Write what the catalogue in use lacks to ``folder``, over what is there, and the day: all files or none. What is invalid there is
    renamed, so that it counts no more.

    Raises:
        UsageError: the files would be invalid with the new rows; they are unchanged.
    """
    made = look(sources, say)
    in_use = sources.catalog.overlay
    before, invalid = overlay.usable([folder], in_use.feed if in_use else None)
    places = [shown(each) for each in (*sources.indexes, sources.cuda, sources.drivers, sources.images)]
    source = f"`provision catalog update` from {', '.join(dict.fromkeys(places))}"
    texts: dict[str, str] = {}
    for name in dict.fromkeys((*made.rows, *(name for name, needed in _SUBJECTS.items() if needed <= made.seen))):
        old = before.files.get(name) if before else None
        only_gaps = old is None or old.head.only_gaps  # rows of the user's own stay above every feed
        head = {"schema": 1, "source": source, "date": today.isoformat(), "only_gaps": only_gaps}
        content = {**head, **overlay.merge(old.rows if old else {}, made.rows.get(name, {}))}
        texts[name] = _HEAD + yaml.safe_dump(content, sort_keys=False, width=140, default_flow_style=None)
    if not texts and not invalid:
        return made
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".update-", dir=folder) as fresh:  # what the disk has no room for is not half there
            for name, text in texts.items():
                downloads.store(Path(fresh) / f"{name}.yaml", text.encode())
            for error in overlay.usable([Path(fresh)], before.feed if before else None)[1].values():
                raise error
            made.set_aside += [_set_aside(path, error) for path, error in invalid.items()]
            for name in texts:
                os.replace(Path(fresh) / f"{name}.yaml", folder / f"{name}.yaml")
                made.written.append(str(folder / f"{name}.yaml"))
    except OSError as error:
        raise ProvisionError(
            f"cannot be written: {error.strerror or error}", where=str(folder), hint="name another folder: --out DIR"
        ) from error
    finally:
        for each in created:
            with contextlib.suppress(OSError):  # only empty ones can be removed
                each.rmdir()
    return made


def look(sources: Sources, say: Callable[[str], None]) -> Update:
    """Read what the catalogue in use lacks."""
    made = Update()
    for package in PACKAGES:
        for wheels in unknown_wheels(package, sources, made):
            add_release(made, package, wheels, sources, say)
    for what, place, add in (
        ("CUDA", sources.cuda, add_toolkits),
        ("driver branches", sources.drivers, add_branches),
        ("images", sources.images, add_images),
    ):
        try:
            add(made, sources)
        except (Unavailable, OSError) as error:
            made.unreached.append(f"{what}: {shown(place)}: {sentence(error)}")
    return made


def build(sources: Sources, now: datetime.datetime, say: Callable[[str], None]) -> tuple[Update, bytes]:
    """The feed of now, without a signature: the catalogue in use, which is to be ours alone, with what it lacks.

    Raises:
        ProvisionError: not everything could be looked at, so that the feed would claim a knowledge that it has not.
    """
    made = look(sources, say)
    if missing := [name for name, needed in _SUBJECTS.items() if not needed <= made.seen]:
        what = f"nothing was to be seen of what belongs in {', '.join(missing)}: no feed is made"
        raise ProvisionError("\n".join((what, *made.unreached)), hint="make these places reachable, or name a folder with all: --from DIR")
    files = {name: overlay.merge(catalog.ours(name)[0], made.rows.get(name, {})) for name in FILES}
    document = json.loads(json.dumps({"schema": 1, "created": now.isoformat(timespec="seconds"), "files": files}, default=str))
    feed.check(document["files"], "the feed")
    return made, json.dumps(document, indent=1).encode() + b"\n"


def _set_aside(path: Path, error: UsageError) -> str:
    """Rename a user file, so that nothing of it is lost; a sentence about it."""
    names = (path.with_name(f"{path.name}.invalid{number or ''}") for number in itertools.count())
    kept = next(each for each in names if not each.exists())
    path.rename(kept)
    return f"{next(iter(error.parts()))[0]}; it is now {kept.name}"
