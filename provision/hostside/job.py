"""Runs one job on the first host for a controller that holds the other end of standard input. Python 3.6+, standard library only.

The first line of standard input is JSON: ``{"argv": [...], "environment": {...}, "files": {name: text}, "report": name or null}``.
So nothing of it shows in a process list. ``:{inherited}`` at the end of a variable stands for what it holds already. The job runs in a
private folder of its own that goes when it ends; a file of its that begins with ``#!`` can be run. When standard input closes (the controller died, was interrupted, or lost the
connection) the job is ended: TERM, a grace, KILL. Exit code: the job's.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

GRACE_S = 3.0  # mpirun needs a moment to end its daemons on the other hosts
REPORT_MARK = "===PROVISION-REPORT==="


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


def watch(job):
    """Ends the job when the controller goes; raw reads, because a buffered one would hold the interpreter's exit up."""
    while os.read(0, 4096):
        pass
    end(job)


def main():
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    order = json.loads(line.decode())
    folder = tempfile.mkdtemp(prefix="provision-job-")
    try:
        for name, text in order["files"].items():
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
            if text.startswith("#!"):
                os.chmod(os.path.join(folder, name), 0o700)
        argv = [part.replace("{job}", folder).replace("{home}", os.path.expanduser("~")) for part in order["argv"]]
        environment = dict(os.environ, **order["environment"])
        for name, value in order["environment"].items():
            if value.endswith(":{inherited}"):
                environment[name] = value.replace("{inherited}", os.environ.get(name, "")).rstrip(":")
        job = subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: end(job))
        threading.Thread(target=watch, args=(job,), daemon=True).start()
        code = job.wait()
        report = os.path.join(folder, order["report"] or "")
        if order["report"] and os.path.exists(report):
            with open(report) as file:
                sys.stdout.write("\n" + REPORT_MARK + json.dumps(json.load(file)) + "\n")
                sys.stdout.flush()
        return code if code >= 0 else 128 - code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
