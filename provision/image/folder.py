"""Writes a build context into a folder, and knows which files there are its own: a folder with somebody else's files is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from provision.base import downloads
from provision.base.errors import UsageError
from provision.image.render import RECORD, File


def write(folder: Path, files: Mapping[str, File]) -> None:
    """Lay the files into ``folder``, and a record (path → SHA-256) next to them, so that the next time they may be replaced or removed.

    The record comes first, with what a file was and what it becomes: cut off at any moment, the folder is still known to be ours.

    Raises:
        UsageError: the folder cannot be written, or holds files that are not ours.
    """
    try:
        _refuse_others_files(folder)
        folder.mkdir(parents=True, exist_ok=True)
        before = _record(folder)
        after = {path: [hashlib.sha256(file.content).hexdigest()] for path, file in files.items()}
        _note(folder, {path: before.get(path, []) + after.get(path, []) for path in {**before, **after}})
        for path in before:
            if path not in files:
                (folder / path).unlink(missing_ok=True)
        for path, file in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            downloads.store(target, file.content)
            target.chmod(0o755 if file.executable else 0o644)
            for above in target.relative_to(folder).parents:
                if above != Path():
                    (folder / above).chmod(0o755)  # BuildKit gives the image's folders the modes of these
        _note(folder, after)
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}", where=str(error.filename or folder), hint="name another: -o DIR"
        ) from error


def _refuse_others_files(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError("is no folder", where=str(folder), hint="name another: -o DIR")
    ours = _record(folder)
    present = [path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink()]
    names = {path.relative_to(folder).as_posix(): path for path in present}
    others = [
        name for name, path in names.items() if name != RECORD and hashlib.sha256(path.read_bytes()).hexdigest() not in ours.get(name, ())
    ]
    if others:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        what = f"it holds files that were not written by this command, or were changed since: {listed}"
        raise UsageError(what, where=str(folder), hint="name an empty folder: -o DIR")


def _note(folder: Path, record: Mapping[str, list[str]]) -> None:
    downloads.store(folder / RECORD, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())


def _record(folder: Path) -> dict[str, list[str]]:
    """Path → the checksums by which a file there is known as ours; an older version wrote one alone."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return {}
    listed = (
        {str(path): digest if isinstance(digest, list) else [digest] for path, digest in found.items()} if isinstance(found, dict) else {}
    )
    return {path: digest for path, digest in listed.items() if not Path(path).is_absolute() and ".." not in Path(path).parts}
