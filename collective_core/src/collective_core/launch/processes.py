"""The ranks of one host as child processes: started, listened to, ended with everything that they have started.

What happens is put into a queue as frames: ``out`` and ``err`` (lines of output), ``value`` or ``raised`` (what a rank's
function returned or raised), and at last ``exit`` (the exit code, negative for a signal) for every rank.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Mapping, Sequence

from collective_core.launch import frames
from collective_core.launch.frames import Frame, Job

#: Variables of launchers in which this process may itself run: its ranks are another job.
FOREIGN = ("OMPI_", "PMIX_", "PMI_", "MV2_", "SLURM_", "TORCHELASTIC_", "COLLECTIVE_RANK", "COLLECTIVE_SIZE", "COLLECTIVE_STORE")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Seconds between asking processes to end and ending them.
PATIENCE = 2.0
#: Seconds for the last output of a rank that has ended: a process that it has started may hold its pipes open.
LAST_WORDS = 0.5


class Processes:
    """``jobs``: what every rank gets. ``events``: where frames are put."""

    def __init__(
        self,
        jobs: Mapping[int, Job],
        events: queue.SimpleQueue[Frame],
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        python: str = sys.executable,
    ) -> None:
        self._events = events
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lines: dict[int, Any] = {}  # to each rank: as long as it is open, its starter is there
        mine = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in FOREIGN_NAMES}
        try:
            for rank, job in jobs.items():
                self._start(rank, job, {**mine, **(environment or {})}, directory, python)
        except BaseException:
            self.stop(at_once=True)
            raise

    def _start(self, rank: int, job: Job, environment: Mapping[str, str], directory: str | None, python: str) -> None:
        inward, to_rank = os.pipe()
        from_rank, outward = os.pipe()
        try:
            process = subprocess.Popen(
                [python, "-m", "collective_core.launch.rank", str(inward), str(outward)],
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(inward, outward),
                start_new_session=True,
            )
        except BaseException:
            for end in (to_rank, from_rank):
                os.close(end)
            raise
        finally:
            for end in (inward, outward):
                os.close(end)
        self._processes[rank] = process
        self._lines[rank] = os.fdopen(to_rank, "wb")
        readers = [
            threading.Thread(target=self._forward_lines, args=("out", rank, process.stdout), daemon=True),
            threading.Thread(target=self._forward_lines, args=("err", rank, process.stderr), daemon=True),
            threading.Thread(target=self._forward_result, args=(os.fdopen(from_rank, "rb"),), daemon=True),
        ]
        for thread in (*readers, threading.Thread(target=self._hand_over, args=(rank, job), daemon=True)):
            thread.start()
        threading.Thread(target=self._watch, args=(rank, process, readers), daemon=True).start()

    def _hand_over(self, rank: int, job: Job) -> None:
        # A rank that dies before it has read its job is reported by its exit code.
        with contextlib.suppress(OSError):
            frames.write(self._lines[rank], *job.frames(rank))

    def _forward_lines(self, kind: str, rank: int, stream: Any) -> None:
        for line in stream:
            self._events.put(Frame(kind, rank, line))

    def _forward_result(self, stream: Any) -> None:
        frame = frames.read(stream)
        if frame is not None:
            self._events.put(frame)

    def _watch(self, rank: int, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        code = process.wait()
        _kill(process, signal.SIGKILL)  # what it has started and left behind
        end = time.monotonic() + LAST_WORDS
        for reader in readers:
            reader.join(max(0.0, end - time.monotonic()))
        self._events.put(frames.exit_of(rank, code))

    def stop(self, at_once: bool = False) -> None:
        """Ends all ranks and what they have started: asks, waits :data:`PATIENCE` seconds, and makes them."""
        if not at_once:
            for process in self._processes.values():
                _kill(process, signal.SIGTERM)
            end = time.monotonic() + PATIENCE
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        for process in self._processes.values():
            _kill(process, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.close()


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
