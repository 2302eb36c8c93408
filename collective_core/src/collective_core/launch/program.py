"""A program on all ranks of a job, as mpirun starts one: what they print, and the exit code of the rank that failed first."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from collective_core.launch import frames
from collective_core.launch.elastic_driver import Driver
from collective_core.launch.frames import Frame
from collective_core.launch.job import GRACE, Job
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.outcomes import LOST, signal_name


class Verdict(NamedTuple):
    """``code``: as a shell tells it, 128 and its number for a signal. ``text``: who failed first, and how; empty when nobody did.

    ``rank``: that rank, if it ended by itself, so that it may have said why. ``others``: what this would be, had another rank been first,
    by rank in the order of their ends; also for those that ended with 0.
    """

    code: int
    text: str
    rank: int | None = None
    others: Mapping[int, Any] = MappingProxyType({})

    def blaming(self, rank: int) -> Verdict:
        """Two ranks end in one moment, and what they have said tells which was the first: the verdict on that one."""
        found: Verdict = self.others.get(rank, self)
        return found if found.code else self  # it has survived what it said, and succeeded

    def blaming_who_left(self, has_said_why: Callable[[int], bool]) -> Verdict:
        """All errors tell of another rank's end: the verdict on the first that ended without one, this one's if it did."""
        silent = [rank for rank in (self.rank, *self.others) if rank is not None and rank in self.others and not has_said_why(rank)]
        if not silent:
            return self
        found: Verdict = self.others[silent[0]]
        return found._replace(code=found.code or 1, text=f"{found.text} while others waited for it")


def run(job: Job, program: Sequence[str], show: Callable[[Frame], None]) -> Verdict:
    """Runs ``program`` until all ranks have ended, or one has failed and all have been ended. ``show`` gets what they print.

    Raises :class:`CollectiveError` naming the host that cannot be used; then nothing is left running.
    """
    mailbox = Mailbox()
    try:
        job.start(mailbox, program=program)
        return _follow(mailbox, job.host_of, show)
    finally:
        mailbox.close()
        job.end()


def run_elastic(driver: Driver) -> Verdict:
    """The same for an elastic job, which goes on without ranks that die."""
    ending = driver.run()
    if ending.failed is None:
        return Verdict(0, "")
    rank, host, last = ending.failed
    return _verdict(rank, host, next(frames.code_of(frame) for frame in last if frame.kind == "exit"), "")


def _follow(mailbox: Mailbox, host_of: Mapping[int, str], show: Callable[[Frame], None]) -> Verdict:
    verdict, first_end = Verdict(0, ""), 0.0
    ends: list[tuple[float, int, Verdict]] = []
    left = set(host_of)
    reasons: dict[int, str] = {}
    end: float | None = None
    while left and (end is None or time.monotonic() < end):
        frame = mailbox.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        if frame is None:
            continue
        if frame.kind in ("out", "err"):
            show(frame)
        elif frame.kind == "lost":
            reasons[frame.rank] = frame.body.decode(errors="replace")
        elif frame.kind == "exit":
            left.discard(frame.rank)
            code, ended = frames.code_of(frame), time.monotonic() - frames.seconds_since(frame)
            # A rank's last words may take longer than the failure of others that it has caused.
            its = _verdict(frame.rank, host_of[frame.rank], code, reasons.get(frame.rank, ""))
            ends.append((ended, frame.rank, its))
            if code != 0 and (end is None or ended < first_end):
                verdict = its
                end, first_end = end or time.monotonic() + GRACE, ended
    return verdict._replace(others={rank: its for _, rank, its in sorted(ends)}) if verdict.code else verdict


def _verdict(rank: int, host: str, code: int, reason: str) -> Verdict:
    who = f"rank {rank} on {host}"
    if code == LOST:
        return Verdict(1, f"{who} could not be started, or the way to it is gone: {reason or 'no reason is known'}")
    if code < 0:
        return Verdict(128 - code, f"{who}: {reason}" if reason else f"{who} was ended by {signal_name(-code)}")
    return Verdict(code, f"{who} ended with exit code {code}", rank)
