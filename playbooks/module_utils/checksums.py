"""Checksums of files, for modules on hosts. Python 3.6+, standard library only."""

import hashlib


def digest(path):
    """The SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def verify(module, path, expected):
    """End the module where a file is not the one of this checksum."""
    try:
        actual = digest(path)
    except OSError as error:
        module.fail_json(msg=f"cannot read {path}: {error}")
    if actual != expected:
        module.fail_json(msg=f"{path} has checksum {actual}, not {expected}; nothing of it was used")
