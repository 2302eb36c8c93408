"""What a stage of a run does on each host: the state behind the live view, without the view.

Hosts that are alike become one row where there are many, and the rows that need attention come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from provision.base.text import grouped, joined
from provision.remote.ansible import Event, headline

State = Literal["failed", "unreachable", "waiting", "running", "idle", "starting", "done"]
_WORST: tuple[State, ...] = ("failed", "unreachable", "waiting", "running", "idle", "starting", "done")
FOLD_FROM = 9  # hosts
_IDLE_S = 1.5  # after the end of a task a host is at rest only when nothing follows for so long


@dataclass
class HostState:
    """One host.

    Attributes:
        number: of its step in the stage's steps, from 1; 0 where they are not known, or before the first.
        remark: why it waits, what failed, or how far its build is.
        at: when its state changed; began: when its step began.
    """

    name: str
    state: State = "starting"
    step: str = ""
    number: int = 0
    remark: str = ""
    at: float = 0.0
    began: float = 0.0


@dataclass(frozen=True)
class Row:
    """One host, or several that are alike.

    Attributes:
        part: how much is done, from 0 to 1.
        seconds: in this step, of the one that is longest in it.
    """

    hosts: tuple[str, ...]
    state: State
    step: str
    number: int
    part: float
    seconds: float
    remark: str


@dataclass
class Series:
    """Stages without hosts that are parts of one piece of work, such as the launches of a benchmark.

    Attributes:
        count: of all of them.
        began: time on the monotonic clock.
        number: of the part that runs, from 1; 0 before the first.
        part_began: when it began.
    """

    title: str
    count: int
    began: float
    number: int = 0
    part_began: float = 0.0

    def next_part(self, now: float) -> None:
        """Another part begins."""
        self.number, self.part_began = self.number + 1, now

    def left(self, now: float) -> float | None:
        """Seconds to the end, at the pace of the parts that are done; None before one is."""
        done = self.number - 1
        return max(0.0, (self.part_began - self.began) / done * self.count - (now - self.began)) if done > 0 else None


@dataclass
class Stage:
    """A stage that goes on.

    Attributes:
        steps: names in their order, where they are known.
        began: time, as all times here on the monotonic clock.
        changed: hosts where something was changed.
    """

    title: str
    began: float
    hosts: dict[str, HostState] = field(default_factory=dict)
    steps: Sequence[str] = ()
    changed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, title: str, hosts: Iterable[str], now: float, steps: Sequence[str] = ()) -> Stage:
        """A stage that begins."""
        return cls(title, now, {name: HostState(name, at=now, began=now) for name in hosts}, steps)

    @property
    def failed(self) -> list[str]:
        return [host.name for host in self.hosts.values() if host.state in ("failed", "unreachable")]

    def event(self, event: Event, now: float) -> None:
        """Take an event of Ansible's. A host that has failed stays so: what follows cleans up."""
        host = self.hosts.get(event.host)
        if event.kind == "changed":
            self.changed.add(event.host)
        if host is None or event.kind == "task" or host.state in ("failed", "unreachable"):
            return
        self._move(host, event.role, now)
        if event.kind in ("failed", "unreachable"):
            state: State = "failed" if event.kind == "failed" else "unreachable"
            host.state, host.remark, host.at = state, headline(event.text), now
        elif host.state != "done":
            waits_for = waits(event)
            host.state = "waiting" if waits_for else "running" if event.kind in ("started", "waiting") else "idle"
            host.remark, host.at = waits_for or (headline(str(event.result.get("stdout", ""))) if builds(event) else ""), now

    def _move(self, host: HostState, role: str, now: float) -> None:
        """Note the step that a host is at."""
        if role == host.step or not (role or not self.steps):
            if not role and self.steps and host.number == len(self.steps):
                host.state = "done"
            return
        host.step, host.began = role, now
        if role in self.steps:
            host.number = self.steps.index(role) + 1

    def rows(self, now: float, fold_from: int = FOLD_FROM) -> list[Row]:
        """What to show, the worst first: failed, waiting, and of those that go on the slowest."""
        folds = len(self.hosts) >= fold_from
        alike = grouped(((self._state(host, now), host.step, host.remark) if folds else host.name, host) for host in self.hosts.values())
        running = [host.name for host in self.hosts.values() if host.state in ("running", "waiting")]
        rows = [self._row(group, now, running) for group in alike.values()]
        return sorted(rows, key=lambda row: (_WORST.index(row.state), row.number, -row.seconds))

    def _row(self, group: Sequence[HostState], now: float, running: Sequence[str]) -> Row:
        first = group[0]
        builders = [name for name in running if self.hosts[name].state == "running" and self.hosts[name].remark]
        waited = f"the build on {joined(builders)}" if builders else joined(running)
        others = f"waits for {waited}" if self.steps and running and self._state(first, now) == "idle" else ""
        return Row(
            hosts=tuple(host.name for host in group),
            state=self._state(first, now),
            step=first.step,
            number=first.number,
            part=1.0 if first.state == "done" else (first.number - 1) / len(self.steps) if self.steps and first.number else 0.0,
            seconds=max((now if self._goes_on(host, now) else host.at) - host.began for host in group),
            remark=first.remark or others,
        )

    def _state(self, host: HostState, now: float) -> State:
        return "running" if host.state == "idle" and now - host.at < _IDLE_S else host.state

    def _goes_on(self, host: HostState, now: float) -> bool:
        """Whether its time goes on. Where the steps are not known a host at rest may be at the end, or wait for others."""
        state = self._state(host, now)
        return state not in ("failed", "unreachable", "done") and (state != "idle" or bool(self.steps))


def builds(event: Event) -> bool:
    """Whether a build goes on, which says how far it is."""
    return event.kind == "waiting" and "/from_source/" in event.path


def waits(event: Event) -> str:
    """What a task waits for; empty where it waits for nothing but its own end."""
    if event.kind != "waiting" or builds(event):
        return ""
    return f"the package manager is held by {str(event.result.get('stdout', '')).strip() or 'something else'}"
