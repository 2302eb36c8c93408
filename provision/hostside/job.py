"""Runs one job on the first host for a controller that has the other end of standard input. Python 3.6+, standard library only.

The first line of standard input is JSON (`launch.jobs.Job`), so nothing of it shows in a process list; then comes a line every few seconds.
``:{inherited}`` at the end of a variable stands for the value that it has already; the variables ``free_ports`` get free ports. The job has
a private folder on every host, which is removed when the job ends; on the first host, a file of it that begins with ``#!`` can be executed.
A guard (guard.py) on every host, this one too, makes and removes the folder, reports stopped processes, and ends the job there when it does not hear from us.

Unless ``shared`` is null, the guards claim the hosts. When all are there, a line is ``mark`` and ``{"begun": true}``. Where it is false and
another job has a host, the job is over, with the verdict ``busy``; with ``wait``, a line is ``mark`` and ``{"waiting": verdict}``, and it is
tried again and again. A line is ``mark`` and ``{"started": ranks}`` where more of them have been started than was known.

With ``sample`` seconds the guards say for how long no rank of their host goes on. Where that is so of all hosts, for ``sample`` seconds or
more, a line is ``mark`` and ``{"quiet": seconds}``, and one when that is over. Where standard input says ``restart``, they kill all ranks,
and the launcher starts them again.

The job is ended (TERM, a grace, KILL) when standard input closes or is silent, because the controller died, was interrupted or is cut
off; and when a host is lost, or a process of the launcher or a rank is stopped, for too long. The last line is ``mark`` and JSON:
``{"code": …, "verdict": …, "report": …, "ended": […]}``; a verdict is ``{"kind": …, "host": address, …}``, or null where nothing went
wrong; ``ended`` are, of a job that failed, the ranks that have ended, in that order.
"""

import json
import os
import random
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time

GRACE_S = 3.0  # mpirun needs a moment to end its daemons on the other hosts
BEAT_S = 5.0
TICK_S = 0.2
SILENT_S = 45.0  # after which a host is lost, and a stopped process does not continue
CONTROLLER_SILENT_S = 60.0
AFTERMATH_S = 0.5
END_S = 8.0  # for a guard to clean up
WAIT_S = 5.0  # until a busy host is asked again, and up to twice as long: others wait, too
PLACE = "/tmp"
MAX_PRINTED = 5  # lines
LONGEST_PRINTED = 500
LONGEST_LINE = 1 << 20  # of a guard; longer ones are dropped
GUARD = (
    "import os, json; line = b''\n"
    "while not line.endswith(b'\\n'):\n"
    "    byte = os.read(0, 1)\n"
    "    if not byte: os._exit(1)\n"
    "    line += byte\n"
    "exec(compile(json.loads(line.decode()), 'guard.py', 'exec'))"
)


def number(value, above=-1, kinds=(int,)):
    """The value, where it is such a number as a guard sends."""
    if type(value) not in kinds or not above < value < 1e9:
        raise ValueError(value)
    return value


def text(value):
    """The value as text that any reader of JSON accepts."""
    return str(value).encode(errors="replace").decode()


class Guard:
    """The guard of one host, as this end sees it; ``command`` starts it there."""

    def __init__(self, host, command, order, beat=BEAT_S):
        self.host = host
        self.beat = beat  # seconds between two of its reports
        self.is_ready = False
        self.is_over = False
        self.silent = 0.0  # seconds
        self.refusal = None  # why its host cannot take part
        self.is_busy = False  # that is because of other jobs
        self.printed = []  # what is not a message: of ssh, or of the host's shell
        self.stopped = {}  # pid -> (seconds, rank, name)
        self.ended = []  # (when, rank, code, whether its launcher's process had died before it)
        self.started = None  # ranks, once it has said so
        self.quiet = None  # seconds for which no rank of its host goes on; None without ranks
        self.ranks = []  # where the time of its ranks has gone; none once it is said
        self.killed = []  # ranks that had not ended by themselves when the job was over
        self.has_orphans = False  # that is so of one of its ranks
        self._rest = b""
        # In a session of its own: a signal for us must not end it before it has cleaned up.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, bufsize=0
        )
        self.tell(*order)

    def tell(self, *lines):
        try:
            self.process.stdin.write("".join(line + "\n" for line in lines).encode())
        except (OSError, ValueError):
            pass  # it has ended, which its output shows, or was left to itself

    def read(self):
        """Take in what it prints; False at its end."""
        data = os.read(self.process.stdout.fileno(), 65536)
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop() if data and len(parts[-1]) < LONGEST_LINE else b""
        for line in (part.decode(errors="replace").strip() for part in parts):
            try:
                ((kind, about),) = json.loads(line).items()
                self._take(kind, about)
                self.silent = 0.0
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):  # not a message of a guard
                self.printed = [*self.printed, line[:LONGEST_PRINTED]][-MAX_PRINTED:] if line else self.printed
        self.is_over = not data
        return bool(data)

    def _take(self, kind, about):
        if kind in ("error", "busy"):
            self.refusal, self.is_busy = text(about)[:LONGEST_PRINTED], kind == "busy"
        elif kind == "stopped":
            known = {pid: seconds for pid, (seconds, _, _) in self.stopped.items()}
            self.stopped = {
                number(one["pid"]): (
                    known.get(one["pid"], -self.beat) + self.beat,
                    None if one["rank"] is None else number(one["rank"]),
                    text(one["name"]),
                )
                for one in about
            }
        elif kind == "ended":
            now = time.monotonic()
            self.ended = [
                (now - number(one["ago"], -1e9, (int, float)), number(one["rank"]), number(one["code"], -1e9), bool(one["orphaned"]))
                for one in about
            ]
        elif kind == "killed":
            self.killed = [number(rank) for rank in about]
        elif kind == "started":
            self.started = number(about)
        elif kind == "quiet":
            self.quiet = None if about is None else number(about, kinds=(int, float))
        elif kind == "ranks":
            kinds = (int, float)
            self.ranks = [
                {"rank": number(one["rank"]), "signs": {text(name): number(value, -1, kinds) for name, value in one["signs"].items()}}
                for one in about
            ]
        elif kind == "orphaned":
            self.has_orphans = True
        elif kind != "ready":
            raise ValueError(kind)
        self.is_ready = self.is_ready or kind == "ready"

    def fault(self):
        """What is wrong with its host, or with a process there; None if nothing is."""
        if self.is_over and self.refusal is not None:
            return {"kind": "busy" if self.is_busy else "refused", "host": self.host, "output": [self.refusal]}
        if self.is_over:
            return {"kind": "lost" if self.is_ready else "unreachable", "host": self.host, "output": self.printed}
        if self.silent > SILENT_S:
            return {"kind": "silent", "host": self.host, "seconds": SILENT_S, "output": self.printed}
        for pid, (seconds, rank, name) in self.stopped.items():
            if seconds >= SILENT_S:
                return {"kind": "stopped", "host": self.host, "seconds": SILENT_S, "pid": pid, "rank": rank, "name": name}
        return None


class Watch:
    """Listens to standard input and the guards, and tells the guards that we are there.

    ``verdict``: the first fault; ``is_unwanted``: the controller has closed our standard input, or a signal asks for the end.
    """

    def __init__(self, mark="", sample=0.0):
        self.guards = []
        self._mark, self._sample, self._said, self._started = mark, sample, 0.0, 0
        self.verdict = None
        self.is_unwanted = False
        self._controller_silent, self._rest = 0.0, b""
        self._since_beat = 0.0
        self._last = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def add(self, guard):
        self.guards.append(guard)
        self._selector.register(guard.process.stdout, selectors.EVENT_READ, guard)

    def continues(self):
        return self.verdict is None and not self.is_unwanted

    def wait_for(self, is_done, seconds=float("inf")):
        """Until that is so, the time is over, or the job must end."""
        deadline = time.monotonic() + seconds
        while self.continues() and not is_done() and time.monotonic() < deadline:
            self._tick()
            faults = [fault for fault in (guard.fault() for guard in self.guards) if fault]
            if self._controller_silent > CONTROLLER_SILENT_S:
                faults.append({"kind": "controller", "host": "", "seconds": CONTROLLER_SILENT_S})
            self.verdict = faults[0] if faults else None

    def _tick(self):
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._controller_silent = 0.0
                data = os.read(0, 4096)
                if not data:
                    self.is_unwanted = True
                    self._selector.unregister(0)
                *lines, self._rest = (self._rest + data).split(b"\n")
                for guard in self.guards if b"restart" in lines else ():
                    guard.tell("restart")
            elif not key.data.read():
                self._selector.unregister(key.fileobj)
            if key.data is not None and key.data.ranks:
                say(self._mark, {"host": key.data.host, "ranks": key.data.ranks})
                key.data.ranks = []
        started = sum(guard.started or 0 for guard in self.guards)
        if started > self._started and all(guard.started is not None for guard in self.guards):
            say(self._mark, {"started": started})
            self._started = started
        known = [guard.quiet for guard in self.guards if guard.quiet is not None]
        quiet = min(known) if known else self._said
        if not self._said <= quiet < self._said + max(self._sample, TICK_S) / 2:
            if max(quiet, self._said) >= self._sample:
                say(self._mark, {"quiet": quiet})
            self._said = quiet
        # A step is short even if the clock jumps: who was stopped or asleep has not listened meanwhile.
        now = time.monotonic()
        step = min(now - self._last, 1.0)
        self._last = now
        self._controller_silent += step
        self._since_beat += step
        for guard in self.guards:
            guard.silent += step
        if self._since_beat >= BEAT_S:
            self._since_beat = 0.0
            for guard in self.guards:
                guard.tell("")

    def end(self, guards):
        """Have them end the job on their hosts; one that does not answer ends it when it hears nothing any more."""
        for guard in guards:
            guard.tell("end")
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and not all(guard.is_over or guard.silent > SILENT_S for guard in guards):
            self._tick()
        for guard in guards:
            guard.process.stdin.close()
            if not guard.is_over:
                guard.process.kill()
            guard.process.wait()

    def first_failure(self):
        """The rank that failed before all others, or the host whose launcher's process was lost."""
        failures = [(when, guard.host, *rest) for guard in self.guards for when, *rest in guard.ended if rest[1] != 0]
        _, host, rank, code, is_orphan = min(failures) if failures else (0.0, None, None, None, True)
        orphaned = [guard.host for guard in self.guards if guard.has_orphans]
        # A launcher that loses a host ends the others' ranks by SIGTERM, which may be faster than the end of the lost ones.
        if orphaned and (is_orphan or code == -signal.SIGTERM):
            return {"kind": "orphaned", "host": host if host in orphaned else orphaned[0]}
        return {"kind": "ended", "host": host, "rank": rank, "code": code} if failures else None

    def ends(self):
        """How the ranks have ended, the first of them first; also with 0, which others may have waited for."""
        ended = sorted((when, rank, code, guard.host) for guard in self.guards for when, rank, code, _ in guard.ended)
        ended += [(float("inf"), rank, -signal.SIGKILL, guard.host) for guard in self.guards for rank in guard.killed]
        return [{"rank": rank, "host": host, "code": code} for _, rank, code, host in ended]


def end(job):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(job.pid, number)
            job.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        except OSError:
            return


def start_guards(order, folder, fill, watch):
    """Start a guard on every host and wait for them."""
    program = {"program.json": json.dumps(fill(order["program"])), "rank.py": order["scripts"]["rank"]}
    names = ["", *order["hosts"]]

    def lines(host):
        place = {"host": names.index(host), "hosts": len(names), "tuned": order["tuned"].get(host, {})}
        files = dict(program, **{"place.json": json.dumps(place)})
        guarded = {"folder": folder, "files": files, "sample": order["sample"], "shared": order["shared"]}
        return [json.dumps(order["scripts"]["guard"]), json.dumps(guarded)]

    mark = "PROVISION_RUN_ID=" + os.environ.get("PROVISION_RUN_ID", "")
    there = " ".join(map(shlex.quote, ["env", mark, order["python"], "-c", GUARD]))  # our interpreter need not be theirs
    others = [(host, [*fill(order["ssh"]), "--", host, there]) for host in order["hosts"]]
    # Ours first: another host that is this machine, too, is refused then, and not the one that would end us with the job.
    for some in ([("", [sys.executable, "-c", GUARD])], others):
        for host, command in some if watch.continues() else ():
            watch.add(Guard(host, command, lines(host), order["sample"] or BEAT_S))
        watch.wait_for(lambda: all(guard.is_ready for guard in watch.guards))


def say(mark, about):
    sys.stdout.write("%s%s\n" % (mark, json.dumps(about)))
    sys.stdout.flush()


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def start_job(order, folder, fill):
    for name, text in order["files"].items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
        if text.startswith("#!"):
            os.chmod(os.path.join(folder, name), 0o700)
    environment = dict(os.environ, **order["environment"])
    for name, value in order["environment"].items():
        if value.endswith(":{inherited}"):
            environment[name] = value.replace("{inherited}", os.environ.get(name, "")).rstrip(":")
    environment.update((name, free_port()) for name in order["free_ports"])
    shared, run_id = "/dev/shm/" + os.path.basename(folder), os.environ.get("PROVISION_RUN_ID", "")
    argv = [word.replace("{shm}", shared).replace("{run}", run_id) for word in fill(order["argv"])]
    return subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def run(order, watch):
    """(code, report) of the job."""
    # The same on all hosts, so not of this one's TMPDIR where there is a choice.
    place = PLACE if os.access(PLACE, os.W_OK | os.X_OK) else tempfile.gettempdir()
    folder = os.path.join(place, "provision-job-" + secrets.token_hex(8))

    def fill(words):
        return [word.replace("{job}", folder).replace("{home}", os.path.expanduser("~")) for word in words]

    code, report = 1, None
    try:
        start_guards(order, folder, fill, watch)
        if watch.continues():
            say(order["mark"], {"begun": True})
            job = start_job(order, folder, fill)
            watch.wait_for(lambda: job.poll() is not None)
            if job.poll() and order["hosts"]:  # a launcher ends because of a host that dies, and faster than we see it
                watch.wait_for(lambda: False, AFTERMATH_S)
            if job.poll() is None:
                end(job)
            else:
                code = job.returncode if job.returncode >= 0 else 128 - job.returncode  # as a shell has it
                if watch.continues() and job.returncode < 0:
                    watch.verdict = {"kind": "launcher", "host": "", "code": job.returncode}
            path = os.path.join(folder, order["report"] or "")
            if order["report"] and os.path.exists(path):
                with open(path) as file:
                    report = json.load(file)
    finally:
        watch.end(watch.guards[1:])  # the first one would end our connections to them
        watch.end(watch.guards[:1])
    if code and watch.continues():
        watch.verdict = watch.first_failure()
    return code, report


def main():
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    order = json.loads(line.decode())
    watch = Watch(order["mark"], order["sample"])

    def stop(*_):
        watch.is_unwanted = True

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    code, report = run(order, watch)
    said = None
    while order["wait"] and watch.verdict and watch.verdict["kind"] == "busy":
        if said != watch.verdict:
            said = watch.verdict
            say(order["mark"], {"waiting": said})
        watch = Watch(order["mark"], order["sample"])
        watch.wait_for(lambda: False, WAIT_S * random.uniform(1, 2))
        if watch.continues():
            code, report = run(order, watch)
    say(order["mark"], {"code": code, "verdict": watch.verdict, "report": report, "ended": watch.ends() if code else []})
    return code


if __name__ == "__main__":
    sys.exit(main())
