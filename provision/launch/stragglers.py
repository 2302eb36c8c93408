"""Stragglers: the ranks of a job for which the others wait again and again, by how much, and why. Pure but for the clock.

Ranks step together: each has the same work, then waits for the others, so the rank that waits least is the late one. A rank is busy while
its main thread computes, waits for a core or for a disk, as hosts see it from outside (`hostside/shares.py`). Where ranks wait spinning,
what it loses, which is the latter two, tells only that it may be late. What hosts say is noisy, and steps may be longer than their windows:
several of these are taken together, and a straggler is late in most of the last times.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from statistics import fmean
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from provision.base.validation import MAX_COUNT

_BEHIND = 0.2  # of the time: what a rank is late by, at least
_TOGETHER = 4  # windows of each rank: 20 s, longer than most steps
_WINDOWS, _LATE, _EVEN = 6, 5, 3  # the last of these; late in so many of them it is a straggler, down to so many
_STEPS, _SPINS, _FULL = 0.1, 0.9, 0.8  # busy: at least, where ranks step at all; where they wait spinning; a loader at its limit
_SENDS, _RESENT, _SLOWER = 0.5, 0.001, 0.9  # data under way on a slow link, and sent again; of the others' clock, on a slow core
_MAX_FOUND = 100

# Shares of the time: a rank's main thread is on a core, waits for one, is in the kernel for a disk; all workers of its data loader are;
# data of its host's ranks was not acknowledged, or not read. Others: of the periods those in which a quota has held its control group, of
# TCP segments those that its host has sent again, and of the highest clock rate that of its core.
Sign = Literal[
    "cpu", "ready", "disk", "loader_cpu", "loader_ready", "loader_disk", "throttled", "unsent", "unread", "resent", "clock", "gpu"
]  # fmt: skip
Reason = Literal["itself", "spins", "loader", "network"]
_BUSY: tuple[Sign, ...] = ("cpu", "ready", "disk")
_LOST: tuple[Sign, ...] = ("ready", "disk")
_LOADER = ("loader_cpu", "loader_ready", "loader_disk")
#: By the sign that shows the cause: what is said, and the share that it is said of.
_CAUSES: dict[Sign, tuple[str, Sign]] = {
    "throttled": ("a quota of processor time holds it, in {own[throttled]:.0%} of its periods: it waits for a core", "ready"),
    "ready": ("other processes use its core: it waits for it", "ready"),
    "disk": ("it waits for a disk or a file server", "disk"),
    "clock": ("its core runs at {own[clock]:.0%} of its clock rate, others' at {others[clock]:.0%}: it computes", "cpu"),
    "cpu": ("it has more work, or a slower core: it computes", "cpu"),
    "unsent": ("its link or a receiver's loses data, {own[resent]:.1%} is sent again: what it sends is not acknowledged", "unsent"),
}


class Window(BaseModel):
    """Where the time of a rank has gone for some seconds. A sign that its host does not see is missing."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rank: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    signs: dict[Sign, Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]]

    def share(self, *names: str) -> float:
        """The sum of these, of the time."""
        return min(1.0, sum(value for name, value in self.signs.items() if name in names))


class Straggler(BaseModel):
    """A straggler, since it was noticed.

    Attributes:
        seconds: how long that lasted; None while it does, or at the end of the job.
        behind: the share of the time by which it is late; ``cause``: the sign that shows why.
        by: by itself, its loader, or the network; ``spins``: by itself, but it may have time to lose, as ranks wait spinning.
        own, others: where its time goes, and that of a rank in the middle of all.
    """

    since: AwareDatetime
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    rank: int
    host: str
    behind: float
    by: Reason
    cause: Sign
    said: str
    own: Window
    others: Window


class _Late(NamedTuple):
    """A rank that was late, and one in the middle of all."""

    host: str
    by: Reason
    behind: float
    own: Window
    others: Window


class Stragglers:
    """Of one job, in ``found``; `take` is called with what a host says of its ranks, again and again."""

    def __init__(self) -> None:
        self.found: list[Straggler] = []
        self._said = defaultdict[str, list[Sequence[Window]]](list)  # by host
        self._rounds = deque[Mapping[tuple[str, int], _Late]](maxlen=_WINDOWS)

    def take(self, host: str, windows: Sequence[Window]) -> bool:
        """Whether that changes what is found. Hosts are judged when all have said enough, or one twice as much: the others may be gone."""
        self._said[host].append(windows)
        enough = [len(said) for said in self._said.values()]
        if min(enough) < _TOGETHER and max(enough) < 2 * _TOGETHER:
            return False
        late = late_in({each: _together(said) for each, said in self._said.items()})
        self._said = defaultdict(list, {each: [] for each, said in self._said.items() if said})
        lasting = {(each.host, each.rank): each for each in self.found if each.seconds is None}
        if late is None and not lasting:
            return False
        self._rounds.append(late or {})
        last = {key: [each[key] for each in self._rounds if key in each] for key in {key for each in self._rounds for key in each}}
        ended = [each for key, each in lasting.items() if len(last.get(key, ())) <= _EVEN]
        for each in ended:
            each.seconds = max(0.0, round(time.time() - each.since.timestamp(), 1))  # a clock may be set back
        begun = [key for key in last.keys() - lasting if len(last[key]) >= _LATE and len(self.found) < _MAX_FOUND]
        self.found += [_straggler(rank, last[host, rank]) for host, rank in sorted(begun)]
        return bool(ended or begun)


def late_in(hosts: Mapping[str, Sequence[Window]]) -> dict[tuple[str, int], _Late] | None:
    """The ranks for which the others have waited in a window, by host and rank; None where the ranks do not step together."""
    ranks = [(host, own) for host, windows in hosts.items() for own in windows]
    firsts = [(host, windows[0]) for host, windows in hosts.items() if windows]
    if len(ranks) < 2:
        return None
    busy = _middle(ranks, _BUSY).share(*_BUSY)

    def late(by: Reason, signs: Sequence[str], among: Sequence[tuple[str, Window]]) -> list[_Late]:
        # The first rank of each of several hosts may have the network to do for the others there.
        of_all, of_firsts = _middle(among, signs), _middle(firsts, signs)
        of_first = max(of_all, of_firsts, key=lambda each: each.share(*signs)) if len(firsts) > 1 else of_all
        pairs = [(each, of_first if each in firsts else of_all) for each in among]
        return [_Late(host, by, own.share(*signs) - others.share(*signs), own, others) for (host, own), others in pairs]

    # What a main thread does on a core says little where ranks wait spinning, or their work is on GPUs.
    spins = busy >= _SPINS or any(own.share("gpu") for _, own in ranks)
    found = late("spins", _LOST, ranks) if spins else late("itself", _BUSY, ranks)
    # A rank waits for its loader where that is at its limit, those of others are not, and it is not busier than they are.
    found += [
        each._replace(behind=min(each.behind, 1 - each.own.share(*_BUSY)))
        for each in late("loader", _LOADER, ranks)
        if each.own.share(*_LOADER) >= _FULL and each.others.share(*_LOADER) > 0 and each.own.share(*_BUSY) <= busy + _BEHIND / 2
    ]
    found = [each for each in found if each.behind >= _BEHIND and busy >= _STEPS]
    # All wait for the network; but on any link data stays under way to a rank that does not read it, and some ranks send more than others.
    if not found and len(hosts) > 1 and busy <= 1 - _BEHIND and all(own.share("unread") < _SENDS for _, own in ranks):
        found = [
            each
            for each in late("network", ("unsent",), firsts)
            if each.behind >= _BEHIND and each.own.share("unsent") >= _SENDS and each.own.share("resent") >= _RESENT
        ]
    late_ranks = {(each.host, each.own.rank): each for each in sorted(found, key=lambda each: each.behind)}
    return late_ranks if late_ranks or busy >= _STEPS else None


def _middle(ranks: Sequence[tuple[str, Window]], signs: Sequence[str]) -> Window:
    """The one in the middle of the others, as one that has more sees them: of two the lower one."""
    return sorted((own for _, own in ranks), key=lambda own: own.share(*signs))[(len(ranks) - 1) // 2]


def _together(said: Sequence[Sequence[Window]]) -> list[Window]:
    """One window of each rank that a host has named last."""
    by_rank = {own.rank: list[Window]() for own in (said[-1] if said else ())}
    for own in (own for windows in said for own in windows if own.rank in by_rank):
        by_rank[own.rank].append(own)
    return [_mean(windows) for windows in by_rank.values()]


def _mean(windows: Sequence[Window]) -> Window:
    signs = {name: round(fmean(each.signs.get(name, 0.0) for each in windows), 3) for name in get_args(Sign)}
    return Window(rank=windows[-1].rank, signs=signs)


def _straggler(rank: int, rounds: Sequence[_Late]) -> Straggler:
    """What is said of a rank that was late in these rounds, most often for one reason."""
    reasons = [each.by for each in rounds]
    by = max(reasons, key=reasons.count)
    late = [each for each in rounds if each.by == by]
    host, behind = late[-1].host, fmean(each.behind for each in late)
    own, others = _mean([each.own for each in late]), _mean([each.others for each in late])
    stage = "loader_" if by == "loader" else ""
    more = {name: own.share(stage + name) - others.share(stage + name) for name in (_LOST if by == "spins" else _BUSY)}
    cause: Sign = max(more, key=lambda name: more[name]) if by != "network" else "unsent"
    if cause == "ready" and own.share("throttled") >= more["ready"] / 2:
        cause = "throttled"
    if cause == "cpu" and 0 < own.signs["clock"] < _SLOWER * others.signs["clock"]:
        cause = "clock"
    text, sign = _CAUSES[cause]
    shares = [each.share(stage + sign if sign in _BUSY else sign) for each in (own, others)]
    why = f"{'in its data loader ' if stage else ''}{text.format(own=own.signs, others=others.signs)}"
    late_by = f"may be late, by up to {behind:.0%}" if by == "spins" else f"is late, by {behind:.0%}"
    said = f"{late_by} of the time: {why} {shares[0]:.0%} of the time, others {shares[1]:.0%}".replace("%", " %")
    said = f"rank {rank} on {host} {said}"
    since, behind = datetime.now(timezone.utc), round(behind, 3)
    return Straggler(since=since, rank=rank, host=host, behind=behind, by=by, cause=cause, said=said, own=own, others=others)
