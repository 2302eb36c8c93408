"""Where the ranks of a job stand on this host, for `provision doctor --job`. It reads, judges nothing, and changes nothing in the job.

Python 3.6+, standard library only. The order is JSON on standard input: ``pids``, processes of jobs or their launchers, or null for every job
of this user; ``run``, the PROVISION_RUN_ID of the job, or null; ``spy``, the program py-spy for ``machine``, packed by zlib and base64, or
null; ``seconds``, the time that there is. It prints what `HostAnswer` of `doctor/stall/model.py` reads. A rank is what has a launcher's
variables in its environment.

Stacks are read by py-spy, without holding the process; only where Python's stack does not say what it does it is held, for milliseconds.
System calls and what another user's process has open need root. Local variables and command lines are never read.
"""

import base64
import io
import json
import os
import pickle
import platform
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import islice

from .shares import content, entries, groups_of, has_gpu, is_stopped, name_of, number_in, sockets_of, stat_of

BEGIN, END = "===PROVISION-STALL-BEGIN===", "===END==="
# (rank, ranks, ranks on this host, job): variables of launchers, the one that starts processes last first: mpirun within a job of Slurm
# starts the ranks.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    ("COLLECTIVE_RANK", "COLLECTIVE_SIZE", "COLLECTIVE_LOCAL_SIZE", ("COLLECTIVE_JOB", "PROVISION_RUN_ID")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("HYDI_CONTROL_FD",)),
    ("SLURM_PROCID", "SLURM_NTASKS", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
MAX_RANKS, MAX_PROCESSES, MAX_THREADS, MAX_FRAMES, LONGEST, MAX_DUMP = 256, 24, 48, 60, 300, 16 << 20
MAX_MOUNTS = 64
KERNEL_LOG = "/dev/kmsg"
PRESSURE, LOCAL_KINDS = 5, ("ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay")  # % of the time; file systems that answer
SPY_S, WATCH_S, PARALLEL = 5.0, 3.0, 4
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
# An event of the engine's recorder (csrc/base/recorder.h): state, process set, number, ..., bytes, kind, ..., name.
EVENT, HEAD_BYTES, RING, RUNNING, RECENT = struct.Struct("=IiQ32xQB7x72s"), 120, 8192, 1, 64
KINDS = ("allreduce", "allgather", "broadcast", "barrier", "alltoall", "reducescatter", "join")
# PyTorch's flight recorder: the pipe that has it written, and where, by its versions. Operations that are of one size on all ranks.
PIPE, FLIGHTS = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
SAME_SIZES, MAX_MEMORY, APART_S = re.compile("(all_?reduce|broadcast|reduce)$"), 4 << 30, 2
RAS = "localhost:28028"  # where NCCL's subsystem for queries listens, unless NCCL_RAS_ADDR says it
TICKS = os.sysconf("SC_CLK_TCK")
TCP_STATES = {"01": "established", "02": "connecting", "03": "accepting", "04": "closing", "08": "closed by the peer", "0A": "listening"}


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
        self.state, *fields = stat_of(pid)[:20] or [""] + [0] * 19
        numbers = [int(field) for field in fields]
        self.pid, self.parent, self.group, self.began = pid, numbers[0], numbers[1], numbers[18]
        self.is_interactive = numbers[3] != 0 and numbers[2] == pid  # it leads the session of a terminal
        variables = (entry.partition(b"=") for entry in content("/proc/%d/environ" % pid, 1 << 20).split(b"\0"))
        self.environ = {name.decode(errors="replace"): text(value) for name, _, value in variables}

    def rank(self):
        """(rank, ranks, job, how many ranks its launcher has started here), or None. The last is 0 where the launcher does not say it; it is
        all of them where they meet at this host's loopback."""
        for rank, ranks, local, job in LAUNCHERS:
            number, count, here = (self.environ.get(name, "") for name in (rank, ranks, local))
            if re.match("[0-9]{1,6}$", number) and re.match("[0-9]{1,6}$", count):
                meet_here = rank == "RANK" and re.match(r"(127\.|localhost$|::1$)", self.environ.get("MASTER_ADDR", ""))
                here = int(here) if re.match("[0-9]{1,6}$", here) else int(count) if meet_here else 0
                network = link("/proc/%d/ns/net" % self.pid) if here >= int(count) else ""  # containers' jobs may have the same port
                names = [rank] + [self.environ.get(name) for name in job] + [network if network != link("/proc/self/ns/net") else ""]
                return int(number), int(count), " ".join(filter(None, names))[:LONGEST], here
        return None


def table(user):
    """pid -> process, of all but ourselves; of one user where ``user`` is not 0."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return {pid: Process(pid) for pid in pids if not user or re.search(rb"\nUid:\s*%d\s" % user, content("/proc/%d/status" % pid))}


def line_of(processes, pid):
    """A process, its parent, and so on."""
    above = [pid]
    while above[-1] in processes and processes[above[-1]].parent not in above:  # a number that was used again could lead in a circle
        above.append(processes[above[-1]].parent)
    return above


def ranks_of(processes, pids, run):
    """[(what `Process.rank` says, its processes)]: a rank's first process is the one whose parent is not of that rank, or leads its group.

    What has started a rank of another job is a launcher or a shell, and so is what has started us, and rank.py of `provision run`, which names
    the rank in the environment of its program alone, with what is in its process group. One rank that has a terminal of its own is a shell
    (``srun --pty bash``): it counts, and so does what is started in it, only where it is named."""
    found = {number: known for number, known in ((number, each.rank()) for number, each in processes.items() if each.state != "Z") if known}
    lines = {number: line_of(processes, number) for number in found}
    shells = {number for number in found if pids is None and found[number][1] == 1 and processes[number].is_interactive}
    launchers = {number for number, line in lines.items() for each in shells.intersection(line) if found[each] == found[number]}
    above = os.getppid()
    while above > 1:
        launchers.add(above)
        above = Process(above).parent
    launchers.update(each for number, line in lines.items() for each in line if each in found and found[each][2] != found[number][2])
    of_run = {number for number in found if "PROVISION_RANK" in processes[number].environ}
    wrappers = {each for number in of_run for each in lines[number] if each in found} - of_run
    launchers.update(wrappers, (number for number in set(found) - of_run if processes[number].group in wrappers))
    members, jobs = {}, set()
    for number in sorted(set(found) - launchers):
        above = lines[number]
        top = next((each for each, parent in zip(above, above[1:]) if found.get(parent) != found[number] or parent in launchers), number)
        leader = processes[top].group
        top = leader if leader not in launchers and found.get(leader) == found[top] else top
        members.setdefault(top, []).append(number)
        is_run = run is None or processes[number].environ.get("PROVISION_RUN_ID") == run
        if is_run and (pids is None or set(pids) & set(above)):
            jobs.add(found[number][2])
    chosen = sorted((top, those) for top, those in members.items() if found[top][2] in jobs)
    return [(found[top], sorted(those, key=lambda pid: pid != top)) for top, those in chosen][:MAX_RANKS]


def clock(pid, tid):
    """(ticks of the processor, switches) of a thread."""
    place = "%d/task/%d" % (pid, tid)
    return sum(map(int, stat_of(place)[11:13])), number_in(content("/proc/%s/status" % place), rb"ctxt_switches:\s*(\d+)")


def threads_of(pid):
    return sorted(map(int, entries("/proc/%d/task" % pid, None)), key=lambda tid: (tid != pid, tid))[:MAX_THREADS]


def memory(pid, address, size):
    try:
        with open("/proc/%d/mem" % pid, "rb") as file:
            file.seek(address)
            return file.read(size)
    except (OSError, ValueError, OverflowError):
        return b""


def address_of(encoded):
    """``10.0.0.1:29500`` from ``0100000A:733C``; of IPv6 what is in brackets."""
    host, _, port = encoded.partition(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    shown = socket.inet_ntop(socket.AF_INET, raw) if len(raw) == 4 else "[%s]" % socket.inet_ntop(socket.AF_INET6, raw)
    return "%s:%d" % (shown.replace("::ffff:", ""), int(port, 16))


@lru_cache(maxsize=None)  # thousands of lines, of a few network namespaces
def connections(place):
    lines = (line.split() for name in ("tcp", "tcp6") for line in content(place + name, 1 << 22).decode(errors="replace").splitlines()[1:])
    return {fields[9]: fields for fields in lines if len(fields) > 9}


def recorded(pid):
    """(how many operations the engine of a process has begun, the one that runs: ``allreduce 'loss' of process set 1``), as its recorder
    says. Of several process sets' that of the first: the others may not be in all."""
    mapped = re.search(rb"^([0-9a-f]+)-\S+ r.* /memfd:collective_flight ", content("/proc/%d/maps" % pid, 8 << 20), re.MULTILINE)
    at = int(mapped.group(1), 16) if mapped else 0
    head = memory(pid, at, HEAD_BYTES) if mapped else b""
    if len(head) < HEAD_BYTES or head[:8] != b"ccfr0001":
        return 0, ""
    newest, found = struct.unpack_from("=Q", head, 40)[0], set()
    for number in range(max(1, newest + 1 - RECENT), newest + 1):
        event = memory(pid, at + HEAD_BYTES + (number - 1) % RING * EVENT.size, EVENT.size)
        state, process_set, _, _, kind, name = EVENT.unpack(event) if len(event) == EVENT.size else (0, 0, 0, 0, 0, b"")
        if state == RUNNING and kind < len(KINDS):
            of = " of process set %d" % process_set if process_set else ""
            found.add((process_set, "%s '%s'%s" % (KINDS[kind], name.split(b"\0")[0].decode(errors="replace"), of)))
    return newest, text(min(found)[1]) if found else ""


def opened_as(is_kind, pid, path, flags):
    """A descriptor of a file that a process names, as it sees it; OSError where it is of another kind, or another user's."""
    fd = os.open("/proc/%d/root%s" % (pid, path), flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not is_kind(os.fstat(fd).st_mode) or os.fstat(fd).st_uid != os.stat("/proc/%d" % pid).st_uid:
        os.close(fd)
        raise OSError(path)
    return fd


def request_flight(pid, variables, rank):
    """Have PyTorch write what its flight recorder knows of a rank: a thread of NCCL's process group looks at this pipe each second. Returns
    whether it is there."""
    try:
        with open(opened_as(stat.S_ISFIFO, pid, "%s%d.pipe" % (variables[PIPE], rank), os.O_WRONLY), "wb") as file:
            file.write(b"1")
        return True
    except (KeyError, OSError, ValueError):
        return False


class Plain(pickle.Unpickler):
    """Reads texts, numbers and their collections, of which PyTorch's consists; anything else could run a program."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(name)


def flight(pid, variables, rank, since):
    """The oldest collective operation that a rank has not ended, as PyTorch's recorder says: ``all_reduce #4711 of default_pg [1024]``. Empty
    where it has none that began before ``since`` (seconds since 1970), or was not written after that."""
    cache = variables.get("XDG_CACHE_HOME") or variables.get("HOME", "") + "/.cache"
    for stem in [variables.get(name) for name in FLIGHTS] + [cache + "/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]:
        try:
            with open(opened_as(stat.S_ISREG, pid, "%s%d" % (stem, rank), os.O_RDONLY), "rb") as file:
                if os.fstat(file.fileno()).st_mtime < since:
                    continue
                entries = Plain(io.BytesIO(file.read(MAX_DUMP))).load()["entries"]
            # Parts of what was sent together are never ended themselves; a send's peer says something else.
            ended = {each["process_group"]: number for number, each in enumerate(entries) if each["retired"]}
            waits = (each for number, each in enumerate(entries) if number > ended.get(each["process_group"], -1) and not each["is_p2p"])
            one = next(each for each in waits if each["time_created_ns"] < since * 1e9)
            name, group = one["profiling_name"].rpartition(":")[2], one["process_group"][1] or one["process_group"][0]
            sizes = " %s" % one["input_sizes"][0] if SAME_SIZES.match(name) else ""
            return text("%s #%d of %s%s" % (name, one["collective_seq_id"], group, sizes))
        except Exception:  # noqa: BLE001  it may be anything
            continue
    return ""


def apart(work, *arguments):
    """The text that ``work`` returns; "" where it takes longer than `APART_S`, or too much memory, as with files of others. In a process of its
    own, which is not waited for: it may wait for a file system."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:  # all of it: an error must not lead into what the other process does
            for number, limit in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CPU, APART_S), (resource.RLIMIT_CORE, 0)):
                hard = resource.getrlimit(number)[1]
                resource.setrlimit(number, (limit if hard < 0 else min(limit, hard), hard))
            os.write(writing, work(*arguments).encode())
        finally:
            os._exit(0)
    os.close(writing)
    said = os.read(reading, 1 << 16) if select.select([reading], [], [], APART_S)[0] else b""
    os.close(reading)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, os.WNOHANG)
    return said.decode(errors="replace")


def ras_of(pid, variables):
    """Where a rank's NCCL listens for queries; None where it does not, or in a network of its own."""
    port = re.search(r":(\d{1,5})$", variables.get("NCCL_RAS_ADDR", RAS))
    those = [connections("/proc/self/net/").get(inode) for inode in sockets_of(pid)]
    listening = (each[1] for each in those if each and each[3] == "0A")
    return next((address_of(each) for each in listening if port and int(each.partition(":")[2], 16) == int(port.group(1))), None)


def launched(address, ranks, pids):
    """JSON: rank -> the collective operation of NCCL that it has launched last, as ``AllReduce #4711 of 8 ranks``, where the ranks of a
    communicator have not launched as many. ``ranks``: of the job; ``pids``: the processes here, as NCCL has them -> rank. NCCL says it in JSON
    since 2.28.7."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), APART_S) as asked:
        asked.sendall(b"TIMEOUT 1\nSET FORMAT json\nSTATUS\n")
        said = b"".join(islice(iter(lambda: asked.recv(1 << 16), b""), MAX_DUMP >> 16))
    found = {}
    for each in sorted(json.loads(said[said.index(b"{") :].decode())["communicators"], key=lambda each: each["size"]):
        is_whole, counts = each["size"] == ranks, {}
        for one in each["ranks"]:
            rank = one["rank"] if is_whole else pids.get(one["pid"], -1)
            counts.setdefault(rank, []).append(one["collective_counts"])
        of = {name: {one["collective_counts"][name] for one in each["ranks"]} for name in each["ranks"][0]["collective_counts"]}
        name = max(of, key=lambda name: max(of[name]) - min(of[name]))
        those = {rank: said[0] for rank, said in counts.items() if rank in pids.values() and len(said) == 1 < len(of[name])}
        found.update((rank, "%s #%d of %d ranks" % (name, count[name], each["size"])) for rank, count in those.items())
    return json.dumps(found)


def connection(pid, inode):
    is_ours = link("/proc/%d/ns/net" % pid) == link("/proc/self/ns/net")
    return connections("/proc/%s/net/" % ("self" if is_ours else pid)).get(inode)


def socket_of(pid, inode):
    fields = connection(pid, inode)
    if fields is None:
        return {}
    peer, state, queued = address_of(fields[2]), TCP_STATES.get(fields[3], "closing"), [int(each, 16) for each in fields[4].split(":")]
    waits = "".join(", %d bytes not %s" % each for each in zip(queued, ("acknowledged", "read")) if each[0])
    return {"peer": peer, "socket": "%s to %s, %s%s" % (address_of(fields[1]), peer, state, waits)}


def unanswered(pid):
    """Connections of a process on which bytes were sent again, and are not acknowledged: the peer does not get them, or its answers are lost."""
    found = ((inode, connection(pid, inode)) for inode in sockets_of(pid))
    # Established; the timer to send again runs.
    lost = [inode for inode, each in found if each and each[3] == "01" and each[5].startswith("01:") and int(each[6], 16)]
    return sorted(socket_of(pid, inode)["socket"] for inode in lost)[:4]


def mounts_of(pid):
    """{place: (type, source, options)} of the file systems that a process sees; of several at one place the last one is seen."""
    lines = [line.partition(" - ") for line in content("/proc/%d/mountinfo" % pid, 1 << 20).decode(errors="replace").splitlines()]
    return {fields.split()[4]: (*kind.split()[:2], fields.split()[5].split(",")) for fields, _, kind in lines if len(kind.split()) > 1}


def is_in(path, place):
    return path == place or path.startswith(place.rstrip("/") + "/")


def on_mount(pid, path):
    """The path, with the type and the source of its file system, without touching it."""
    mounts = mounts_of(pid)
    those = [place for place in mounts if is_in(path, place)]
    return text(path + (" on %s %s" % mounts[max(those, key=len)][:2] if those else ""))


def full_disks(pid):
    """Local file systems of a process that nothing can be written to for want of space; one of a network might not answer."""
    mounts, found = mounts_of(pid), []
    # Container engines mount many overlays, each on a file system that is looked at itself, and kubelet many small ones in memory.
    kinds = {place: kind for place, (kind, _, options) in mounts.items() if "rw" in options and kind in LOCAL_KINDS}
    looked = (place for place, kind in kinds.items() if kind != "overlay" or place == "/")
    for place in sorted(looked, key=lambda place: kinds[place] == "tmpfs")[:MAX_MOUNTS]:
        if all(mounts[other][0] in LOCAL_KINDS for other in mounts if is_in(place, other)):
            try:
                left = os.statvfs("/proc/%d/root%s" % (pid, place))
            except OSError:
                continue
            if left.f_blocks and not left.f_bavail or left.f_files and not left.f_favail:
                found.append("%s (%s) is full" % (place, kinds[place]))
    return found


def short_of_memory(pid):
    """Whose processes wait for memory, as the kernel says of control groups (version 2) and of the host."""
    groups = [group + "/memory.pressure" for group in groups_of(pid) - {"/sys/fs/cgroup", "/sys/fs/cgroup/"}]
    for whose, paths in ("its control group", groups), ("its host", ["/proc/pressure/memory"]):
        waits = max((int(each) for path in paths for each in re.findall(rb"full avg10=(\d+)", content(path))), default=0)
        if waits >= PRESSURE:
            yield "all processes of %s wait for memory %d %% of the time" % (whose, waits)


def gpu_errors(pid):
    """What the kernel has said of NVIDIA's GPUs since a process began, the last first: Xid errors. Root's to read."""
    if not has_gpu(pid):
        return []
    try:
        with open(os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            said = b"".join(iter(lambda: file.read(8192) or b"", b""))  # one record each time
    except OSError:
        return []
    records = re.findall(rb"^\d+,\d+,(\d+),[^;]*;(NVRM: Xid.*)$", said, re.MULTILINE)
    return [error.decode(errors="replace") for at, error in records[::-1] if int(at) / 1e6 >= Process(pid).began / TICKS]


def holder_of(pid, fd):
    """The process that holds the lock that one waits for, as /proc/locks says."""
    inode = re.search(rb"^ino:\s*(\d+)", content("/proc/%d/fdinfo/%d" % (pid, fd)), re.MULTILINE)  # its file itself may not answer
    pattern = rb"^\d+: (?!->).* (\d+) \S+:%s " % (inode.group(1) if inode else b"none")
    return next((int(each) for each in re.findall(pattern, content("/proc/locks", 1 << 22), re.MULTILINE) if int(each) != pid), None)


def opened(pid, fd, lock=False):
    """What a file descriptor is."""
    target = link("/proc/%d/fd/%d" % (pid, fd))
    kind, _, inode = target.partition(":[")
    if kind == "socket":
        return dict(socket_of(pid, inode.rstrip("]")), target=target)
    return {"target": on_mount(pid, target) if target.startswith("/") else target, "holder": holder_of(pid, fd) if lock else None}


def first_of(pid, fds):
    """What says most of file descriptors that are polled: a socket that listens, one with a peer, anything."""
    those = [opened(pid, int(fd)) for fd in fds]
    return max(those, key=lambda each: (each.get("peer", "").endswith(":0"), bool(each.get("peer")), bool(each["target"])), default={})


def call_of(pid, tid):
    """The system call in which a thread is: its name, and what it waits for."""
    words = content("/proc/%d/task/%d/syscall" % (pid, tid)).split()
    if len(words) < 7 or not words[0].isdigit():
        return {}
    name, first = NUMBERS.get(int(words[0]), ("system call %s" % words[0].decode(), ""))
    values = [int(word, 16) for word in words[1:7]]
    found = {"call": name}
    if first == "fd":
        found.update(opened(pid, values[0], name in ("flock", "fcntl")))
    elif first in ("path", "at"):
        address = values[first == "at"]
        left = 4096 - address % 4096  # it may end where its page ends
        path = text((memory(pid, address, left + 4096) or memory(pid, address, left)).split(b"\0")[0])
        path = path if path.startswith("/") else os.path.join(link("/proc/%d/cwd" % pid), path)
        found["target"] = on_mount(pid, path)
    elif first == "poll":
        entries = memory(pid, values[0], 8 * min(values[1], 16))
        fds = [struct.unpack_from("i", entries, at)[0] for at in range(0, len(entries) - 7, 8)]
        found.update(first_of(pid, fds))
    elif first == "epoll":
        found.update(first_of(pid, re.findall(rb"tfd:\s*(\d+)", content("/proc/%d/fdinfo/%d" % (pid, values[0]), 1 << 16))[:64]))
    return found


def stacks(spy, pid, until, *ways):
    """(thread -> frames, the innermost first, why there are none)"""
    why = "py-spy is not there for this machine (%s)" % platform.machine()
    for way in ways if spy else ():
        if "--nonblocking" not in way and any(stat_of("%d/task/%d" % (pid, tid))[:1] == ["D"] for tid in threads_of(pid)):
            why = "a thread waits for a disk"  # it would be held until that answers
            continue
        left = min(SPY_S, until - time.monotonic())
        if left <= 0.2:
            return {}, "there was no time left"
        command, was_stopped = [spy, "dump", "--json", "--pid", str(pid)] + list(way), is_stopped(pid)
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=left)
            threads = json.loads(done.stdout.decode(errors="replace")) if len(done.stdout) < MAX_DUMP else None
            found = {int(each["os_thread_id"]): each["frames"][:MAX_FRAMES] for each in threads if each.get("os_thread_id")}
            keys = ("name", "name", text), ("file", "filename", text), ("line", "line", lambda line: min(max(0, int(line)), 1 << 31))
            return {tid: [{key: made(frame[name]) for key, name, made in keys} for frame in frames] for tid, frames in found.items()}, ""
        except subprocess.TimeoutExpired:
            why = "py-spy got no answer: the process does not let itself be stopped"
        except OSError as error:
            return {}, text("py-spy cannot be started: %s" % error.strerror)
        except (ValueError, KeyError, TypeError, AttributeError):
            lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
            why = text(lines[-1] if lines else "py-spy printed nothing that can be read")
            if any("ermission" in line or "not permitted" in line for line in lines):
                return {}, "ptrace is refused: it takes root (or, for your own processes, sysctl kernel.yama.ptrace_scope=0)"
        finally:
            if is_stopped(pid) and not was_stopped:  # an old py-spy stops a process by a signal, and was killed before it continued it
                with suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGCONT)
    return {}, why


def is_obscure(pid, frames):
    """Whether only the calls of native code can say what the main thread does: it computes or is at a lock, and not in PyTorch's operations."""
    number = (content("/proc/%d/syscall" % pid).split() or [b""])[0]
    computes_or_locks = number == b"running" or (number.isdigit() and NUMBERS.get(int(number), "?")[0] == "futex")
    return computes_or_locks and not any("/torch/distributed/" in frame["file"] for frame in frames.get(pid, ()))


def examined(pid, parent, before, frames, why, passed):
    """One process: its threads, each with its stack, its system call and what it waits for. ``before``: thread -> clock, ``passed`` seconds ago."""
    threads = []
    tracer = number_in(content("/proc/%d/status" % pid), rb"\nTracerPid:\s*(\d+)")
    tracer = 0 if name_of(tracer) == "py-spy" else tracer  # another examination's: it holds it for milliseconds
    for tid in threads_of(pid):
        place, (ticks, switches) = "%d/task/%d" % (pid, tid), clock(pid, tid)
        old = before.get(tid, (ticks, switches))
        thread = {"tid": tid, "name": text(content("/proc/%s/comm" % place).strip()), "state": "".join(stat_of(place)[:1])}
        thread["state"] = "S" if thread["state"] == "t" and not tracer else thread["state"]
        thread.update(busy=round(max(0, ticks - old[0]) / TICKS / passed, 3), switches=max(0, switches - old[1]), frames=frames.get(tid, []))
        thread["waits_in"] = text(content("/proc/%s/wchan" % place).strip(b"\0 \n0"))
        threads.append(dict(thread, **call_of(pid, tid)))
    found = {"pid": pid, "parent": parent, "tracer": tracer, "threads": threads, "no_stacks": why}
    lacks = [text(each) for each in [*gpu_errors(pid)[:1], *full_disks(pid), *short_of_memory(pid)]][:4]
    return dict(found, operations=recorded(pid)[1], unanswered=unanswered(pid), lacks=lacks)


def watched(processes, chosen, spy, until):
    """pid -> what was seen of it, of all processes of the ranks: first their stacks, then what moves in the seconds after that."""
    # The ranks' own processes before what they have started: there may be no time for all.
    tops = [members[0] for _known, members in chosen]
    pids = tops + [pid for _known, members in chosen for pid in members[1:MAX_PROCESSES]][:MAX_RANKS]
    with ThreadPoolExecutor(PARALLEL) as pool:
        # Without holding them: a process that is held may find its system call cut short.
        found = dict(zip(pids, pool.map(lambda pid: stacks(spy, pid, until - WATCH_S, ("--nonblocking",), ()), pids)))
        native = pool.map(lambda pid: stacks(spy, pid, until - WATCH_S, ("--native",)) if is_obscure(pid, found[pid][0]) else found[pid], pids)
        held = {pid: each if each[0] else (found[pid][0], each[1]) for pid, each in zip(pids, native)}
        start, before = time.monotonic(), {pid: {tid: clock(pid, tid) for tid in threads_of(pid)} for pid in pids}
        begun = {pid: recorded(pid)[0] for pid in tops}
        time.sleep(max(0.0, min(WATCH_S if pids else 0.0, until - start)))
        passed = max(time.monotonic() - start, 0.01)
        seen = {pid: examined(pid, processes[pid].parent, before[pid], held[pid][0], held[pid][1], passed) for pid in pids}
        again = pool.map(lambda pid: stacks(spy, pid, until, ("--nonblocking",))[0].get(pid), tops)
        for pid, frames in zip(tops, again):
            goes_on = bool(frames) and found[pid][0].get(pid, frames) != frames
            seen[pid]["moves"] = goes_on or recorded(pid)[0] != begun[pid]
    return seen


def counted(chosen, processes, until):
    """job -> what `launched` says of its ranks here, each asked through one that listens."""
    found = {}
    for (_rank, ranks, job, _local), members in chosen:
        address = ras_of(members[0], processes[members[0]].environ) if job not in found and time.monotonic() < until + APART_S else None
        if address:
            of_job = [(known[0], first) for known, (first, *_others) in chosen if known[2] == job]
            inside = {rank: re.findall(rb"\nNSpid:.*\s(\d+)\n", content("/proc/%d/status" % pid)) or [pid] for rank, pid in of_job}
            try:
                said = json.loads(apart(launched, address, ranks, {int(pids[0]): rank for rank, pids in inside.items()}))
                found[job] = {int(rank): text(operation) for rank, operation in said.items()}
            except ValueError:
                found[job] = {}  # no answer, or NCCL is older
    return found


def document(order):
    until = time.monotonic() + order["seconds"]
    booted = time.time() - float(content("/proc/uptime").split()[0])
    user = int(os.geteuid() or os.environ.get("SUDO_UID") or 0) if order["pids"] is None else 0
    processes, pids = table(user), order["pids"] or []
    chosen = ranks_of(processes, order["pids"], order["run"])
    folder = os.path.join(tempfile.gettempdir(), "provision-stall-" + os.urandom(8).hex())
    try:  # from before it is made: a signal may come at once
        os.mkdir(folder, 0o700)
        spy = shutil.which("py-spy")
        if order["spy"] and order["machine"] == platform.machine():
            spy = os.path.join(folder, "py-spy")
            with open(os.open(spy, os.O_WRONLY | os.O_CREAT, 0o700), "wb") as file:
                file.write(zlib.decompress(base64.b64decode(order["spy"])))
            spy = spy if os.access(spy, os.X_OK) else shutil.which("py-spy")  # a file system for temporary files may run no programs
        asked = time.time()
        recorders = {members[0] for known, members in chosen if request_flight(members[0], processes[members[0]].environ, known[0])}
        seen = watched(processes, chosen, spy, until)
        told = counted(chosen, processes, until)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = []
    for (rank, ranks, job, local), members in chosen:
        began = int(booted + processes[members[0]].began / TICKS)
        those = [seen[pid] for pid in members[:MAX_PROCESSES] if pid in seen and seen[pid]["threads"]]  # without one it has ended meanwhile
        if those and members[0] in recorders and not those[0]["operations"] and time.monotonic() < until + APART_S:  # each may take as long
            those[0]["operations"] = apart(flight, members[0], processes[members[0]].environ, rank, asked)
        if those and not those[0]["operations"]:
            those[0]["operations"] = told.get(job, {}).get(rank, "")
        found += [{"rank": rank, "ranks": ranks, "job": job, "local": local, "began": began, "processes": those}] if those else []
    missing = [pid for pid in pids if pid not in processes]
    return {"ranks": found, "missing": missing, "refused": [pid for pid in pids if not os.access("/proc/%d/environ" % pid, os.R_OK)]}


if __name__ == "__main__":
    ordered = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("it takes too long"))
    signal.alarm(int(ordered["seconds"]) + 15)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))  # after its folder is removed
    print("\n%s\n%s\n%s" % (BEGIN, json.dumps(document(ordered)), END))
