"""The host's record: what provision has installed here and what was here before. `provision remove` removes what it names.

It is written before each change, so that an interrupted run leaves nothing unknown. Python 3.7+, standard library only.

    {"schema": 1,
     "files": {PATH: {"sha256": [...], "marker": ... or null, "made": true or false}},   a file of ours, or a marked block in a shared file;
                                                                      "unwanted": true where the plan no longer needs it and it stays
     "contents": [NAME, ...],                     ours in the prefix; each is removed as a whole
     "claimed": [PATH, ...],                      was not there before us, with any content: a secret key, a folder
     "packages": {"added": [NAME, ...], "before": [NAME, ...] or null,                   "before": an installation is under way
                  "asked": [NAME, ...], "unsure": [NAME, ...]},   requested by us; new since an interrupted installation
     "held": [NAME, ...], "removed": [...], "replaced": {NAME: VERSION},               was there before us in that version
     "driver": "NAME VERSION"}                    NVIDIA's driver, where we have installed it; it stays
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile

EMPTY = {"schema": 1, "files": {}, "contents": [], "claimed": [], "held": [], "removed": [], "replaced": {}}
EMPTY["packages"] = {"added": [], "before": None, "asked": [], "unsure": []}


def load(path):
    try:
        with open(path) as file:
            return {**json.loads(json.dumps(EMPTY)), **json.load(file)}
    except FileNotFoundError:
        return json.loads(json.dumps(EMPTY))


def save(path, record):
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    write(path, json.dumps(record, indent=1, sort_keys=True) + "\n", 0o644)


def write(path, text, mode):
    """Replace a file in one step; a link is followed, and the file's owner stays."""
    path = os.path.realpath(path)
    descriptor, draft = tempfile.mkstemp(prefix=".provision-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(draft, mode)
        if os.path.exists(path) and os.geteuid() == 0:
            before = os.stat(path)
            os.chown(draft, before.st_uid, before.st_gid)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def read(path):
    """A file's text, or None where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def digest(content):
    return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()


def note(record, path, content, marker, exists):
    """Record the content of a file or block before it is written, next to the content before it, in case the write fails."""
    key = path if marker is None else path + "\n" + marker
    entry = record["files"].get(key)
    if entry is None:
        entry = record["files"][key] = {"path": path, "marker": marker, "sha256": [], "made": not exists}
    entry.pop("unwanted", None)
    entry["sha256"] = [*[one for one in entry["sha256"] if one != digest(content)][-1:], digest(content)]


def claim(record, path):
    """Record ``path``, and folders above it, as ours where they do not exist yet."""
    while not os.path.lexists(path) and path not in record["claimed"]:
        record["claimed"].append(path)
        path = os.path.dirname(path)
