"""Runs one job on the first host for a controller that holds the other end of standard input. Python 3.6+, standard library only.

The first line of standard input is JSON (`remote.ssh.Job`), so nothing of it shows in a process list; then comes a line every few seconds.
``:{inherited}`` at the end of a variable stands for what it holds already. The job has a private folder on every host that goes when it
ends; on the first one a file of its that begins with ``#!`` can be run. A guard (guard.py) on every host, this one too, makes and removes
the folder, says which processes are stopped, and ends the job there when it does not hear of us.

The job is ended (TERM, a grace, KILL) when standard input closes or is silent, because the controller died, was interrupted or is cut
off; and when a host is lost, or a process of the launcher or a rank is stopped, for too long. The last line is ``mark`` and JSON:
``{"code": …, "verdict": …, "report": …}``; a verdict is ``{"kind": …, "host": address, …}``, or null where nothing went wrong.
"""

import json
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time

GRACE_S = 3.0  # mpirun needs a moment to end its daemons on the other hosts
BEAT_S = 5.0
TICK_S = 0.2
SILENT_S = 45.0  # for a host to be lost, and for a process to be stopped for good
CONTROLLER_SILENT_S = 60.0
AFTERMATH_S = 0.5
END_S = 8.0  # for a guard to put everything away
PLACE = "/tmp"
MOST_SAID = 5  # lines
LONGEST_SAID = 500
LONGEST_LINE = 1 << 20  # of a guard; what a host says without an end is dropped
GUARD = (
    "import os, json; line = b''\n"
    "while not line.endswith(b'\\n'):\n"
    "    byte = os.read(0, 1)\n"
    "    if not byte: os._exit(1)\n"
    "    line += byte\n"
    "exec(compile(json.loads(line.decode()), 'guard.py', 'exec'))"
)


def understood(line):
    """(kind, what it is about) of a guard's message; (None, None) of whatever else a host may say."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(message, dict) or len(message) != 1:
        return None, None
    ((kind, about),) = message.items()
    is_known = (
        (kind in ("ready", "orphaned") and about is True)
        or (kind == "error" and isinstance(about, str))
        or (kind == "stopped" and are_all(about, pid=is_whole, rank=lambda rank: rank is None or is_whole(rank), name=is_text))
        or (kind == "ended" and are_all(about, rank=is_whole, code=is_whole, ago=is_number, orphaned=is_flag))
    )
    return (kind, about) if is_known else (None, None)


def are_all(things, **checks):
    """Whether it is a list of objects that hold this."""
    return isinstance(things, list) and all(
        isinstance(one, dict) and {*one} >= {*checks} and all(check(one[name]) for name, check in checks.items()) for one in things
    )


def is_flag(thing):
    return isinstance(thing, bool)


def is_text(thing):
    return isinstance(thing, str)


def is_number(thing):
    return isinstance(thing, (int, float)) and abs(thing) < 1e9


def is_whole(thing):
    return isinstance(thing, int) and is_number(thing)


class Guard:
    """That of one host; ``way``: the words that lead there."""

    def __init__(self, host, way, order):
        self.host = host
        self.is_ready = False
        self.is_over = False
        self.silent = 0.0
        self.is_refusing = False  # it has said why its host cannot take part
        self.said = []  # that, and what is no message: of ssh, or of the host's shell
        self.stopped = {}  # pid -> (seconds, what is known of it)
        self.ended = []  # (when, rank, code, whether the launcher's process there was dead by then)
        self.is_orphaned = False  # that was so of one of its ranks, or of one that went on
        self._rest = b""
        # In a session of its own: a signal for us must not end it before it has put everything away.
        self.process = subprocess.Popen(
            way, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, bufsize=0
        )
        self.tell(*order)

    def tell(self, *lines):
        try:
            self.process.stdin.write("".join(line + "\n" for line in lines).encode())
        except (OSError, ValueError):
            pass  # it has ended, which is seen by its output, or was left to itself

    def read(self):
        """Takes in what it says; whether it still may say something."""
        data = os.read(self.process.stdout.fileno(), 65536)
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop() if data and len(parts[-1]) < LONGEST_LINE else b""
        for line in parts:
            self._take(line.decode(errors="replace").rstrip("\r"))
        self.is_over = not data
        return bool(data)

    def _take(self, line):
        kind, about = understood(line)
        if kind is None:
            if line.strip():
                self.said = [*self.said, line[:LONGEST_SAID]][-MOST_SAID:]
            return
        self.silent = 0.0
        if kind == "error":
            self.is_refusing = True
            self.said = [*self.said, about[:LONGEST_SAID]][-MOST_SAID:]
            return
        self.is_ready = True
        if kind == "stopped":
            before = self.stopped
            self.stopped = {one["pid"]: (before.get(one["pid"], (-BEAT_S,))[0] + BEAT_S, one) for one in about}
        elif kind == "orphaned":
            self.is_orphaned = True
        elif kind == "ended":
            self.ended = [(time.monotonic() - one["ago"], one["rank"], one["code"], one["orphaned"]) for one in about]

    def fault(self):
        """What is wrong with its host, or with a process there; None if nothing is."""
        if self.is_over:
            kind = "lost" if self.is_ready else "refused" if self.is_refusing else "unreachable"
            return {"kind": kind, "host": self.host, "said": self.said[-1:] if kind == "refused" else self.said}
        if self.silent > SILENT_S:
            return {"kind": "silent", "host": self.host, "seconds": SILENT_S, "said": self.said}
        for seconds, one in self.stopped.values():
            if seconds >= SILENT_S:
                about = {name: one[name] for name in ("pid", "rank", "name")}
                return dict(about, kind="stopped", host=self.host, seconds=SILENT_S)
        return None


class Watch:
    """Standard input and the guards: takes in what they say, and tells the guards that we are there."""

    def __init__(self):
        self.guards = []
        self.is_unwanted = False  # the controller has closed our standard input, or a signal wants an end
        self._controller_silent = 0.0
        self._last = time.monotonic()
        self._since_beat = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def add(self, guard):
        self.guards.append(guard)
        self._selector.register(guard.process.stdout, selectors.EVENT_READ, guard)

    def tick(self):
        """Waits for a moment; the first fault that is seen, or None."""
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._controller_silent = 0.0
                if not os.read(0, 4096):
                    self.is_unwanted = True
                    self._selector.unregister(0)
            elif not key.data.read():
                self._selector.unregister(key.fileobj)
        # A step is short, whatever the clock says: who was stopped or asleep has not listened meanwhile.
        now = time.monotonic()
        step = min(now - self._last, 1.0)
        self._last = now
        self._since_beat += step
        self._controller_silent += step
        is_beat = self._since_beat >= BEAT_S
        self._since_beat = 0.0 if is_beat else self._since_beat
        for guard in self.guards:
            guard.silent += step
            if is_beat and not guard.is_over:
                guard.tell("")
        return next(filter(None, (guard.fault() for guard in self.guards)), None) or self._controllers_fault()

    def _controllers_fault(self):
        if self._controller_silent > CONTROLLER_SILENT_S:
            return {"kind": "controller", "host": "", "seconds": CONTROLLER_SILENT_S}
        return None

    def end(self, guards):
        """Has them end the job on their hosts; who does not answer is left to itself, and ends it when it hears nothing any more."""
        for guard in guards:
            guard.tell("end")
        until = time.monotonic() + END_S
        while time.monotonic() < until and not all(guard.is_over or guard.silent > SILENT_S for guard in guards):
            self.tick()
        for guard in guards:
            guard.process.stdin.close()
            if not guard.is_over:
                guard.process.kill()
            guard.process.wait()


def end(job):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(job.pid, number)
        except OSError:
            return
        try:
            job.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def exit_code(job):
    """As a shell has it."""
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


def first_failure(guards):
    """The rank that ended badly before all others, or the host whose ranks were lost to the launcher."""
    failures = [(when, guard.host, rank, code, orphaned) for guard in guards for when, rank, code, orphaned in guard.ended if code != 0]
    _, host, rank, code, is_orphan = min(failures) if failures else (0.0, None, None, None, True)
    hosts = [guard.host for guard in guards if guard.is_orphaned]
    # A launcher that loses a host ends the others' ranks by SIGTERM, and may be faster with it than the lost ones are in ending.
    if hosts and (is_orphan or code == -signal.SIGTERM):
        return {"kind": "orphaned", "host": host if host in hosts else hosts[0]}
    return {"kind": "ended", "host": host, "rank": rank, "code": code} if failures else None


def prepare(order, folder):
    """(argv, program, ssh, environment) with what stands for something put in."""
    shared, home, run_id = "/dev/shm/" + os.path.basename(folder), os.path.expanduser("~"), os.environ.get("PROVISION_RUN_ID", "")

    def filled(words):
        return [word.replace("{job}", folder).replace("{home}", home) for word in words]

    argv = [word.replace("{shm}", shared).replace("{run}", run_id) for word in filled(order["argv"])]

    environment = dict(os.environ, **order["environment"])
    for name, value in order["environment"].items():
        if value.endswith(":{inherited}"):
            environment[name] = value.replace("{inherited}", os.environ.get(name, "")).rstrip(":")
    return argv, filled(order["program"]), filled(order["ssh"]), environment


def guards_of(order, folder, program, ssh):
    """(host, the way to its guard), this one's first, and what each guard is told."""
    files = {"program.json": json.dumps(program), "rank.py": order["scripts"]["rank"]}
    words = [json.dumps(order["scripts"]["guard"]), json.dumps({"folder": folder, "files": files})]
    mark = "PROVISION_RUN_ID=" + os.environ.get("PROVISION_RUN_ID", "")
    there = " ".join(map(shlex.quote, ["env", mark, order["python"], "-c", GUARD]))  # ours need not be theirs
    return [("", [sys.executable, "-c", GUARD]), *((host, [*ssh, "--", host, there]) for host in order["hosts"])], words


def run(order, watch):
    """(code, verdict, report) of the job."""
    # The same on all hosts, so not of this one's TMPDIR where there is a choice.
    place = PLACE if os.access(PLACE, os.W_OK | os.X_OK) else tempfile.gettempdir()
    folder = os.path.join(place, "provision-job-" + secrets.token_hex(8))
    argv, program, ssh, environment = prepare(order, folder)
    ways, words = guards_of(order, folder, program, ssh)
    job, verdict, report, code = None, None, None, 1
    try:
        # Ours before the others: where one of these is on this machine, too, it is refused, and not the one that would end us with the job.
        for beginning in (ways[:1], ways[1:]):
            for host, way in beginning if verdict is None and not watch.is_unwanted else ():
                watch.add(Guard(host, way, words))
            while verdict is None and not watch.is_unwanted and not all(guard.is_ready for guard in watch.guards):
                verdict = watch.tick()
        if verdict is None and not watch.is_unwanted:
            for name, text in order["files"].items():
                with open(os.path.join(folder, name), "w") as file:
                    file.write(text)
                if text.startswith("#!"):
                    os.chmod(os.path.join(folder, name), 0o700)
            job = subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
            while verdict is None and not watch.is_unwanted and job.poll() is None:
                verdict = watch.tick()
            # A launcher ends because of a host that dies, and faster than we see it.
            until = time.monotonic() + AFTERMATH_S
            while verdict is None and not watch.is_unwanted and job.poll() and order["hosts"] and time.monotonic() < until:
                verdict = watch.tick()
            if job.poll() is None:
                end(job)
            elif verdict is not None:
                code = exit_code(job)
            elif job.returncode:
                code = exit_code(job)
                verdict = {"kind": "launcher", "host": "", "code": job.returncode} if job.returncode < 0 else None
            else:
                code = 0
            path = os.path.join(folder, order["report"] or "")
            if order["report"] and os.path.exists(path):
                with open(path) as file:
                    report = json.load(file)
    finally:
        watch.end(watch.guards[1:])  # the first one would end our connections to them
        watch.end(watch.guards[:1])
    if code and verdict is None and not watch.is_unwanted:
        verdict = first_failure(watch.guards)
    return code, verdict, report


def main():
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    watch = Watch()

    def unwanted(*_):
        watch.is_unwanted = True

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, unwanted)
    order = json.loads(line.decode())
    code, verdict, report = run(order, watch)
    sys.stdout.write("%s%s\n" % (order["mark"], json.dumps({"code": code, "verdict": verdict, "report": report})))
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
