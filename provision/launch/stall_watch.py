"""The watch over a job: when its ranks are quiet for longer than its own rhythm explains, one examination says whether it has stalled.

The hosts' guards see cheap signs only, which a rank that computes lacks, too: they never raise an alarm, an examination does. One that
finds no stall is silent, and the next one comes when the job has been quiet for twice as long, but not more than `_PAUSE_S` longer; once it
went on, `_KEPT_S` at most. A job that went on after a stall is examined again only when it is quiet for longer than that: a slow
checkpoint is named once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, Field, JsonValue

from provision.base.errors import ProvisionError
from provision.base.text import duration
from provision.launch.rank_output import pieces
from provision.launch.stragglers import Straggler, Stragglers, Window
from provision.remote.session import Session

RECORD = "stalls.json"  # in the run's folder
EXIT_CODE = 124  # of a job that --on-stall kill has ended, as timeout(1) has it
Action = Literal["report", "kill", "restart"]
_BEAT_S = 5.0  # between two samples of the ranks, where --stall-after is not short itself
_RHYTHM = 1.5  # times the longest stall after which the job went on
_PAUSE_S, _KEPT_S = 600.0, 300.0
_RESTART_S = 60.0  # for killed ranks to be gone


@dataclass(frozen=True)
class Finding:
    """What an examination says: whether the job has stalled, in one paragraph, what to do, and the whole verdict for the record."""

    is_stalled: bool
    said: str
    steps: tuple[str, ...]
    verdict: JsonValue


@dataclass(frozen=True)
class StallOptions:
    """How a job is watched.

    Attributes:
        after: seconds without a sign of progress after which it is examined.
        action: what follows if it has stalled.
        examine: raises ProvisionError, and is cut off where the event is set.
        restarts: how often its launcher starts the ranks again; then it is ended instead.
    """

    after: float
    action: Action
    examine: Callable[[Session, threading.Event], Finding]
    restarts: int = 0

    @property
    def sample(self) -> float:
        """Seconds between two samples of the ranks."""
        return min(_BEAT_S, self.after / 4)


class Stall(BaseModel):
    """A stall of a job. ``since``: its last sign of progress. ``seconds``: until the next one; None where there was none."""

    since: AwareDatetime
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    said: str
    verdict: JsonValue


class Stalls(BaseModel):
    """The stalls and stragglers of a run's job: the file `RECORD`, which the user alone can read."""

    schema_number: Literal[1] = Field(1, alias="schema")
    stalls: list[Stall] = Field(default_factory=list)
    stragglers: list[Straggler] = Field(default_factory=list)


class StallWatch:
    """Watches one job. All but the examination is done in the thread that calls it.

    Attributes:
        action: what is to be done with the job now; who does it sets it to None.
        last_words: why the job was ended, or its ranks were killed and have not gone on; empty where neither is so.
    """

    def __init__(self, session: Session, options: StallOptions) -> None:
        self.options = options
        self.action: Action | None = None
        self.last_words = ""
        self._session = session
        self._record = Stalls()
        self._stragglers = Stragglers()
        self._stall: Stall | None = None  # the one that lasts
        self._quiet, self._heard = 0.0, time.monotonic()  # what hosts have said last, in seconds, and when
        self._output = time.monotonic()  # when a rank has printed something last
        self._longest, self._next = 0.0, options.after
        self._ended = threading.Event()
        self._examined: list[Finding | ProvisionError] = []
        self._examination: threading.Thread | None = None
        self._found: tuple[Finding | ProvisionError, float] | None = None  # not yet taken, and when it was found
        self._restarted: float | None = None  # for how long the job was quiet when its ranks were killed
        self._has_failed = self._is_unwritten = False
        self._restarts = options.restarts

    def __enter__(self) -> StallWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._examination is not None:
            self._examination.join()  # at once: it has been cut off

    def line(self, text: str) -> None:
        """A line of the job's output."""
        if any(tag.endswith("<stdout>:") and said.strip() for tag, said in pieces(text)):  # what waits for others, warns on standard error
            self._output = time.monotonic()
            self._goes_on()

    def quiet(self, seconds: float) -> None:
        """The hosts say for how long no rank shows that it goes on."""
        if seconds < self._quiet:
            self._goes_on()
        now = time.monotonic()
        self._quiet, self._heard = min(seconds, now - self._output), now

    def ranks(self, host: str, windows: Sequence[Window]) -> None:
        """A host says where the time of its ranks has gone."""
        if self._stragglers.take(host, windows):
            self._record.stragglers = self._stragglers.found
            self._write()

    def attend(self) -> None:
        """To be called again and again: begins an examination, and takes what it has found."""
        if self._examination is not None and not self._examination.is_alive():
            self._examination, self._found = None, (self._examined.pop(), time.monotonic())
        found, since = self._found or (None, 0.0)
        is_stale = isinstance(found, Finding) and found.is_stalled and self._heard <= since  # it may have gone on meanwhile
        if found is not None and not is_stale:
            self._found = None
            self._take(found)
        if self._restarted is not None and self._quiet > self._restarted + _RESTART_S:
            self._restarted, self.action = None, "kill"
        is_free = self._stall is None and self._examination is None and self._found is None
        if is_free and self._quiet >= max(self._next, _RHYTHM * self._longest):
            self._examination = threading.Thread(target=self._examine, daemon=True)
            self._examination.start()

    def _goes_on(self) -> None:
        if self._stall is not None:
            self._stall.seconds = max(0.0, round(time.time() - self._stall.since.timestamp(), 3))  # a clock may be set back
            self._write()
            if self.options.action == "report":  # else it goes on because of that
                self._longest = max(self._longest, self._stall.seconds)
            self._session.progress.line(f"provision: the job goes on, after {duration(self._stall.seconds)}", "bold green")
            self._stall = None
        if self._restarted is not None:
            self._restarted, self.last_words = None, ""
        self._found, self._quiet, self._next = None, 0.0, max(self.options.after, min(self._next, _KEPT_S))

    def _examine(self) -> None:
        try:
            self._examined.append(self.options.examine(self._session, self._ended))
        except ProvisionError as error:
            self._examined.append(error)
        except Exception as error:  # noqa: BLE001  the job must not end for it
            self._examined.append(ProvisionError(f"internal error (please report it): {type(error).__name__}: {error}"))

    def _take(self, found: Finding | ProvisionError) -> None:
        quiet = self._quiet
        if quiet < self.options.after:  # it went on while it was examined
            return
        if isinstance(found, Finding) and found.is_stalled:
            self._stall = Stall(since=datetime.fromtimestamp(time.time() - quiet, timezone.utc), said=found.said, verdict=found.verdict)
            self._record.stalls.append(self._stall)
            self._write()
            self._say(self._stall, found)
            return
        self._next = min(2 * quiet, quiet + _PAUSE_S)
        if isinstance(found, ProvisionError) and not self._has_failed:
            self._has_failed = True  # said once
            self._session.progress.line(f"provision: the job is quiet for {duration(quiet)}, and cannot be examined: {found}", "yellow")

    def _write(self) -> None:
        try:
            (self._session.folder / RECORD).touch(mode=0o600)
            self._session.write(RECORD, self._record.model_dump(mode="json", by_alias=True))
        except OSError as error:  # the job must not end for it
            if not self._is_unwritten:
                self._session.progress.line(f"provision: {error.filename or RECORD} cannot be written: {error.strerror}", "yellow")
            self._is_unwritten = True

    def _say(self, stall: Stall, found: Finding) -> None:
        line = self._session.progress.line
        line(f"provision: the job has stalled since {stall.since.astimezone():%H:%M:%S}: {found.said}", "bold red")
        for step in found.steps:
            line(f"  → {step}")
        line(f"  the evidence: {self._session.folder / RECORD}, or provision doctor --job {self._session.run_id}")
        if self.options.action == "report":
            return
        self.action, self.last_words = "kill", f"the job has stalled, and was ended (--on-stall {self.options.action}): {found.said}"
        if self.options.action == "restart" and self._restarts:
            self.action, self._restarts, self._restarted = "restart", self._restarts - 1, self._quiet
            line("  its ranks are killed, and started again (--on-stall restart)")

    def has_ended_it(self, code: int) -> bool:
        """Whether a job that ended with that exit code did so because of the stall: ranks that are started again may fail by themselves."""
        return bool(code and self.last_words) and (self._restarted is None or code == 128 + signal.SIGKILL)
