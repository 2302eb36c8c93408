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


def stat_of(pid):
    """The fields of /proc/PID/stat from the state on; empty when the process is gone. The name before them may hold anything."""
    try:
        with open("/proc/%d/stat" % pid, errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def started(pid):
    """When, in clock ticks since boot; 0 when the process is gone."""
    return int((stat_of(pid) or [0] * 20)[19])


def environment_of(pid, name="environ"):
    """The entries of a process's environment, or of its ``cmdline``; none when it is gone or another user's."""
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def is_module(pid):
    """Whether it is a module of Ansible's: a Python without arguments, which reads it from standard input, or one that runs its file."""
    words = environment_of(pid, "cmdline")[:-1]
    is_file = any(os.path.basename(word).startswith(b"AnsiballZ_") for word in words)
    return is_file or (len(words) == 1 and b"python" in os.path.basename(words[0]))


def is_at(path, folder):
    """Whether the open folder is still the one at the path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(folder))
    except FileNotFoundError:
        return False


def first_module(owners):
    """When the oldest living module of these users began, in seconds since the epoch; now, where there is none."""
    now = time.time()
    with open("/proc/uptime") as file:
        booted = now - float(file.read().split()[0])
    found = [now]
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # gone meanwhile
            if str(os.stat("/proc/%d" % pid).st_uid) in owners and is_module(pid):
                found.append(booted + started(pid) / os.sysconf("SC_CLK_TCK"))
    return min(found) - 1  # the clocks are not the same


def remove_abandoned(dry_run=False):
    """Remove what is abandoned of this user, and of the one who ran sudo: folders of jobs whose locks no guard holds any more, and of modules
    that were made before any module that lives. Returns their paths; with ``dry_run`` only that."""
    owners = {str(os.getuid()), os.environ.get("SUDO_UID")}
    oldest, found = first_module(owners), []
    places = sorted({PLACE, tempfile.gettempdir(), SHARED})
    forms = [os.path.join(glob.escape(place), name) for place in places for name in (PREFIX + "*", "ansible_*_payload_*")]
    for path in (path for form in forms for path in glob.glob(form)):
        with contextlib.suppress(OSError):  # it is none of ours, or its job runs
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if str(os.fstat(folder).st_uid) in owners and is_unused(path, folder, oldest):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if is_at(path, folder):
                        found.append(path)
                        if not dry_run:
                            shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)
    return found


def is_unused(path, folder, oldest):
    """Whether only a guard's lock could still say that it is used: it is a job's, or a module's that was made before ``oldest`` began."""
    name = os.path.basename(path)
    payload = PAYLOAD.fullmatch(name)
    is_ended = payload and os.fstat(folder).st_mtime < oldest and set(os.listdir(folder)) <= {payload.group(1) + ".zip"}
    return name.startswith(PREFIX) or is_ended
