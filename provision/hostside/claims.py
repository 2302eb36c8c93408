"""Which jobs use this host: their claims, which the guards of all users' jobs look at. Python 3.6+, standard library only.

A claim is an empty folder ``provision-job-JOB.claim`` in /dev/shm on which the job's guard (guard.py) holds a lock.
"""

import fcntl
import glob
import os
import pwd

from .abandoned import PREFIX, SHARED, is_at

CLAIM = ".claim"


def make_locked(path, mode=0o700):
    """Make a folder that is locked as long as this process, or a child of it, lives; fails where there is something already."""
    while True:
        os.mkdir(path, 0o700)
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # another guard's remove_abandoned() was faster
        fcntl.flock(folder, fcntl.LOCK_EX)
        os.fchmod(folder, mode)
        if is_at(path, folder):
            return folder
        os.close(folder)


def is_held(path, owner=None):
    """Whether a living process holds the lock on a folder, of that user where one is named."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if owner not in (None, os.fstat(folder).st_uid):
            return False
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(folder)


def claims(own=""):
    """(job, user) of each claim of a living job, but the one at ``own``."""
    found, beginning = [], os.path.join(SHARED, PREFIX)
    for path in filter(is_held, sorted(glob.glob(beginning + "*" + CLAIM))):
        try:
            user = pwd.getpwuid(os.stat(path).st_uid).pw_name
        except (OSError, KeyError):  # it is gone, or has no name
            user = "another user"
        found += [(path[len(beginning) : -len(CLAIM)], user)] if path != own else []
    return found
