"""Detached jobs, on the first host of each. Python 3.6+, standard library only.

A keeper without a terminal starts job.py, in the controller's place, and writes what it prints into ~/provision-run/.jobs/JOB: ``log``;
``state.json``, what it has said last; ``about.json``, the controller's; ``errors``, the keeper's; ``cancel``, where that is requested. It holds a
lock in /dev/shm as long as it lives; where it is killed, job.py ends the job on all hosts.

``start JOB`` reads a line of JSON, ``{"about": …, "script": job.py, "order": its input, "mark": …}``, and returns when the job has begun, waits
or is over. ``list`` prints a line of JSON for each job and claim. ``follow JOB OFFSET WAIT`` prints lines ``MARK END LINE`` of the log, END being
the offset behind LINE, then, with WAIT 1 when the job is over, ``MARK = STATE``. ``cancel JOB`` returns when it has ended.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

from .abandoned import PREFIX, SHARED
from .claims import claims, is_held, make_locked

MARK = "===PROVISION-ANSWER==="
FOLDER = os.path.join(os.path.expanduser("~"), "provision-run", ".jobs")
NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{7}")
OVER = ("ended", "killed")
MAX_OVER = 20  # jobs that are over and whose logs are kept
MAX_LOG, LOG_IS_FULL = 1 << 28, b"provision: the log is full: what the job prints from here on is not kept\n"
LONGEST = 1 << 20  # bytes of a line
BEAT_S, TICK_S, START_S, CANCEL_S = 5.0, 0.2, 100.0, 45.0


def write_json(folder, name, what):
    with open(os.path.join(folder, "." + name), "w") as file:
        json.dump(what, file)
    os.rename(file.name, os.path.join(folder, name))


def lock_of(folder):
    return os.path.join(SHARED, PREFIX + os.path.basename(folder))


def look(folder):
    """What is known of a job; None where it is of another machine with the same homes."""
    is_alive = is_held(lock_of(folder), os.getuid())  # first: a keeper writes how the job ended, and then goes
    found = {"state": "starting"}
    for name in ("state.json", "about.json"):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
            found.update(json.load(file))
    if found["state"] not in OVER and not is_alive:
        found["state"] = "killed"
    return found if found.pop("node", None) == os.uname().nodename else None


def known():
    """(folder, what is known) of the jobs of this host, the newest first."""
    names = sorted(filter(NAME.fullmatch, os.listdir(FOLDER)), reverse=True) if os.path.isdir(FOLDER) else []
    return [(folder, job) for folder, job in ((folder, look(folder)) for folder in (os.path.join(FOLDER, name) for name in names)) if job]


def answer(*lines):
    sys.stdout.write("\n%s\n%s\n" % (MARK, "\n".join(map(json.dumps, lines))))


def start(folder):
    order = json.loads(sys.stdin.readline())
    os.makedirs(FOLDER, 0o700, exist_ok=True)
    if not os.path.isdir(folder):  # else the connection was lost behind an earlier start
        lock = make_locked(lock_of(folder))  # it is the keeper's, too
        os.mkdir(folder, 0o700)
        write_json(folder, "about.json", dict(order["about"], node=os.uname().nodename, since=time.time()))
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                keep(folder, order)
            os._exit(0)
        os.close(lock)
        for old in [old for old, job in known() if job["state"] in OVER][MAX_OVER:]:
            shutil.rmtree(old, ignore_errors=True)
    deadline = time.monotonic() + START_S
    while look(folder)["state"] == "starting" and time.monotonic() < deadline:
        time.sleep(TICK_S)
    answer(look(folder))


def keep(folder, order):
    """The keeper's life."""
    with contextlib.suppress(OSError):
        for number, path in enumerate((os.devnull, os.devnull, os.path.join(folder, "errors"))):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.chdir("/")
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        try:
            Keeper(folder, order).run()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os.rmdir(lock_of(folder))


class Keeper:
    def __init__(self, folder, order):
        self.folder, self.mark, self.written, self.outcome = folder, order["mark"].encode(), 0, None
        self.log = open(os.path.join(folder, "log"), "ab", 0)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environment = dict(os.environ, PROVISION_RUN_ID=os.path.basename(folder))  # our own mark is another: a guard ends all that has the job's
        script = "exec(compile(%s, 'job.py', 'exec'))" % ascii(order["script"])  # the host's locale may not be UTF-8
        self.job = subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True, **pipes)
        self.tell(order["order"])

    def tell(self, text):
        with contextlib.suppress(OSError, ValueError):  # it has ended, which its output shows, or is to end
            self.job.stdin.write(text.encode())
            self.job.stdin.flush()

    def run(self):
        data, rest, beat, output, cancel, is_over = b"", b"", 0.0, self.job.stdout.fileno(), os.path.join(self.folder, "cancel"), False
        while data or not is_over:
            if time.monotonic() - beat >= BEAT_S:
                beat = time.monotonic()
                self.tell("\n")
            if os.path.exists(cancel):
                with contextlib.suppress(OSError):
                    self.job.stdin.close()  # it ends the job on all hosts
            is_over = self.job.poll() is not None  # what got away may hold its output open: what is there is read, and no more
            has_more = select.select([output], [], [], 0 if is_over else TICK_S)[0]
            data = os.read(output, 65536) if has_more else b""
            *lines, rest = (rest + data).split(b"\n")
            if is_over and not data or len(rest) > LONGEST:
                lines, rest = lines + [rest] * bool(rest), b""
            for line in lines:
                self.take(line)
            if has_more and not data:
                time.sleep(TICK_S)
        code = self.job.returncode  # negative for a signal; a shell has 128 and its number
        gone = {"code": 128 - code if code < 0 else code or 1, "verdict": {"kind": "gone", "host": "", "code": code}, "report": None}
        while not self.note(state="ended", outcome=self.outcome or gone, cancelled=os.path.exists(cancel)) and os.path.isdir(self.folder):
            time.sleep(1.0)  # the disk is full

    def take(self, line):
        text, is_message, after = line.partition(self.mark)
        if (text or not is_message) and self.written <= MAX_LOG:
            self.written += len(text) + 1
            with contextlib.suppress(OSError):  # a full disk costs output, never the job
                self.log.write(text + b"\n" if self.written <= MAX_LOG else LOG_IS_FULL)
        with contextlib.suppress(ValueError):
            message = json.loads(after.decode()) if is_message else {}
            if "code" in message:
                self.outcome = message
            elif message:
                self.note(state="waiting" if "waiting" in message else "running", waiting=message.get("waiting"))

    def note(self, **state):
        with contextlib.suppress(OSError):
            write_json(self.folder, "state.json", state)
            return True


def follow(folder, offset, wait):
    has_reader = True
    while has_reader:
        job, lines = look(folder), []
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "log"), "rb") as file:
            file.seek(int(offset))
            lines = re.findall(rb"[^\n]*\n", file.read(2 * LONGEST))
        for line in lines:
            offset = int(offset) + len(line)
            sys.stdout.buffer.write(b"%s %d %s" % (MARK.encode(), offset, line))
        sys.stdout.flush()
        if not lines and (wait == "0" or job["state"] in OVER):
            sys.stdout.write("%s = %s\n" % (MARK, json.dumps(job)))
            return
        has_reader = lines or not select.select([0], [], [], TICK_S)[0]  # nothing comes from there but its end


def cancel(folder):
    if is_held(lock_of(folder), os.getuid()):
        open(os.path.join(folder, "cancel"), "w").close()
    deadline = time.monotonic() + CANCEL_S
    while is_held(lock_of(folder), os.getuid()) and time.monotonic() < deadline:
        time.sleep(TICK_S)


def main(what, name="", *arguments):
    if what == "list":
        answer(*({"job": job, "state": "attached", "user": user} for job, user in claims()), *(job for _, job in known()))
    elif NAME.fullmatch(name):
        {"start": start, "follow": follow, "cancel": cancel}[what](os.path.join(FOLDER, name), *arguments)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit("%s: %s" % (error.filename or FOLDER, error.strerror or error))
