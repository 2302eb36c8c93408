"""An image as a file, as `docker save` writes it: what it says of the image, and the same again under another name."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from provision.base.errors import UsageError

_CONFIG, _MANIFEST = "config.json", "manifest.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A file with one image.

    Attributes:
        attributes: what of `docker image inspect` can be read out of it.
        members: the layers' files in it, from the bottom.
        sizes: theirs, in bytes.
        config: the image's own description; its SHA-256 is the image's id.
        name: the first by which it was saved; empty without one.
    """

    path: Path
    attributes: dict[str, Any]
    members: tuple[str, ...]
    sizes: tuple[int, ...]
    config: bytes
    name: str = ""

    @property
    def size(self) -> int:
        """Of all layers, in bytes."""
        return sum(self.sizes)

    def write(self, out: IO[bytes], name: str) -> None:
        """The image as ``name`` alone, for `docker load`."""
        layers = [f"{number}.tar" for number in range(len(self.members))]
        manifest = json.dumps([{"Config": _CONFIG, "RepoTags": [name], "Layers": layers}]).encode()
        with tarfile.open(self.path) as ours, tarfile.open(fileobj=out, mode="w|", bufsize=_CHUNK) as tar:
            for path, content in ((_MANIFEST, manifest), (_CONFIG, self.config)):
                entry = tarfile.TarInfo(path)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            for path, member, size in zip(layers, self.members, self.sizes, strict=True):
                entry = tarfile.TarInfo(path)
                entry.size = size
                tar.addfile(entry, ours.extractfile(member))


def read(path: Path) -> Archive:
    """The image in a file. Raises UsageError where it holds none, or more than one, or is damaged."""
    try:
        with tarfile.open(path) as tar:
            listed = json.load(_file(tar, _MANIFEST))
            if len(listed) != 1:
                raise UsageError(f"it holds {len(listed)} images", where=str(path), hint="save one alone: docker save IMAGE -o FILE")
            config = _file(tar, listed[0]["Config"]).read()
            told = json.loads(config)
            settings, layers, arch = (
                told.get("config") or {},
                (told.get("rootfs") or {}).get("diff_ids") or [],
                told.get("architecture", ""),
            )
            name = str((listed[0].get("RepoTags") or [""])[0])
            members = tuple(str(name) for name in listed[0]["Layers"])
            # A layer that comes twice is a link to the first one.
            sizes = tuple(_file(tar, name).seek(0, io.SEEK_END) for name in members)
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror or error}", where=str(path)) from error
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        raise UsageError("this is no image as `docker save` writes it, or it is damaged", where=str(path)) from error
    attributes = {
        "Id": f"sha256:{hashlib.sha256(config).hexdigest()}",
        "Config": settings,
        "RootFS": {"Layers": layers},
        "Architecture": arch,
        "Size": sum(sizes),
    }
    return Archive(path, attributes, members, sizes, config, name)


def _file(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    found = tar.extractfile(name)
    if found is None:
        raise KeyError(name)
    return found
