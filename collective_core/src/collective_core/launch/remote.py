"""The ranks of another host: an ssh connection with an agent (agent.py) at its far end, with the interface of Processes."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import threading
import time
from typing import Any, Mapping, Sequence

from collective_core.errors import CollectiveError
from collective_core.launch import frames
from collective_core.launch.agent import MAGIC
from collective_core.launch.frames import NO_RANK, Frame
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.outcomes import LOST
from collective_core.launch.processes import start_code
from collective_core.version import __version__

#: BatchMode: ssh must not ask for anything. Host keys are verified as the user's ssh is set up to.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-T")
#: Seconds between signs of life for the agent.
PULSE = 5.0
#: Seconds for the last words of a connection that has ended.
PATIENCE = 1.0
#: Lines of ssh's own complaints that an error quotes.
MAX_COMPLAINTS = 5
#: Bytes that a host's shell may print before the agent begins, and bytes of the agent's first word.
MAX_BANNER, MAX_HELLO = 1 << 16, 1 << 16


class Remote:
    """An agent on ``host``; :meth:`meet` waits for it, :meth:`start` hands it what its ranks get. ``way``: as of Host."""

    def __init__(self, host: str, python: str, ssh: Sequence[str] = SSH, way: Sequence[str] = ()) -> None:
        self.host = host
        self._ranks: list[int] = []
        self._complaints: list[str] = []
        command = f"exec {shlex.quote(python)} -c {shlex.quote(start_code('agent', here=False))}"
        try:
            self._process = subprocess.Popen(
                [*ssh, *(way or [host]), command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us alone: we end the agents in good order
            )
        except OSError as error:
            raise CollectiveError(f"host {host} cannot be reached: {error}", "invalid") from error
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._hello: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._complaining = threading.Thread(target=self._collect_complaints, daemon=True)
        self._complaining.start()
        threading.Thread(target=self._read_hello, daemon=True).start()

    def _collect_complaints(self) -> None:
        for line in self._process.stderr or ():
            self._complaints.append(line.decode(errors="replace").rstrip())

    def _read_hello(self) -> None:
        frame, seen = None, b""
        try:
            while not seen.endswith(MAGIC) and len(seen) < MAX_BANNER:
                byte = self._process.stdout.read(1) if self._process.stdout else b""
                if not byte:
                    break
                seen += byte
            frame = frames.read(self._process.stdout, MAX_HELLO) if seen.endswith(MAGIC) else None
        except (OSError, ValueError) as error:
            self._complaints.append(str(error))
        if frame is None:
            self._complaints += seen.decode(errors="replace").splitlines()[-MAX_COMPLAINTS:]
        self._hello.put(frame)

    def meet(self, deadline: float) -> dict[str, Any]:
        """What the agent says of its host. ``deadline``: of time.monotonic(). Raises :class:`CollectiveError` naming the host."""
        try:
            frame = self._hello.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise CollectiveError(f"host {self.host} did not answer in time{self._said()}", "timeout") from None
        if frame is None or frame.kind != "hello":
            raise CollectiveError(f"no agent could be started on host {self.host}{self._last_words()}", "peer_lost")
        met: dict[str, Any] = json.loads(frame.body)
        if met["version"] != __version__:
            text = f"host {self.host} has collective_core {met['version']}, this one {__version__}: install the same on all"
            raise CollectiveError(text, "mismatch")
        return met

    def _said(self) -> str:
        return ": " + " / ".join(self._complaints[-MAX_COMPLAINTS:]) if self._complaints else ""

    def _last_words(self) -> str:
        """What was said on a connection that is over. Who holds it open for longer, as ssh's ControlPersist does, is not waited for."""
        self._complaining.join(PATIENCE)
        return self._said()

    def start(
        self,
        settings: Mapping[int, bytes],
        call: bytes,
        mailbox: Mailbox,
        environment: Mapping[str, str],
        directory: str | None,
        program: Sequence[str] = (),
    ) -> None:
        """Starts the ranks of this host (see Processes); frames of theirs come into ``mailbox``."""
        self._ranks = list(settings)
        ranks = {str(rank): text.decode() for rank, text in settings.items()}
        plan = {"ranks": ranks, "environment": dict(environment), "directory": directory, "program": list(program)}
        try:
            self._send(Frame("plan", NO_RANK, json.dumps(plan).encode()), Frame("call", NO_RANK, call))
        except OSError as error:
            raise CollectiveError(f"the connection to host {self.host} ended{self._last_words()}", "peer_lost") from error
        for job in (lambda: self._forward(mailbox), self._beat):
            threading.Thread(target=job, daemon=True).start()

    def _send(self, *those: Frame) -> None:
        with self._writing:
            frames.write(self._process.stdin, *those)

    def _beat(self) -> None:
        while not self._over.wait(PULSE):
            try:
                self._send(Frame("alive", NO_RANK, b""))
            except (OSError, ValueError):
                return

    def _forward(self, mailbox: Mailbox) -> None:
        left = set(self._ranks)
        reason = ""
        try:
            while left:
                frame = frames.read(self._process.stdout)
                if frame is None:
                    reason = f"the connection ended{self._last_words()}"
                    break
                if frame.kind == "refused":
                    reason = frame.body.decode(errors="replace")
                    break
                mailbox.put(frame)
                if frame.kind == "exit":
                    left.discard(frame.rank)
        except (MemoryError, OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        for rank in left:
            mailbox.put(Frame("lost", rank, reason.encode()))
            mailbox.put(frames.exit_of(rank, LOST))

    def ask_to_end(self) -> None:
        """Closing its input tells the agent to end the ranks."""
        self._over.set()
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()

    def wait(self, deadline: float) -> None:
        """Until the agent has ended, or until ``deadline`` of time.monotonic()."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Cuts the connection, which also ends an agent that does not read."""
        self._process.kill()
        self._process.wait()
