"""Runs one rank's program on a host and records how it ended, whoever launches it. Python 3.6+, standard library only.

mpirun reports the end of a job in sentences; the record says it in numbers. It is in the job's folder, where this file is, and so is the
program (``program.json``): its words stand on no command line but its own. The rank's number is the launcher's.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time

NUMBERS = ("COLLECTIVE_RANK", "OMPI_COMM_WORLD_RANK")
NOT_FOUND = 127  # as a shell has it
#: A launcher sends them to the process group: the program takes them, and its end is ours.
OF_GROUP = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTSTP}
DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
EXITING = 0x4  # PF_EXITING of linux/sched.h; a process has it before its connections close, and children until it is gone


def record(folder, rank, **facts):
    path = os.path.join(folder, "provision-rank-%s" % rank)
    with open(path + ".new", "w") as file:
        json.dump(dict(facts, rank=int(rank)), file)
    os.rename(path + ".new", path)


def is_dead(starter):
    """Whether our parent, the launcher's process that started us, is dead or dying."""
    try:
        with open("/proc/%d/stat" % starter, errors="replace") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except (OSError, IndexError):  # it is gone
        flags = 0
    return bool(flags & EXITING) or os.getppid() != starter


def become(program, mask, parent):
    """In the child: the program, which is killed when this process is."""
    try:
        ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NOT_FOUND)  # it was killed before
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write("%s: %s\n" % (program[0], error.strerror))
        sys.stderr.flush()
    os._exit(NOT_FOUND)


def main():
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "program.json")) as file:
        program = json.load(file)
    rank = next(os.environ[name] for name in NUMBERS if name in os.environ)
    os.environ["PROVISION_RANK"] = rank
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_GROUP)
    parent, starter = os.getpid(), os.getppid()
    pid = os.fork()
    if pid == 0:
        become(program, mask, parent)
    known = {"pid": pid, "parent": parent, "starter": starter}
    record(folder, rank, **known)
    _, status = os.waitpid(pid, 0)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    try:
        # Orphaned: the rank may have failed because the launcher's process that started this one had died.
        record(folder, rank, code=code, at=time.monotonic(), orphaned=code != 0 and is_dead(starter), **known)
    except OSError:
        pass  # the job's folder is being removed
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
