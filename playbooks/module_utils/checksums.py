"""Checksums of files, for modules on hosts. Python 3.6+, standard library only."""

import hashlib


def digest(path):
    """The SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()
