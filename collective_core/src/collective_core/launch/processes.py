"""The ranks of one host as child processes: started, listened to, ended with everything that they have started.

A rank runs a function (rank.py) or a program. What happens is put into a mailbox as frames: ``out`` and ``err`` (pieces of output, lines
if they are not too long), ``value`` or ``raised`` (what a rank's function returned or raised), ``lost`` (why it is ended here: a signal has
stopped it), and at last ``exit`` (the exit code, negative for a signal) for every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Mapping, Sequence

from collective_core.errors import CollectiveError
from collective_core.launch import frames, this_host
from collective_core.launch.frames import Frame
from collective_core.launch.mailbox import Mailbox
from collective_core.runtime import cores, horovod_variables, torch_variables

#: Variables of launchers in which this process may itself run, and of the jobs that they started: its ranks are another job.
FOREIGN = (
    *("OMPI_", "PMIX_", "PMI_", "MV2_", "SLURM_", "TORCHELASTIC_"),
    *(
        "COLLECTIVE_RANK",
        "COLLECTIVE_SIZE",
        "COLLECTIVE_STORE",
        "COLLECTIVE_SECRET",
        "COLLECTIVE_PORT",
        "COLLECTIVE_HOST_ID",
        "COLLECTIVE_ELASTIC",
        "COLLECTIVE_WORKER",
    ),
)
FOREIGN_NAMES = (*torch_variables.RANK_VARIABLES, *torch_variables.OF_TORCHRUN, *horovod_variables.RANK_VARIABLES)
#: What Python runs as a rank or an agent: without the working directory on the search path, where a file may have the name of a module of
#: Python's own. {path} is where this package lies, for interpreters that do not find it by themselves.
START = "import sys; sys.path[:] = [p for p in sys.path if p] + {path}; from collective_core.launch.{module} import main; main()"
#: What becomes a program: a watcher stays in its process group, and ends the group when standard input, which is ours, ends: then we are
#: gone. The watcher is nobody's child, or a program that waits for all its children would wait for it.
WATCHED = "exec 3<&0 </dev/null; ( (trap '' HUP INT TERM; read end <&3; kill -KILL 0) >/dev/null 2>&1 & ); exec \"$@\" 3<&-"
#: Seconds for the last output of a rank that has ended: a process that it has started may hold its pipes open and be silent, or not.
QUIET, LAST_WORDS = 0.3, 3.0
#: Seconds after which a rank that a signal has stopped is ended, and the ranks of a launcher's process that was; guards are faster there.
STOPPED_RANK, STOPPED_LAUNCHER = 45.0, 60.0
#: Bytes of output that are passed on although no line ends.
LONGEST_LINE = 1 << 16


def start_code(module: str, here: bool) -> str:
    """For ``python -c``: ``rank`` or ``agent``, on this machine or another."""
    path = [str(Path(__file__).resolve().parents[2])] if here else []
    return START.format(module=module, path=path)


class _Lines:
    """Cuts a stream into lines; also where a progress bar goes back to the line's begin."""

    def __init__(self, kind: str, rank: int, put: Callable[[Frame], None]) -> None:
        self._kind, self._rank, self._put = kind, rank, put
        self._left = b""

    def take(self, data: bytes) -> None:
        pieces = (self._left + data).replace(b"\r\n", b"\n").replace(b"\r", b"\r\0").replace(b"\n", b"\n\0").split(b"\0")
        self._left = pieces.pop()
        if len(self._left) > LONGEST_LINE:
            pieces.append(self._left)
            self._left = b""
        for piece in pieces:
            self._put(Frame(self._kind, self._rank, piece))

    def end(self) -> None:
        if self._left:
            self._put(Frame(self._kind, self._rank, self._left))


class _Rank:
    """One child. Its group is only signalled while the child is not reaped: until then nobody else can have the number."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], to_rank: int, from_rank: int) -> None:
        self.rank = rank
        self.process = process
        self.to_rank = os.fdopen(to_rank, "wb", buffering=0)
        self.from_rank = os.fdopen(from_rank, "rb", buffering=0)
        self._lock = threading.Lock()
        self._reaped = False
        self._ended: float | None = None
        self._end = threading.Thread(target=self._note_end, daemon=True)
        self._end.start()

    def signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._reaped:
                os.killpg(self.process.pid, number)

    def end_because(self, reason: str, mailbox: Mailbox) -> None:
        if self._ended is None:
            mailbox.put(Frame("lost", self.rank, reason.encode()))
            self.signal(signal.SIGKILL)

    def _note_end(self) -> None:
        # At once, whoever holds the child's pipes open: the rank that ended first is the one that failed first.
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._ended = time.monotonic()

    def reap(self) -> int:
        with self._lock:
            self._reaped = True
            return self.process.wait()

    def hand_over(self, settings: bytes, call: bytes) -> None:
        # A rank that dies before it has read its job is reported by its exit code.
        with contextlib.suppress(OSError, ValueError):
            frames.write(self.to_rank, Frame("settings", self.rank, settings), Frame("call", self.rank, call))

    def follow(self, mailbox: Mailbox) -> None:
        """Passes on all that the child says, and at last that it has ended."""
        streams = {self.process.stdout: _Lines("out", self.rank, mailbox.put), self.process.stderr: _Lines("err", self.rank, mailbox.put)}
        cleared = False
        with selectors.DefaultSelector() as open_ends:
            for stream in (*streams, self.from_rank):
                open_ends.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
            while open_ends.get_map():
                ready = open_ends.select(QUIET)
                if self._ended is not None and not cleared:
                    cleared = True
                    self.signal(signal.SIGKILL)  # what it has started and left behind
                elif self._ended is not None and (not ready or time.monotonic() > self._ended + LAST_WORDS):
                    break
                for key, _ in ready:
                    if key.fileobj is self.from_rank:
                        frame = self._result()
                        if frame is not None:
                            mailbox.put(frame)
                        open_ends.unregister(key.fileobj)
                        continue
                    data = os.read(key.fd, LONGEST_LINE)
                    streams[key.fileobj].take(data)  # type: ignore[index]
                    if not data:
                        open_ends.unregister(key.fileobj)
        for lines in streams.values():
            lines.end()
        self._end.join()
        self.signal(signal.SIGKILL)
        code = self.reap()
        mailbox.put(frames.exit_of(self.rank, code, ago=time.monotonic() - (self._ended or 0.0)))
        for stream in (*streams, self.from_rank):
            if stream is not None:
                stream.close()

    def _result(self) -> Frame | None:
        try:
            return frames.read(self.from_rank)
        except (MemoryError, ValueError) as error:
            text = f"what rank {self.rank} returned does not fit into the memory here"
            told = {"type": type(error).__name__, "text": text, "traceback": "", "kind": ""}
            self.signal(signal.SIGKILL)  # it waits for somebody who reads
            return Frame("raised", self.rank, json.dumps(told).encode())


class Processes:
    """``settings``: what every rank gets besides the ``call`` (rank.py), as JSON. ``mailbox``: where frames are put.

    ``program``: what ranks run instead of the call, with its arguments; of the settings it gets the environment alone.

    Raises :class:`CollectiveError` when a process cannot be started; then none is left.
    """

    def __init__(
        self,
        settings: Mapping[int, bytes],
        call: bytes,
        mailbox: Mailbox,
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        python: str = sys.executable,
        program: Sequence[str] = (),
    ) -> None:
        self._ranks: list[_Rank] = []
        self._threads: list[threading.Thread] = []
        self._secret: IO[bytes] | None = None
        self._watcher: IO[bytes] | None = None  # what ends it
        mine = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in FOREIGN_NAMES}
        try:
            for rank, wanted in settings.items():
                variables, told = {**mine, **(environment or {})}, json.loads(wanted)
                cores.limit(variables, told["local_size"])
                _name_interface(variables, told["address"])
                if program:
                    variables.update(self._hide_secret(told["environment"]))
                child = self._start(rank, python, program, variables, directory)
                if not program:
                    threading.Thread(target=child.hand_over, args=(wanted, call), daemon=True).start()
                self._threads.append(threading.Thread(target=child.follow, args=(mailbox,), daemon=True))
                self._threads[-1].start()
            self._watch(mailbox, python)
        except BaseException as error:
            self.kill()
            if isinstance(error, (OSError, ValueError)):
                raise CollectiveError(f"ranks cannot be started on {socket.gethostname()}: {error}", "invalid") from error
            raise

    def _hide_secret(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The job's secret as a file without a name that goes with us: not in the environment, which programs print and pass on."""
        left = dict(variables)
        secret = left.pop("COLLECTIVE_SECRET", None)
        if secret is not None:
            if self._secret is None:
                self._secret = os.fdopen(os.memfd_create("secret"), "wb", buffering=0)
                os.fchmod(self._secret.fileno(), 0o600)
                self._secret.write(secret.encode())
            left["COLLECTIVE_SECRET_FILE"] = f"/proc/{os.getpid()}/fd/{self._secret.fileno()}"
        return left

    def _start(self, rank: int, python: str, program: Sequence[str], environment: Mapping[str, str], directory: str | None) -> _Rank:
        inward, to_rank = os.pipe()
        from_rank, outward = os.pipe()
        kept = () if program else (inward, outward)
        function = [python, "-c", start_code("rank", here=True), str(inward), str(outward)]
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", WATCHED, "sh", *program] if program else function,
                env=dict(environment),
                cwd=directory,
                stdin=inward if program else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=kept,
                start_new_session=True,
            )
        except BaseException:
            for end in (to_rank, from_rank):
                os.close(end)
            raise
        finally:
            for end in (inward, outward):
                os.close(end)
        child = _Rank(rank, process, to_rank, from_rank)
        self._ranks.append(child)
        return child

    def _watch(self, mailbox: Mailbox, python: str) -> None:
        """Ends ranks that a signal has stopped for too long, and all of them when this process was."""
        limits = {os.getpid(): STOPPED_LAUNCHER, **{child.process.pid: STOPPED_RANK for child in self._ranks}}
        command = [python, "-I", "-S", str(Path(__file__).with_name("stopped.py"))]
        command += [str(number) for limit in limits.items() for number in limit]
        watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

        def listen() -> None:
            with watcher:
                for pid in map(int, watcher.stdout or ()):
                    why = f"process {pid} has been stopped for {limits[pid]:g} s (kill -CONT would have continued it)"
                    for child in self._ranks:
                        if pid in (child.process.pid, os.getpid()):
                            child.end_because(why, mailbox)

        threading.Thread(target=listen, daemon=True).start()
        self._watcher = watcher.stdin

    def ask_to_end(self) -> None:
        for child in self._ranks:
            child.signal(signal.SIGTERM)

    def wait(self, deadline: float) -> None:
        """Until all have ended, or until ``deadline`` of time.monotonic()."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Ends what has not ended, and all that the ranks have started."""
        for child in self._ranks:
            child.signal(signal.SIGKILL)
        self.wait(time.monotonic() + LAST_WORDS + 1)
        for end in (*(child.to_rank for child in self._ranks), self._secret, self._watcher):
            with contextlib.suppress(OSError):
                if end is not None:
                    end.close()


def _name_interface(variables: dict[str, str], address: str) -> None:
    """Tells the libraries under torch.distributed which interface leads to the other hosts; what somebody has told them stays.

    By themselves they take that of the host's name, which on Debian is 127.0.1.1, or all there are.
    """
    chosen = variables.get("COLLECTIVE_NETWORK") or variables.get("HOROVOD_GLOO_IFACE") or ""
    networks = [name.strip() for name in chosen.split(",") if name.strip()]
    interface = this_host.interface(address, networks) if networks or address else None
    if interface is not None:
        for name, value in torch_variables.interface_variables(interface, chosen=bool(networks)).items():
            variables.setdefault(name, value)


def rank_settings(environment: Mapping[str, str], path: Any, local_size: int, address: str = "") -> bytes:
    """What a rank gets besides the call.

    ``path``: a search path for modules, None for the rank's own. ``local_size``: ranks of its host, which share its cores. ``address``:
    at which other hosts of the job reach its host; empty where there is none, or it is not known.
    """
    own = [entry for entry in path if isinstance(entry, str)] if path is not None else None
    argv = [str(word) for word in sys.argv] or [""]
    settings = {"environment": dict(environment), "path": own, "argv": argv, "local_size": local_size, "address": address}
    return json.dumps(settings).encode()
