"""What killed jobs and Ansible modules leave on a host: folders that no living process uses. Python 3.6+, standard library only."""

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
import time

PREFIX = "provision-job-"  # guard.py holds a lock on such a folder as long as it lives
PLACE = "/tmp"  # of the folders of jobs, where the first host has it; else its TMPDIR
SHARED = "/dev/shm"
PAYLOAD = re.compile(r"(ansible_.+_payload)_[a-z0-9_]{8}")  # with nothing but a zip in it
PAYLOAD_S = 86400.0  # older than any living module: a task ends after hours
STALL, STALL_S = "provision-stall-", 300.0  # of stall.py, which lives for half a minute


def is_at(path, folder):
    """Whether the open folder is still the one at the path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(folder))
    except FileNotFoundError:
        return False


def remove_abandoned(dry_run=False):
    """Remove what is abandoned of this user, and of the one who ran sudo: folders of jobs whose locks no guard holds any more, and old
    ones of modules and of examinations. Returns their paths; with ``dry_run`` only that."""
    owners, found = {str(os.getuid()), os.environ.get("SUDO_UID")}, []
    places = sorted({PLACE, tempfile.gettempdir(), SHARED})
    forms = [os.path.join(glob.escape(place), name) for place in places for name in (PREFIX + "*", STALL + "*", "ansible_*_payload_*")]
    for path in (path for form in forms for path in glob.glob(form)):
        with contextlib.suppress(OSError):  # it is none of ours, or its job runs
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if str(os.fstat(folder).st_uid) in owners and is_unused(path, folder):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if is_at(path, folder):
                        found.append(path)
                        if not dry_run:
                            shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)
    return found


def is_unused(path, folder):
    """Whether only a guard's lock could still say that it is used: it is a job's, or an old one of a module or an examination with nothing
    of others in it."""
    name, age = os.path.basename(path), time.time() - os.fstat(folder).st_mtime
    payload = PAYLOAD.fullmatch(name)
    oldest, content = (PAYLOAD_S, payload.group(1) + ".zip") if payload else (STALL_S, "py-spy")
    is_old = (payload or name.startswith(STALL)) and age > oldest
    return name.startswith(PREFIX) or (is_old and set(os.listdir(folder)) <= {content})
