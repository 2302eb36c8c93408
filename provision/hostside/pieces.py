"""Data of `provision push` in pieces, of which each has a SHA-256. Python 3.6+, standard library only.

A manifest is JSON, compressed: ``{"piece": bytes, "files": [[path, can be executed, bytes, digests of its pieces in a row], …]}``; all paths
begin with the same name.
"""

import hashlib
import json
import os
import stat
import zlib


def encoded(text):
    """A path in JSON as bytes: the host's locale need not know its characters."""
    return text.encode("utf-8", "surrogateescape")


def decoded(path):
    return path.decode("utf-8", "surrogateescape")


def digests_of(path, piece, beat=lambda: None):
    """Those of a file's pieces, as they are read; ``beat`` is called for each. None where it is not a file."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        for part in iter(lambda: file.read(piece) if is_file else b"", b""):
            beat()
            yield hashlib.sha256(part).hexdigest()


def digest_of(digests):
    """Of a whole file."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


class Manifest:
    """``pieces``: (number of the file, offset, bytes, SHA-256) of each; ``first``: each file's first; ``folders``: the paths of all."""

    def __init__(self, data):
        """Raises ValueError where it leads out of its own folder, or contradicts itself."""
        found = json.loads(zlib.decompress(data).decode())
        self.piece, self.files = found["piece"], [(encoded(path), *more) for path, *more in found["files"]]
        self.pieces, self.first, self.folders = [], [], set()
        paths, top = {path for path, _, _, _ in self.files}, self.files[0][0].split(b"/")[0]
        for number, (path, _, count, digests) in enumerate(self.files):
            parts = path.split(b"/")
            above = {b"/".join(parts[:at]) for at in range(1, len(parts))}
            self.folders |= above
            has_detour = parts[0] != top or {b"", b".", b".."} & set(parts) or above & paths or b"\0" in path
            if has_detour or len(digests) != 64 * -(-count // self.piece) or len(paths) < len(self.files):
                raise ValueError("invalid manifest, at %r" % path)
            self.first.append(len(self.pieces))
            for at in range(0, count, self.piece):
                self.pieces.append((number, at, min(self.piece, count - at), digests[at // self.piece * 64 :][:64]))
