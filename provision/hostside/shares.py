"""Where the time of a job's ranks on this host goes, window by window, read from outside; it judges nothing. It travels with guard.py.

A rank is its main thread, which takes the steps; threads and processes for logs and checkpoints do not hold it up. The workers of its data
loader are seen, too. Python 3.6+, standard library only.
"""

import collections
import os
import re
import time

SHELLS = ("sh", "bash", "dash", "env", "uv", "numactl", "taskset")  # that a program may be started through
LOADER = b"multiprocessing"  # in the command line of a worker that was not forked; a forked one has its rank's
MAX_RANKS, MAX_WORKERS, MAX_THREADS, MAX_FILES = 64, 32, 200, 4096  # of a host, a rank and a process, that are looked at
MAX_SOCKETS = 1000  # of a host, from which on they are not: to list them takes too long
REST = 500  # times as long as a look at connections takes, until the next one: for each the kernel goes through a table for millions
CPU = "/sys/devices/system/cpu/cpu%s/cpufreq/"


def content(path, size=-1):
    """A file's first bytes; none where it may not be read, or is gone."""
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""


def number_in(text, pattern=rb"(\d+)"):
    """The sum of the numbers that a pattern finds."""
    return sum(map(int, re.findall(pattern, text)))


def stat_of(pid):
    """The fields of /proc/PID/stat from the state on; empty when the process is gone. The name before them may hold anything."""
    return content("/proc/%s/stat" % pid).decode(errors="replace").rpartition(")")[2].split()


def is_stopped(pid):
    return stat_of(pid)[:1] == ["T"]  # a debugger's are "t"


def started(pid):
    """When, in clock ticks since boot; 0 when the process is gone."""
    return int((stat_of(pid) or [0] * 20)[19])


def environment_of(pid, name="environ"):
    """The entries of a process's environment, or of its ``cmdline``; an empty one when it is gone or another user's."""
    return content("/proc/%d/%s" % (pid, name)).split(b"\0")


def name_of(pid):
    return content("/proc/%d/comm" % pid).decode(errors="replace").strip()


def entries(path, most):
    """The first names in a folder; none where it may not be read, or is gone."""
    try:
        return os.listdir(path)[:most]
    except OSError:
        return []


def threads_of(pid):
    return entries("/proc/%d/task" % pid, MAX_THREADS)


def groups_of(pid):
    """The folders of a process's control groups that may have a quota (versions 1 and 2), up to the root, which in a container may be its own."""
    found = set()
    for _, names, path in (line.split(":", 2) for line in content("/proc/%d/cgroup" % pid).decode(errors="replace").splitlines()):
        parts = (["cpu"] if names else []) + [part for part in path.split("/") if part]
        if not names or "cpu" in names.split(","):
            found.update("/sys/fs/cgroup/" + "/".join(parts[:depth]) for depth in range(bool(names), len(parts) + 1))
    return found


def opened_by(pid):
    """What a process's file descriptors lead to."""
    for name in entries("/proc/%d/fd" % pid, MAX_FILES):
        try:
            yield os.readlink("/proc/%d/fd/%s" % (pid, name))
        except OSError:
            continue


def sockets_of(pid):
    """The inodes of a process's sockets."""
    return {target[8:-1] for target in opened_by(pid) if target.startswith("socket:[")}


def has_gpu(pid):
    """Whether a process uses a GPU: its main thread then waits spinning, or does not wait at all."""
    return any(re.match(r"/dev/(nvidia\d|kfd)", target) for target in opened_by(pid))


def queues():
    """{inode: (data is not acknowledged, data is not read)} of the connections to other hosts; none where there are too many sockets."""
    found = {}
    if number_in(content("/proc/net/sockstat") + content("/proc/net/sockstat6"), rb"(?:\bTCP6?: inuse| tw) (\d+)") > MAX_SOCKETS:
        return found
    for line in (content("/proc/net/tcp") + content("/proc/net/tcp6")).decode().splitlines():
        _, local, other, state, queued, _, _, _, _, inode = line.split()[:10]
        if state == "01" and local.split(":")[0] != other.split(":")[0]:
            found[inode] = [int(size, 16) > 0 for size in queued.split(":")]
    return found


class Shares:
    """The shares of a window, which is from one `windows` to the next; `glance` is called several times in between."""

    def __init__(self):
        self.last, self.glances, self.seen = time.monotonic(), 0, collections.Counter()
        self.ranks = {}  # rank -> (its main process, [workers of its data loader])
        self.sockets, self.looks, self.rests_until = set(), [[False] * 2], 0.0  # inodes; (unsent, unread) at each look at them, first that of the last window
        self.known, self.now = {}, {}  # numbers that grow, at the last window and at this one

    def glance(self):
        """Which processes are in the kernel for a disk now, and whether data of the ranks is under way to other hosts, or waits to be read."""
        self.glances += 1
        self.seen.update(pid for main, workers in self.ranks.values() for pid in (main, *workers) if stat_of(pid)[:1] == ["D"])
        now = time.monotonic()
        if self.sockets and now >= self.rests_until:
            found = queues()
            of_ranks = [found[inode] for inode in self.sockets if inode in found]  # of a job on one host none
            self.looks.append([any(column) for column in zip(*of_ranks)] or [False] * 2)
            self.rests_until = now + (REST if of_ranks else 3 * REST) * (time.monotonic() - now)

    def windows(self, found):
        """What `Window` of `launch/stragglers.py` reads, for each rank that was there at the last call. ``found``: the processes of ranks."""
        before, passed = self.ranks, max(time.monotonic() - self.last, 0.01)
        self.last, self.now, self.ranks, self.sockets = time.monotonic(), {}, ranks_of(found), set()
        network = {name: sum(said) / len(said) for name, said in zip(("unsent", "unread"), zip(*self.looks[1:] or self.looks))}
        sent, resent = (self._growth(at, number_in(content("/proc/net/snmp"), rb"\nTcp:(?: \S+){%d} (\d+)" % at)) for at in (10, 11))
        said = []
        for rank, (main, workers) in self.ranks.items():
            sockets = sockets_of(main)
            self.sockets |= sockets
            signs = dict(network, resent=resent / max(sent, 1), throttled=max(map(self._held, groups_of(main)), default=0))
            signs["cpu"], signs["ready"], signs["disk"] = self._stage(main, passed)
            # A loader is at its limit where all of its workers are.
            loader = min((self._stage(pid, passed) for pid in workers), key=sum, default=(0, 0, 0))
            signs["loader_cpu"], signs["loader_ready"], signs["loader_disk"] = loader
            core = CPU % (stat_of(main) or [0] * 37)[36]
            signs["clock"] = number_in(content(core + "scaling_cur_freq")) / max(number_in(content(core + "cpuinfo_max_freq")), 1)
            signs["gpu"] = float(has_gpu(main))
            if before.get(rank, (0, []))[0] == main and sockets:  # else it steps together with no other
                said.append({"rank": rank, "signs": {name: round(value, 3) for name, value in signs.items()}})
        self.known, self.glances, self.seen, self.looks = self.now, 0, collections.Counter(), self.looks[-1:]
        return said

    def _growth(self, what, number):
        self.now[what] = number
        return max(0, number - self.known.get(what, number))

    def _held(self, group):
        """The share of its periods in which a quota has held a control group."""
        text = content(group + "/cpu.stat")
        held, periods = (self._growth((group, name), number_in(text, name + rb" (\d+)")) for name in (b"nr_throttled", b"nr_periods"))
        return held / max(periods, 1)

    def _stage(self, pid, passed):
        """The shares of a process's main thread: on a core, waiting for one, at a disk."""
        fields = [int(field) for field in content("/proc/%d/task/%d/schedstat" % (pid, pid)).split()[:2]] or [0, 0]
        cpu, ready = (self._growth((pid, at), field) / passed / 1e9 for at, field in enumerate(fields))
        return cpu, ready, self.seen[pid] / max(self.glances, 1)


def ranks_of(found):
    """rank -> (its main process, [workers of its data loader]). Parameter servers are left out: they wait for their clients."""
    processes, ranks = collections.defaultdict(list), {}
    for pid in sorted(found, key=started):
        variables = dict(entry.partition(b"=")[::2] for entry in environment_of(pid))
        rank = variables.get(b"PROVISION_RANK", b"")
        if rank.isdigit() and len(rank) < 7 and variables.get(b"COLLECTIVE_SERVERS", b"0") == b"0" and name_of(pid) not in SHELLS:
            processes[int(rank)].append((pid, environment_of(pid, "cmdline")))
    for rank, ((main, line), *others) in sorted(processes.items())[:MAX_RANKS]:
        ranks[rank] = main, [pid for pid, words in others if words == line or LOADER in b" ".join(words)][:MAX_WORKERS]
    return ranks
