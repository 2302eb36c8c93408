"""Looks after one run on this machine, and leaves nothing of it behind. Python 3.6+, standard library only.

A run marks what it starts with PROVISION_RUN_ID in the environment; children inherit it, so the marker finds what a killed
ssh client or a dead controller left behind.

``guard.py RUN`` ends every process of that run and prints the names of what it ended, one a line. It never touches itself, its
ancestors, or a process of another run. Then it removes the folders of jobs that have no guard any more.

``guard.py`` alone guards a job on this host, started by job.py on every host of the job. The first line of standard input is JSON:
``{"folder": path, "files": {name: text}}``. It makes the job's private folder there, and one of the same name under /dev/shm; says
``{"ready": true}``, or ``{"error": …}``; then every few seconds ``{"stopped": […]}``, the processes that a signal has stopped. The other
end, too, writes a line every few seconds. On ``end`` it ends the run on this host, removes the folders and says ``{"orphaned": true}``
where the launcher's process here had died before its ranks, and ``{"ended": […]}``, how the ranks of this host ended. It does the same
when the other end is gone or silent.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time

GRACE_S = 15.0  # what pip, apt and a build need to put their things away, thousands of files on a busy machine
JOB_GRACE_S = 3.0
BEAT_S = 5.0
SILENT_S = 60.0  # longer than job.py waits for us: it can still say which host is silent
PREFIX = "provision-job-"
PLACE = "/tmp"  # of folders of jobs, where the first host has it; else its TMPDIR
SHARED = "/dev/shm"
OF_RANKS = (b"PROVISION_RANK=", b"COLLECTIVE_WORKER=")  # in the environment of a rank, and of one that comes and goes
LONGEST_NOTE = 1 << 16
RANK = re.compile(r"^rank-\d+$")  # what rank.py notes of a rank in the job's folder


def ancestors():
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        pid = parent_of(pid)
    return found


def fields_of(pid):
    """Of /proc/PID/stat, from the state on; empty when it is gone. The name before them may hold anything."""
    try:
        with open("/proc/%d/stat" % pid, errors="replace") as stat_of:
            return stat_of.read().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid):
    return int((fields_of(pid) or [0, 0])[1])


def marked(run_id, spared=None):
    """{pid: name} of live processes that carry the marker; processes of other users are invisible without root."""
    needle = ("PROVISION_RUN_ID=" + run_id).encode()
    spared, found = ancestors() if spared is None else spared, {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in spared:
            continue
        try:
            with open("/proc/%s/environ" % entry, "rb") as environ:
                if needle not in environ.read().split(b"\0"):
                    continue
            with open("/proc/%s/comm" % entry, errors="replace") as comm:
                found[int(entry)] = comm.read().strip()
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def started(pid):
    """When, in clock ticks since boot. Parents come before children by it: who tidies up must not take its child's end for a failure."""
    fields = fields_of(pid)
    return int(fields[19]) if fields else 0


def signal_all(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue  # gone meanwhile


def sweep(run_id, spared=None, grace=GRACE_S):
    ended = marked(run_id, spared)
    signal_all(sorted(ended, key=started), signal.SIGTERM)
    deadline = time.monotonic() + grace
    left = marked(run_id, spared)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = marked(run_id, spared)
        ended.update(left)
    signal_all(left, signal.SIGKILL)
    deadline = time.monotonic() + JOB_GRACE_S
    while marked(run_id, spared) and time.monotonic() < deadline:
        time.sleep(0.05)  # what was killed may still write into the folders, or hold their locks
    return ended


def claim(path):
    """An open private folder that is locked as long as this process lives; fails where there is something already."""
    while True:
        os.mkdir(path, 0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(folder, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.stat(path), os.fstat(folder)):
                return folder
        except OSError:
            pass
        os.close(folder)  # a sweep was faster than the lock


def remove_abandoned():
    """The folders of this user's jobs whose guards were killed: nobody holds their locks. With sudo, of the user who became root."""
    mine = {os.getuid(), int(os.environ.get("SUDO_UID", os.getuid()))}
    for place in {PLACE, tempfile.gettempdir(), SHARED}:
        try:
            names = [name for name in os.listdir(place) if name.startswith(PREFIX)]
        except OSError:
            continue
        for path in (os.path.join(place, name) for name in names):
            try:
                found = os.lstat(path)
                if found.st_uid not in mine or not stat.S_ISDIR(found.st_mode):
                    continue
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # its job runs
            finally:
                os.close(folder)


class Ranks:
    """What the ranks of this host have noted in the job's folder (rank.py)."""

    def __init__(self, folder):
        self._folder = folder

    def all(self):
        """{"rank", "pid", "parent", "starter"} of each; of those that have ended "code", "at" and "orphaned", too.

        The program's own files may lie next to them.
        """
        try:
            names = sorted(name for name in os.listdir(self._folder) if RANK.match(name))
        except OSError:
            return []  # the program has removed it
        return list(filter(None, (self._one(os.path.join(self._folder, name)) for name in names)))

    def _one(self, path):
        try:
            with open(path, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
                noted = json.loads(file.read(LONGEST_NOTE))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(noted, dict) or not all(is_whole(noted.get(name)) for name in ("rank", "pid", "parent", "starter")):
            return None
        has_ended = is_whole(noted.get("code")) and type(noted.get("at")) in (int, float) and abs(noted["at"]) < 1e9
        return noted if has_ended or noted.get("code") is None else None

    def ended(self):
        """How they did, when, and whether the launcher's process that started them was dead by then."""
        return [
            {"rank": one["rank"], "code": one["code"], "at": one["at"], "orphaned": one.get("orphaned") is True}
            for one in self.all()
            if one.get("code") is not None
        ]

    def are_orphaned(self):
        """Whether that is so of one of them, or of one that goes on."""
        alive = [one for one in self.all() if one.get("code") is None and fields_of(one["parent"])[:1] not in ([], ["Z"])]
        return any(one["orphaned"] for one in self.ended()) or any(parent_of(one["parent"]) != one["starter"] for one in alive)


def is_whole(thing):
    return type(thing) is int and abs(thing) < 1e9


def stopped(run_id, ranks):
    """The ranks, and the processes that look after them, that a signal has stopped; a debugger's are none of them."""
    watched = dict.fromkeys(pid for pid in marked(run_id, {os.getpid()}) if not is_of_rank(pid))
    for one in ranks.all():
        if one.get("code") is None:
            watched[parent_of(one["parent"])] = None
            watched[one["pid"]] = one["rank"]
    halted = [pid for pid in watched if pid > 1 and is_stopped(pid)]
    return [{"pid": pid, "rank": watched[pid], "name": name_of(pid)} for pid in halted]


def is_stopped(pid):
    return fields_of(pid)[:1] == ["T"]


def is_of_rank(pid):
    """Whether it is a rank or what one has started, which is the program's own affair."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as environ:
            return any(entry.startswith(OF_RANKS) for entry in environ.read().split(b"\0"))
    except OSError:
        return True  # gone meanwhile


def name_of(pid):
    try:
        with open("/proc/%d/comm" % pid, errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return ""


def lines():
    """Those of standard input; raw reads, because a buffered one would hold the interpreter's exit up."""
    rest = b""
    while True:
        data = os.read(0, 65536)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode()


class OtherEnd:
    """Who started this guard: how long it has been silent, and whether it wants an end or is gone."""

    def __init__(self, heard):
        self.silent = 0.0
        self.over = threading.Event()
        self.is_orderly = False
        self._heard = heard
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self._heard:
            self.silent = 0.0
            if line == "end":
                self.is_orderly = True
                break
        self.over.set()


def say(what):
    try:
        os.write(1, b"\n" + json.dumps(what).encode() + b"\n")  # a host's shell may have begun a line
    except OSError:
        pass  # nobody listens any more; what is left to do is done without


def guard():
    heard = lines()
    order = json.loads(next(heard, "null"))
    if order is None:
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it is the last to go
    remove_abandoned()
    made = []
    try:
        for path in (order["folder"], os.path.join(SHARED, os.path.basename(order["folder"]))):
            claim(path)
            made.append(path)
        for name, text in order["files"].items():
            with open(os.path.join(order["folder"], name), "w") as file:
                file.write(text)
        say({"ready": True})
        ended, are_orphaned = attend(os.environ["PROVISION_RUN_ID"], Ranks(order["folder"]), OtherEnd(heard))
        now = time.monotonic()  # of this machine alone
        if are_orphaned:
            say({"orphaned": True})
        say({"ended": [dict(one, ago=now - one["at"]) for one in ended]})
    except FileExistsError as error:
        place = os.path.dirname(error.filename)
        say({"error": "it is the same machine as another host of this job, or shares %s with it" % place})
        return 1
    except OSError as error:
        say({"error": "%s: %s" % (error.filename or order["folder"], error.strerror or error)})
        return 1
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
    return 0


def attend(run_id, ranks, other_end):
    """Until the other end wants it or is gone; how the ranks ended, and whether as orphans, after nothing of the run is left here."""
    last = time.monotonic()
    while not other_end.over.wait(BEAT_S) and other_end.silent < SILENT_S:
        say({"stopped": stopped(run_id, ranks)})
        now = time.monotonic()
        other_end.silent += min(now - last, 2 * BEAT_S)  # a machine that was asleep has missed nothing
        last = now
    ended, are_orphaned = ranks.ended(), ranks.are_orphaned()
    spared = {os.getpid(), os.getppid()} if other_end.is_orderly else {os.getpid()}
    # Whoever started the ranks and carries no mark, an agent of the engine's, ends by itself when it can go on.
    starters = {parent_of(one["parent"]) for one in ranks.all()}
    signal_all([pid for pid in starters if pid > 1 and is_stopped(pid)], signal.SIGCONT)
    sweep(run_id, spared, JOB_GRACE_S)
    return ended, are_orphaned


if __name__ == "__main__":
    if sys.argv[1:]:
        for pid, name in sorted(sweep(sys.argv[1]).items()):
            print("%s (pid %d)" % (name, pid))
        remove_abandoned()
    else:
        sys.exit(guard())
