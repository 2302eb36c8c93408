"""Whether wheels are the files that provision.lock has, and which of them it does not know.

A file is looked up by the name of its package alone, so that no other spelling of a version gets past the comparison. An Ansible module
imports this; the build of an image runs it: ``python locked_files.py FOLDER CONSTRAINTS``, where lines of CONSTRAINTS, which pip reads,
too, are ``name==version  # sha256:...``. Python 3.6+, standard library only.
"""

import hashlib
import os
import re
import sys

WAY_OUT = "nothing of it was used. If the index has a new file on purpose, take it with --upgrade."


def canonical(name):
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def digest(path):
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def compare(folder, locked):
    """(what is wrong, what is not locked) with the wheels in a folder, a line each.

    Args:
        locked: the files of one environment, each with ``name`` and ``sha256``; without any, everything goes.
    """
    expected = {}
    for entry in locked:
        expected.setdefault(canonical(entry["name"]), set()).add(entry["sha256"])
    wrong, unknown = [], []
    for file in sorted(os.listdir(folder)) if expected else ():
        name, version = file.split("-")[:2]
        found = digest(os.path.join(folder, file))
        allowed = expected.get(canonical(name))
        if allowed is None:
            unknown.append(f"{canonical(name)} {version}")
        elif found not in allowed:
            wrong.append(f"{file} has checksum {found}, but provision.lock says {' or '.join(sorted(allowed))}")
    return wrong, unknown


def read(path):
    """The entries of a file of constraints."""
    with open(path) as lines:
        return [re.fullmatch(r"(?P<name>\S+)==\S+  # sha256:(?P<sha256>\S+)\n", line).groupdict() for line in lines]


def main(folder, constraints):
    """Print what is not locked; return what is wrong, or None."""
    wrong, unknown = compare(folder, read(constraints))
    for package in unknown:
        print(f"provision.lock does not know {package}: taken as the index has it")
    return "\n".join([*wrong, WAY_OUT]) if wrong else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
