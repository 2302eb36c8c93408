"""Ranks that start with PyTorch imported: importing it takes each rank of each test more than a second of processor time.

``mpirun`` starts :func:`_stand_in`, a small process that has the rank forked by a server (:func:`_serve`) with its own arguments,
environment, folder and standard streams, hands signals on to it, and ends as it ends. Nothing of the engine or of MPI is imported
before the fork. Not for ranks that connect while another thread of theirs is in Python: forked after PyTorch was imported, they are late.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LENGTH, NUMBER = struct.Struct("!I"), struct.Struct("!i")


class Server:
    """A server of this process's own; it ends with it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "prefork"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(self._path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the server of ranks did not start"

    def command(self) -> list[str]:
        """What to start instead of the interpreter."""
        return [sys.executable, "-S", __file__, "rank", str(self._path)]

    def close(self) -> None:
        self._process.communicate()


def _stand_in(path: str, words: list[str]) -> NoReturn:
    """Ends as the rank does, which runs ``words``: a script, or -m and a module, and its arguments."""
    request = json.dumps({"words": words, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))]
        server.sendmsg([LENGTH.pack(len(request))], rights)
        server.sendall(request)
        (pid,) = NUMBER.unpack(server.recv(NUMBER.size, socket.MSG_WAITALL))
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        (status,) = NUMBER.unpack(server.recv(NUMBER.size, socket.MSG_WAITALL))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(path: str) -> list[str]:
    """Forks ranks until standard input ends. Returns in the ranks, with the words of their command."""
    import selectors

    import torch  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    ranks: dict[Any, tuple[int, socket.socket, int]] = {}  # by what tells of an end: the rank's descriptor, or the stand-in's connection
    while True:
        for key, _ in events.select():
            if key.fileobj is sys.stdin:
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                header, rights, _, _ = connection.recvmsg(LENGTH.size, socket.CMSG_SPACE(3 * 4))
                streams = array.array("i", rights[0][2])
                request = json.loads(connection.recv(*LENGTH.unpack(header), socket.MSG_WAITALL))
                pid = os.fork()
                if pid == 0:
                    # What is open here has another file's number later: the garbage collector must find nothing to close.
                    for each in (events, listener, connection, *(other for _, other, _ in ranks.values())):
                        each.close()
                    return _become(request, streams)
                for stream in streams:
                    os.close(stream)
                connection.sendall(NUMBER.pack(pid))
                watched = os.pidfd_open(pid)
                for each in (watched, connection):
                    ranks[each] = pid, connection, watched
                    events.register(each, selectors.EVENT_READ)
            elif key.fileobj in ranks:
                pid, connection, watched = ranks[key.fileobj]
                if key.fileobj is connection:  # the stand-in has been killed
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                for each in (watched, connection):
                    del ranks[each]
                    events.unregister(each)
                with contextlib.suppress(OSError):  # nobody may wait for it any more
                    connection.sendall(NUMBER.pack(status))
                connection.close()
                os.close(watched)


def _become(request: dict[str, Any], streams: array.array[int]) -> list[str]:
    """Gives this process what an interpreter of its own would have. Returns the words of the command."""
    import numpy

    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    numpy.random.seed()
    words: list[str] = request["words"]
    first = "" if words[0] == "-m" else str(Path(words[0]).parent)
    sys.path[0:1] = [first, *filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))]
    return words


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _stand_in(sys.argv[2], sys.argv[3:])
    what, *rest = _serve(sys.argv[2])
    import runpy

    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")
