"""A program next to a launcher, which may itself be stopped: ``stopped.py STARTER SECONDS RANK SECONDS …`` watches these processes.

It prints the number of one that a signal has stopped (state T of /proc; a debugger's are t) at every look for so long; the starter is then
continued, to deal with it. It ends with its standard input. Time is counted in looks, so a job that was stopped and continued as a whole,
with this process, has missed nothing. `provision run` has the same rule (hostside/guard.py).
"""

import os
import select
import signal
import sys

LOOK_S = 5.0


def is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[:1] == ["T"]
    except OSError:  # it is gone
        return False


def main() -> None:
    limits = {int(pid): float(seconds) for pid, seconds in zip(sys.argv[1::2], sys.argv[2::2])}
    step, stopped = min(LOOK_S, *limits.values()), dict.fromkeys(limits, 0.0)
    while not select.select([0], [], [], step)[0]:
        for pid, seconds in limits.items():
            stopped[pid] = stopped[pid] + step if is_stopped(pid) else 0.0
            if stopped[pid] > seconds:
                print(pid, flush=True)
                if pid == os.getppid():
                    os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
