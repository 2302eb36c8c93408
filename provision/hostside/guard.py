"""Guards one run on this host, and leaves nothing of it behind. Python 3.6+, standard library only.

A run marks what it starts with PROVISION_RUN_ID in the environment; children inherit it, so the mark finds what a killed ssh client or a
dead controller left behind.

``guard.py RUN`` ends every process of that run and prints the names of what it ended, one a line. It never ends itself, its ancestors, or
a process of another run. Then it removes what is abandoned (abandoned.py). ``guard.py RUN LOCK`` releases that lock of the run at last.

``guard.py`` alone guards a job on this host, started by job.py on every host of the job. The first line of standard input is JSON:
``{"folder": path, "files": {name: text}, "sample": seconds, "shared": …}``. It makes the job's private folder there, and one of the same name
under /dev/shm, and unless ``shared`` is null, a claim (claims.py); prints ``{"ready": true}``, ``{"busy": …}`` where it is false and another job has the host,
or ``{"error": …}``; then every few seconds ``{"stopped": […]}``, the processes that a signal has
stopped, and ``{"started": ranks}``; and unless ``sample``, which is how often, is 0, ``{"quiet": seconds}``, for how long no rank of this host shows that it goes on
(null without ranks), and ``{"ranks": […]}``, where the time of each has gone (shares.py). The other end, too, writes a line every few
seconds. On ``restart`` it kills the ranks of this host, which their launcher starts again. On ``end``, or when the other end is gone or
silent, it ends the run on this host, removes the folders and prints ``{"orphaned": true}`` where the launcher's process here has died before its ranks, ``{"ended": […]}``, how the ranks of
this host ended, and ``{"killed": […]}``, those whose end could not be recorded.
"""

import json
import os
import re
import select
import shutil
import signal
import stat
import sys
import time

from .abandoned import PREFIX, SHARED, is_at, remove_abandoned
from .claims import CLAIM, claims, make_locked
from .host_lock import release
from .shares import Shares, content, environment_of, is_stopped, name_of, number_in, started, stat_of, threads_of

GRACE_S = 15.0  # what pip, apt and a build need to clean up, thousands of files on a busy machine
JOB_GRACE_S = 3.0
BEAT_S = 5.0
SILENT_S = 60.0  # longer than job.py waits for us: it can still say which host is silent
OF_RANKS = (b"PROVISION_RANK=", b"COLLECTIVE_WORKER=")  # in the environment of a rank, and of one that comes and goes
RECORD = "provision-rank-"  # what rank.py writes into the job's folder
LONGEST_RECORD = 1 << 16
# A rank goes on where a thread both computes and is put to sleep now and then, or where it reads and writes much. One that waits may do
# either: it spins, or looks again and again. So may its log, but not with so many bytes.
MIN_BUSY, MIN_SLEEPS, MIN_BYTES = 0.1, 1.0, 200000.0  # of a core; and in a second


def is_module(pid):
    """Whether it is a module of Ansible's, which comes through standard input: a Python without arguments."""
    words = environment_of(pid, "cmdline")[:-1]
    return len(words) == 1 and b"python" in os.path.basename(words[0])


def parent_of(pid):
    return int((stat_of(pid) or [0, 0])[1])


def of_run(run_id):
    """{pid: whether it is of a rank} of the live processes that carry the run's mark."""
    mark = ("PROVISION_RUN_ID=" + run_id).encode()
    found = ((int(entry), environment_of(int(entry))) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid: any(entry.startswith(OF_RANKS) for entry in environment) for pid, environment in found if mark in environment}


def marked(run_id, spared):
    """{pid: name} of the same, without the ``spared`` ones."""
    return {pid: name_of(pid) for pid in of_run(run_id) if pid not in spared}


def ancestors():
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        pid = parent_of(pid)
    return found


def signal_all(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue  # gone meanwhile


def sweep(run_id, spared, grace):
    """End every process of the run; {pid: name} of what was ended."""
    ended = {}
    # A module removes its folder in /tmp after SIGINT alone. What was killed may still write into the folders, or hold their locks.
    steps = (signal.SIGINT, is_module, JOB_GRACE_S), (signal.SIGTERM, bool, grace), (signal.SIGKILL, bool, JOB_GRACE_S)
    for number, wanted, seconds in steps:
        left = marked(run_id, spared)
        # Parents before children: a parent that cleans up must not take its child's end for a failure.
        signal_all(sorted(filter(wanted, left), key=started), number)
        deadline = time.monotonic() + seconds
        while any(map(wanted, left)) and time.monotonic() < deadline:
            ended.update(left)
            time.sleep(0.05)
            left = marked(run_id, spared)
    return ended


def claim_host(path, shared):
    """Make the claim there. Returns which job has this host already, for people; "" where none has, or that does not matter."""
    for own in ("", path):  # also behind our own claim: of two jobs that begin at the same time, one at least sees the other
        others = [] if shared else claims(own)
        if others:
            return "in use by job %s of %s" % others[0]
        if not own:
            make_locked(path, 0o755)
    return ""


def ranks_in(folder):
    """What rank.py has recorded of the ranks of this host: rank, pid, parent, starter; of those that have ended code, at (time), orphaned."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []  # the program has removed it
    records = [read_record(os.path.join(folder, name)) for name in names if name.startswith(RECORD) and not name.endswith(".new")]
    return [record for record in records if record]


def read_record(path):
    """A record of rank.py; None where the program has removed it, or put something else there."""
    try:
        with open(path, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            record = json.loads(file.read(LONGEST_RECORD)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(is_number(record.get(name)) for name in ("rank", "pid", "parent", "starter")):
        return None
    is_end = is_number(record.get("code"), -1e9) and is_number(record.get("at"), kind=float) and isinstance(record.get("orphaned"), bool)
    return record if is_end or "code" not in record else None


def is_number(value, above=-1, kind=int):
    return type(value) is kind and above < value < 1e9


def is_orphan(record):
    """Whether the launcher's process that started the rank had died before the rank."""
    if "code" in record:
        return record["orphaned"]
    state, parent = stat_of(record["parent"])[:2] or ("Z", 0)
    return state != "Z" and int(parent) != record["starter"]


class Rhythm:
    """For how long (``quiet``, in seconds) no process of the run's ranks on this host has shown that it goes on; None without ranks."""

    def __init__(self):
        self.quiet, self.last, self.known = None, time.monotonic(), {}

    def look(self, found):
        """``found``: what `of_run` has found."""
        now, ticks = time.monotonic(), os.sysconf("SC_CLK_TCK")
        passed, self.last = max(now - self.last, 0.01), now
        seen = {}
        for pid in filter(found.get, found):
            for tid in threads_of(pid):
                fields = stat_of("%d/task/%s" % (pid, tid)) or [0] * 13
                busy, (was_busy, sleeps, _) = (int(fields[11]) + int(fields[12])) / ticks, self.known.get((pid, tid), (-1.0, 0, 0))
                if busy != was_busy:
                    sleeps = number_in(content("/proc/%d/task/%s/status" % (pid, tid)), rb"\nvoluntary_ctxt_switches:\s*(\d+)")
                seen[pid, tid] = busy, sleeps, number_in(content("/proc/%d/io" % pid), rb"[rw]char: (\d+)") if tid == str(pid) else 0
        rates = [[(new - old) / passed for new, old in zip(seen[each], self.known[each])] for each in seen if each in self.known]
        goes_on = any((busy >= MIN_BUSY and sleeps >= MIN_SLEEPS) or data >= MIN_BYTES for busy, sleeps, data in rates)
        # A machine that was asleep has missed nothing.
        self.quiet = None if not seen else 0.0 if goes_on or not rates else (self.quiet or 0.0) + min(passed, 2 * BEAT_S)
        self.known = seen
        return self.quiet


def stopped(found, ranks):
    """The ranks and the launcher's processes, of those that `of_run` has found, that a signal has stopped. What a rank itself has started is the
    program's own affair."""
    watched = {pid: None for pid in found if not found[pid]}
    for one in ranks:
        if "code" not in one:
            watched[parent_of(one["parent"])] = None  # an agent of the engine's launcher carries no mark
            watched[one["pid"]] = one["rank"]
    return [{"pid": pid, "rank": watched[pid], "name": name_of(pid)} for pid in watched if pid > 1 and is_stopped(pid)]


def say(what):
    try:
        os.write(1, b"\n" + json.dumps(what).encode() + b"\n")  # a host's shell may have begun a line
    except OSError:
        pass  # the listener is gone; what is left to do is done without


def read_order():
    """The first line of standard input; None where the other end is gone. Byte by byte: what follows is read elsewhere."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    return json.loads(line.decode())


def guard():
    order = read_order()
    if order is None:
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it is the last to go
    remove_abandoned()
    folder, made = order["folder"], []
    try:
        for path in (folder, os.path.join(SHARED, os.path.basename(folder))):
            make_locked(path)
            made.append(path)
        for name, text in order["files"].items():
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
        if order["shared"] is not None:
            made.append(os.path.join(SHARED, PREFIX + os.environ["PROVISION_RUN_ID"] + CLAIM))
            blocking = claim_host(made[-1], order["shared"])
            if blocking:
                say({"busy": blocking})
                return 1
        say({"ready": True})
        ranks, has_orphans = attend(os.environ["PROVISION_RUN_ID"], folder, order["sample"])
        ended = [one for one in ranks if "code" in one]
        now = time.monotonic()  # of this machine alone
        if has_orphans:
            say({"orphaned": True})
        say({"ended": [{"rank": one["rank"], "code": one["code"], "ago": now - one["at"], "orphaned": one["orphaned"]} for one in ended]})
        say({"killed": [one["rank"] for one in ranks if "code" not in one]})
    except FileExistsError as error:
        place = os.path.dirname(error.filename)
        say({"error": "it is the same machine as another host of this job, or shares %s with it" % place})
        return 1
    except OSError as error:
        say({"error": "%s: %s" % (error.filename or folder, error.strerror or error)})
        return 1
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
    return 0


def attend(run_id, folder, sample):
    """Wait for the end of the job, and end what is left of the run on this host.

    Returns the records of the ranks, and whether the launcher's process that started a rank had died before the rank. Those without a code
    were killed together with what would have recorded it, by the launcher or as left over here.
    """
    is_orderly = False
    try:
        rhythm, shares = Rhythm(), Shares()

        def report(silent):
            found, ranks = of_run(run_id), ranks_in(folder)
            say({"stopped": stopped(found, ranks)})
            say({"started": len(ranks)})
            if sample:
                say({"quiet": rhythm.look(found)})
                windows = courtesy(shares.windows, filter(found.get, found))
                say({"ranks": windows if silent < 2 * BEAT_S else []})  # the pipe to one that does not read would be full, and hold us

        def restart():
            found = of_run(run_id)  # the program can write into the folder
            signal_all([one["pid"] for one in ranks_in(folder) if "code" not in one and found.get(one["pid"])], signal.SIGKILL)

        is_orderly = wait_for_end(sample or BEAT_S, report, restart, lambda: courtesy(shares.glance))
        ranks = ranks_in(folder)
        has_orphans = any(map(is_orphan, ranks))
        # An agent of the engine's launcher carries no mark, and ends by itself when it can continue.
        signal_all({pid for pid in (parent_of(one["parent"]) for one in ranks) if pid > 1 and is_stopped(pid)}, signal.SIGCONT)
    finally:
        sweep(run_id, {os.getpid(), os.getppid()} if is_orderly else {os.getpid()}, JOB_GRACE_S)
    return ranks, has_orphans


def courtesy(look, *about):
    """What a look says; nothing where it fails: the job must not end for it."""
    try:
        return look(*about)
    except Exception:  # noqa: BLE001  of files of the system, which may be of any version
        return []


def wait_for_end(beat, report, restart, glance):
    """Call ``report``, with how long the other end has been silent, every ``beat`` seconds, ``glance`` ten times as often, and ``restart``
    where the other end writes that, until it writes ``end`` (True), or is gone or silent (False)."""
    silent, since_report, last, rest = 0.0, 0.0, time.monotonic(), b""
    while silent < SILENT_S:
        if select.select([0], [], [], min(BEAT_S, beat) / 10)[0]:
            data = os.read(0, 65536)
            *lines, rest = (rest + data).split(b"\n")
            if not data or b"end" in lines:
                return bool(data)
            if b"restart" in lines:
                restart()
            silent = 0.0
        now = time.monotonic()
        step = min(now - last, BEAT_S)  # a machine that was asleep has missed nothing
        silent, since_report, last = silent + step, since_report + step, now
        glance()
        if since_report >= beat:
            since_report = 0.0
            report(silent)
    return False


if __name__ == "__main__":
    if sys.argv[1:]:
        for pid, name in sorted(sweep(sys.argv[1], ancestors(), GRACE_S).items()):
            print("%s (pid %d)" % (name, pid))
        remove_abandoned()
        for path in sys.argv[2:]:
            release(os.path.expanduser(path), sys.argv[1])
    else:
        sys.exit(guard())
