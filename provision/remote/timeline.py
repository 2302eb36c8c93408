"""The times of a run's steps on each host, in its folder as ``timeline.json``.

A run records them from Ansible's events, and reports draw them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from provision.remote.ansible import Event

NAME = "timeline.json"
State = Literal["ok", "changed", "failed", "unreachable"]
_STATES: dict[str, State] = {"ok": "ok", "tolerated": "ok", "changed": "changed", "failed": "failed", "unreachable": "unreachable"}
RANK: tuple[State, ...] = ("ok", "changed", "failed", "unreachable")  # a step has the last of these that one of its tasks had

_Name = Annotated[str, Field(max_length=300)]
_Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


class StepTime(BaseModel):
    """When a step ran on a host.

    Attributes:
        stage: the run's step (`Session.step`) that it is a part of.
        step: the role, or where tasks are in none the playbook.
        began: seconds since the run began.
        seconds: from its first task's begin to its last one's end.
        state: of its worst task.
    """

    model_config = ConfigDict(defer_build=True)

    stage: _Name
    host: _Name
    step: _Name
    began: _Seconds
    seconds: _Seconds = 0.0
    state: State = "ok"


class Timeline(BaseModel):
    """The document."""

    model_config = ConfigDict(defer_build=True)

    schema_number: Literal[1] = Field(1, alias="schema")
    steps: Annotated[list[StepTime], Field(max_length=200_000)] = Field(default_factory=list)


@dataclass
class Timed:
    """How a step ended that `Recorder.timed` records."""

    state: State = "failed"


class Recorder:
    """Keeps the steps of a run while it goes on. ``began``: the run's begin on the monotonic clock."""

    def __init__(self, folder: Path) -> None:
        self.began = time.monotonic()
        self._path = folder / NAME
        self._timeline = Timeline(schema=1)
        self._latest: dict[str, StepTime] = {}  # host → its step that is not over, or the last one
        self._started: dict[str, float] = {}  # host → when its task began

    def event(self, stage: str, playbook: str, event: Event) -> None:
        """Take an event of a playbook. Tasks that are skipped are no part of a step."""
        now = time.monotonic() - self.began
        if event.kind == "started":
            self._started[event.host] = now
        elif event.host and event.kind in _STATES:
            self._add(stage, event.host, event.role or playbook, self._started.get(event.host, now), now, _STATES[event.kind])

    @contextmanager
    def timed(self, stage: str, step: str, hosts: Sequence[str]) -> Iterator[Timed]:
        """Record what is done meanwhile as a step of these hosts. It has failed unless the caller sets its state."""
        began, timed = time.monotonic() - self.began, Timed()
        try:
            yield timed
        finally:
            for host in hosts:
                self._add(stage, host, step, began, time.monotonic() - self.began, timed.state)
            self.save()

    def save(self) -> None:
        """Write the file; who reads it meanwhile sees the old or the new one."""
        draft = self._path.with_name(f".{NAME}")
        draft.write_text(self._timeline.model_dump_json(by_alias=True) + "\n", encoding="utf-8")
        draft.replace(self._path)

    def _add(self, stage: str, host: str, step: str, began: float, end: float, state: State) -> None:
        entry = self._latest.get(host)
        if entry is None or (entry.stage, entry.step) != (stage, step):
            entry = self._latest[host] = StepTime(stage=stage, host=host, step=step, began=round(began, 3), state=state)
            self._timeline.steps.append(entry)
        entry.seconds = round(end - entry.began, 3)
        entry.state = max(entry.state, state, key=RANK.index)
