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

from collective_core import __version__
from collective_core.errors import CollectiveError
from collective_core.launch import frames
from collective_core.launch.frames import NO_RANK, Frame, Job
from collective_core.launch.outcomes import LOST

#: BatchMode: ssh must not ask for anything. Host keys are verified as the user's ssh is set up to.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-T")
#: Seconds for the agent to end its ranks before the connection is cut.
PATIENCE = 4.0
#: Lines of ssh's own complaints that an error quotes.
MOST_COMPLAINTS = 5


class Remote:
    """An agent on ``host``; :meth:`meet` waits for it, :meth:`start` hands it the jobs of its ranks."""

    def __init__(self, host: str, python: str, ssh: Sequence[str] = SSH) -> None:
        self.host = host
        self._ranks: list[int] = []
        self._complaints: list[str] = []
        self._process = subprocess.Popen(
            [*ssh, host, f"exec {shlex.quote(python)} -m collective_core.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us alone: we end the agents in good order
        )
        self._hello: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        threading.Thread(target=self._collect_complaints, daemon=True).start()
        threading.Thread(target=lambda: self._hello.put(frames.read(self._process.stdout)), daemon=True).start()

    def _collect_complaints(self) -> None:
        for line in self._process.stderr or ():
            self._complaints.append(line.decode(errors="replace").rstrip())

    def meet(self, deadline: float) -> dict[str, Any]:
        """What the agent says of its host. ``deadline``: of time.monotonic(). Raises :class:`CollectiveError` naming the host."""
        try:
            frame = self._hello.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise CollectiveError(f"host {self.host} did not answer in time{self._said()}", "timeout") from None
        if frame is None or frame.kind != "hello":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise CollectiveError(f"no agent could be started on host {self.host}{self._said()}", "peer_lost")
        met: dict[str, Any] = json.loads(frame.body)
        if met["version"] != __version__:
            text = f"host {self.host} has collective_core {met['version']}, this one {__version__}: install the same on all"
            raise CollectiveError(text, "mismatch")
        return met

    def _said(self) -> str:
        return ": " + " / ".join(self._complaints[-MOST_COMPLAINTS:]) if self._complaints else ""

    def start(
        self, jobs: Mapping[int, Job], events: queue.SimpleQueue[Frame], environment: Mapping[str, str], directory: str | None
    ) -> None:
        """Starts the ranks of this host; frames of theirs come into ``events``."""
        self._ranks = list(jobs)
        settings = {"ranks": len(jobs), "environment": dict(environment), "directory": directory}
        try:
            frames.write(self._process.stdin, Frame("host", NO_RANK, json.dumps(settings).encode()))
            for rank, job in jobs.items():
                frames.write(self._process.stdin, *job.frames(rank))
        except OSError as error:
            raise CollectiveError(f"the connection to host {self.host} ended{self._said()}", "peer_lost") from error
        threading.Thread(target=self._forward, args=(events,), daemon=True).start()

    def _forward(self, events: queue.SimpleQueue[Frame]) -> None:
        left = set(self._ranks)
        while left:
            frame = frames.read(self._process.stdout)
            if frame is None or frame.kind == "refused":
                reason = frame.body.decode(errors="replace") if frame else f"the connection ended{self._said()}"
                for rank in left:
                    events.put(Frame("err", rank, f"host {self.host}: {reason}\n".encode()))
                    events.put(frames.exit_of(rank, LOST))
                return
            events.put(frame)
            if frame.kind == "exit":
                left.discard(frame.rank)

    def stop(self, at_once: bool = False) -> None:
        """Ends the ranks: closing its input tells the agent to."""
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if at_once else PATIENCE)
        self._process.kill()
        self._process.wait()
