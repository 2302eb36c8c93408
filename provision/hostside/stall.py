"""Where the ranks of a job stand on this host, for `provision doctor --job`. It reads, judges nothing, and changes nothing in the job.

Python 3.6+, standard library only. The order is JSON on standard input: ``pid``, one process of the job or its launcher, or null for every
job here; ``spy``, the program py-spy for this architecture, packed by zlib and base64, or null; ``seconds``, the time that there is. It prints
what `Answer` of `doctor/stall/model.py` reads. A rank is what has a launcher's variables in its environment.

Stacks are read by py-spy, which holds a process for milliseconds; where that is refused it is asked to read without holding it. System
calls, kernel stacks, and what another user's process has open need root. Local variables are never read.
"""

import base64
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

BEGIN, END = "===PROVISION-STALL-BEGIN===", "===END==="
# (rank, ranks, job): variables of launchers, the one that starts processes last first: mpirun within a job of Slurm starts the ranks.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    ("COLLECTIVE_RANK", "COLLECTIVE_SIZE", ("COLLECTIVE_JOB", "PROVISION_RUN_ID")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("PMI_RANK", "PMI_SIZE", ("PMI_ID", "HYDI_CONTROL_FD")),
    ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
MAX_RANKS, MAX_PROCESSES, MAX_THREADS, MAX_FRAMES, LONGEST = 256, 24, 48, 60, 300
SPY_S, SAMPLE_S, PARALLEL = 5.0, 1.0, 4
# System calls that wait: x86_64, aarch64, and what their first argument is.
CALLS = {
    "read": (0, 63, "fd"), "write": (1, 64, "fd"), "pread64": (17, 67, "fd"), "pwrite64": (18, 68, "fd"), "readv": (19, 65, "fd"),
    "writev": (20, 66, "fd"), "open": (2, None, "path"), "openat": (257, 56, "at"), "newfstatat": (262, 79, "at"), "statx": (332, 291, "at"),
    "getdents64": (217, 61, "fd"), "fsync": (74, 82, "fd"), "fdatasync": (75, 83, "fd"), "flock": (73, 32, "fd"), "fcntl": (72, 25, "fd"),
    "poll": (7, None, "poll"), "ppoll": (271, 73, "poll"), "select": (23, None, ""), "pselect6": (270, 72, ""),
    "epoll_wait": (232, None, "epoll"), "epoll_pwait": (281, 22, "epoll"), "connect": (42, 203, "fd"), "accept": (43, 202, "fd"),
    "accept4": (288, 242, "fd"), "recvfrom": (45, 207, "fd"), "recvmsg": (47, 212, "fd"), "sendto": (44, 206, "fd"), "sendmsg": (46, 211, "fd"),
    "futex": (202, 98, ""), "wait4": (61, 260, ""), "waitid": (247, 95, ""), "nanosleep": (35, 101, ""), "clock_nanosleep": (230, 115, ""),
    "restart_syscall": (219, 128, ""), "rt_sigtimedwait": (128, 137, ""), "pause": (34, None, ""), "semop": (65, 193, ""), "semtimedop": (220, 192, ""),
}  # fmt: skip
NUMBERS = {number[0 if platform.machine() == "x86_64" else 1]: (name, number[2]) for name, number in CALLS.items()}
TICKS = os.sysconf("SC_CLK_TCK")
TCP_STATES = {"01": "established", "02": "connecting", "03": "accepting", "04": "closing", "08": "closed by the peer", "0A": "listening"}


def read(path, size=1 << 16):
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""


def text(value):
    """As text that any reader of JSON accepts, and not longer than that."""
    value = value if isinstance(value, str) else value.decode(errors="replace")
    return value.encode(errors="replace").decode()[:LONGEST]


def link(path):
    try:
        return text(os.readlink(path))
    except OSError:
        return ""


class Process:
    """What /proc says of a process when it is asked."""

    def __init__(self, pid):
        self.pid = pid
        self.place = "/proc/%d/" % pid
        fields = read(self.place + "stat").rpartition(b")")[2].split()
        self.state, self.parent = (fields[0].decode(), int(fields[1])) if len(fields) > 2 else ("", 0)
        words = read(self.place + "cmdline", 4096).split(b"\0")
        self.words = [text(word) for word in words if word][:12]
        variables = (entry.partition(b"=") for entry in read(self.place + "environ").split(b"\0"))
        self.environ = {name.decode(errors="replace"): text(value) for name, _, value in variables}

    def rank(self):
        """(rank, ranks, job), or None."""
        for rank, ranks, job in LAUNCHERS:
            if self.environ.get(rank, "").isdigit() and self.environ.get(ranks, "").isdigit():
                known = [self.environ[name] for name in job if self.environ.get(name)]
                return int(self.environ[rank][:7]), int(self.environ[ranks][:7]), " ".join([rank, *known])[:LONGEST]
        return None


def table():
    """pid -> process, of all that can be read but ourselves."""
    mine = os.getpid()
    return {int(name): Process(int(name)) for name in os.listdir("/proc") if name.isdigit() and int(name) != mine}


def ranks_of(processes, pid):
    """[(rank, ranks, job, its processes)]: a rank's first process is the one whose parent is not of that rank."""
    found = {number: known for number, each in processes.items() if (known := each.rank()) and each.state != "Z"}
    members = {}
    for number in sorted(found):
        top = number
        while found.get(processes[top].parent) == found[number]:
            top = processes[top].parent
        members.setdefault(top, []).append(number)
    chosen = members if pid is None else {top: those for top, those in members.items() if is_of(processes, found, pid, top, those)}
    jobs = {found[top][2] for top in chosen}
    return [(found[top], members[top]) for top in sorted(members) if pid is None or top in chosen or found[top][2] in jobs][:MAX_RANKS]


def is_of(processes, found, pid, top, those):
    """Whether a process is of a rank, or started it."""
    above = [top]
    while above[-1] in processes and processes[above[-1]].parent > 1:
        above.append(processes[above[-1]].parent)
    return pid in those or pid in above


def clock(pid, tid):
    """(ticks of the processor, switches) of a thread."""
    fields = read("/proc/%d/task/%d/stat" % (pid, tid)).rpartition(b")")[2].split()
    ticks = int(fields[11]) + int(fields[12]) if len(fields) > 13 else 0
    return ticks, sum(int(each) for each in re.findall(rb"ctxt_switches:\s*(\d+)", read("/proc/%d/task/%d/status" % (pid, tid))))


def threads_of(pid):
    try:
        return sorted(int(name) for name in os.listdir("/proc/%d/task" % pid))[:MAX_THREADS]
    except OSError:
        return []


def memory(pid, address, size):
    try:
        with open("/proc/%d/mem" % pid, "rb") as file:
            file.seek(address)
            return file.read(size)
    except (OSError, ValueError, OverflowError):
        return b""


def string(pid, address):
    """A text of a process; it may end where its page ends."""
    left = 4096 - address % 4096
    return text((memory(pid, address, left + 4096) or memory(pid, address, left)).split(b"\0")[0])


def address_of(encoded):
    """``10.0.0.1:29500`` from ``0100000A:733C``; of IPv6 what is in brackets."""
    host, _, port = encoded.partition(":")
    words = [struct.pack("<I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8)]
    raw = b"".join(words)
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    shown = ".".join(map(str, raw)) if len(raw) == 4 else "[%s]" % ":".join("%x" % each for each in struct.unpack(">8H", raw))
    return "%s:%d" % (shown, int(port, 16))


def socket_of(pid, inode):
    for name in ("tcp", "tcp6"):
        for line in read("/proc/%d/net/%s" % (pid, name), 1 << 22).decode(errors="replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] == inode:
                unsent, unread = (int(each, 16) for each in fields[4].split(":"))
                state = TCP_STATES.get(fields[3], "closing")
                return {"peer": address_of(fields[2]), "local": address_of(fields[1]), "socket": state, "unsent": unsent, "unread": unread}
    return {}


def mount_of(pid, path):
    """The type and the source of the file system of a path, without touching it."""
    best, found = -1, {}
    for line in read("/proc/%d/mountinfo" % pid, 1 << 20).decode(errors="replace").splitlines():
        fields, _, kind = line.partition(" - ")
        place = fields.split()[4] if len(fields.split()) > 4 else "?"
        if len(place) > best and (path == place or path.startswith(place.rstrip("/") + "/")) and len(kind.split()) > 1:
            best, found = len(place), {"filesystem": text(kind.split()[0]), "source": text(kind.split()[1])}
    return found


def holder_of(pid, fd):
    """The process that holds the lock that one waits for, as /proc/locks says."""
    try:
        inode = os.stat("/proc/%d/fd/%d" % (pid, fd)).st_ino  # of a lock: its file is there
    except OSError:
        return None
    for line in read("/proc/locks").decode(errors="replace").splitlines():
        fields = line.split()
        if "->" not in fields and len(fields) > 5 and fields[5].endswith(":%d" % inode) and fields[4] not in (str(pid), "-1"):
            return int(fields[4])
    return None


def opened(pid, fd, lock=False):
    """What a file descriptor is."""
    target = link("/proc/%d/fd/%d" % (pid, fd))
    kind, _, inode = target.partition(":[")
    if kind == "socket":
        return dict(socket_of(pid, inode.rstrip("]")), target=target)
    found = {"target": target, "holder": holder_of(pid, fd)} if lock else {"target": target}
    return dict(found, **mount_of(pid, target)) if target.startswith("/") else found


def call_of(pid, tid):
    """The system call in which a thread is: its name, and what it waits for."""
    words = read("/proc/%d/task/%d/syscall" % (pid, tid)).split()
    if len(words) < 7 or not words[0].isdigit():
        return {}
    name, first = NUMBERS.get(int(words[0]), ("system call %s" % words[0].decode(), ""))
    values = [int(word, 16) for word in words[1:7]]
    found = {"call": name}
    if first == "fd":
        found.update(opened(pid, values[0], name in ("flock", "fcntl")))
    elif first in ("path", "at"):
        path = string(pid, values[first == "at"])
        path = path if path.startswith("/") else os.path.join(link("/proc/%d/cwd" % pid), path)
        found.update(mount_of(pid, path), target=path)
    elif first == "poll":
        entries = memory(pid, values[0], 8 * min(values[1], 16))
        fds = [struct.unpack_from("i", entries, at)[0] for at in range(0, len(entries) - 7, 8)]
        found.update(next((each for each in map(lambda fd: opened(pid, fd), fds) if each["target"]), {}))  # noqa: C417
    elif first == "epoll":
        fds = re.findall(rb"tfd:\s*(\d+)", read("/proc/%d/fdinfo/%d" % (pid, values[0])))
        those = [opened(pid, int(fd)) for fd in fds[:16]]
        found.update(max(those, key=lambda each: bool(each.get("peer")), default={}))
    return found


def stacks(spy, pid, until):
    """(thread -> frames, the innermost first, why there are none)"""
    why = "py-spy is not there for this machine"
    for how in (["--native"], ["--nonblocking"]) if spy else ():
        left = min(SPY_S, until - time.monotonic())
        if left <= 0.2:
            return {}, "there was no time left"
        try:
            done = subprocess.run(
                [spy, "dump", "--json", *how, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=left,
            )
        except subprocess.TimeoutExpired:
            why = "py-spy got no answer: the process does not let itself be stopped"
            continue
        try:
            threads = json.loads(done.stdout.decode(errors="replace"))
            return {
                int(each["os_thread_id"]): [
                    {"name": text(frame["name"]), "file": text(frame["filename"]), "line": int(frame["line"])}
                    for frame in each["frames"][:MAX_FRAMES]
                ]
                for each in threads
                if each.get("os_thread_id")
            }, ""
        except (ValueError, KeyError, TypeError):
            lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
            why = text(lines[-1] if lines else "py-spy printed nothing")
    return {}, why


def examined(process, spy, until):
    """One process: its threads, each with its stack, its system call and what it waits for."""
    pid = process.pid
    before, start = {tid: clock(pid, tid) for tid in threads_of(pid)}, time.monotonic()
    frames, why = stacks(spy, pid, until)
    time.sleep(max(0.0, min(SAMPLE_S - (time.monotonic() - start), until - time.monotonic())))
    passed, threads = max(time.monotonic() - start, 0.01), []
    for tid in threads_of(pid):
        place = "/proc/%d/task/%d/" % (pid, tid)
        fields, (ticks, switches) = read(place + "stat").rpartition(b")")[2].split(), clock(pid, tid)
        old = before.get(tid, (ticks, switches))
        kernel = [text(line.split(b"] ")[-1].split(b"+")[0]) for line in read(place + "stack").splitlines()[:8]]
        threads.append(
            dict(
                {
                    "tid": tid,
                    "name": text(read(place + "comm").strip()),
                    "state": fields[0].decode() if fields else "",
                    "busy": round((ticks - old[0]) / TICKS / passed, 3),
                    "switches": max(0, switches - old[1]),
                    "waits_in": text(read(place + "wchan").strip(b"\0 \n0")),
                    "kernel": kernel,
                    "frames": frames.get(tid, []),
                },
                **call_of(pid, tid),
            )
        )
    tracer = re.search(rb"^TracerPid:\s*(\d+)", read(process.place + "status"), re.MULTILINE)
    return {
        "pid": pid,
        "parent": process.parent,
        "command": process.words,
        "tracer": int(tracer.group(1)) if tracer else 0,
        "threads": threads,
        "no_stacks": why,
    }


def unpacked(spy, folder):
    """The path of py-spy, in a folder of our own."""
    path = os.path.join(folder, "py-spy")
    with open(path, "wb") as file:
        file.write(zlib.decompress(base64.b64decode(spy)))
    os.chmod(path, 0o700)
    return path


def document(order):
    until = time.monotonic() + order["seconds"]
    processes = table()
    chosen = ranks_of(processes, order["pid"])
    folder = tempfile.mkdtemp(prefix="provision-stall-")
    try:
        spy = unpacked(order["spy"], folder) if order["spy"] else None
        with ThreadPoolExecutor(PARALLEL) as pool:
            looks = [[pool.submit(examined, processes[pid], spy, until) for pid in pids[:MAX_PROCESSES]] for _known, pids in chosen]
        found = []
        for (known, pids), made in zip(chosen, looks):
            rank, ranks, job = known
            found.append({"rank": rank, "ranks": ranks, "job": job, "processes": [each.result() for each in made], "left": len(pids) - len(made)})
        return {"ranks": found, "uid": os.geteuid(), "there": order["pid"] is None or order["pid"] in processes}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    ordered = json.load(sys.stdin)
    signal.alarm(int(ordered["seconds"]) + 5)
    print("\n%s\n%s\n%s" % (BEGIN, json.dumps(document(ordered)), END))
