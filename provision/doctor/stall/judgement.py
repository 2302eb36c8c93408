"""Who keeps a job waiting: where each rank stands, which stand elsewhere than the others, and what they wait for.

A rank in a collective operation, or at a socket, waits for others; one that is stopped, at a file, a lock, its data loader or at work does not.
Where there are both, the latter are the suspects. Where all wait, but in different operations or at different lines, they disagree on the
order; where all wait at the same line, ranks that no host has are missing, or the network is at fault.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal

from provision.base import validation
from provision.base.text import folded
from provision.base.validation import Model
from provision.doctor.stall.model import Frame, Kind, Place, Process, Rank, Thread, Verdict

_BUSY = 0.5  # of a core: more is work, and not waiting
_FILE_CALLS = ("open", "openat", "read", "write", "pread64", "pwrite64", "readv", "writev", "newfstatat", "statx", "getdents64", "fsync", "fdatasync")
_MAX_EVIDENCE = 6
#: Of several that do not wait for ranks, the one that explains most is said first.
_ORDER: tuple[Kind, ...] = ("stopped", "disk", "file", "lock", "loader", "child", "sleep", "busy", "unknown")


class _Operation(Model):
    """An entry of operations.yaml."""

    kind: Kind
    of: Literal["python", "native"]
    name: str
    file: str = ""

    def fits(self, frame: Frame) -> bool:
        if self.of == "native":
            return not frame.file.endswith(".py") and re.search(self.name, frame.name) is not None
        return frame.file.endswith(".py") and self.file in frame.file and re.match(self.name, _plain(frame)) is not None


class _Operations(Model):
    operations: tuple[_Operation, ...]


def _plain(frame: Frame) -> str:
    """``__next__`` of ``_BaseDataLoaderIter.__next__``."""
    return frame.name.rpartition(".")[2] if frame.file.endswith(".py") else frame.name


def _frames(thread: Thread) -> tuple[Frame, ...]:
    """The stack; of a process that multiprocessing has forked without what its parent did before."""
    begins = (at for at, frame in enumerate(thread.frames) if frame.file.endswith("/multiprocessing/process.py") and _plain(frame) == "_bootstrap")
    return thread.frames[: next(begins, len(thread.frames))]


@cache
def _operations() -> tuple[_Operation, ...]:
    return validation.load(_Operations, Path(str(resources.files(__package__).joinpath("operations.yaml")))).operations


def judge(hosts: Mapping[str, Sequence[Rank]]) -> list[Verdict]:
    """One verdict for each job, the largest first. Host → its ranks."""
    jobs: dict[str, list[tuple[str, Rank]]] = defaultdict(list)
    for host, ranks in hosts.items():
        for rank in ranks:
            jobs[rank.job].append((host, rank))
    return [_verdict(job, found) for job, found in sorted(jobs.items(), key=lambda each: (-len(each[1]), each[0]))]


def _verdict(job: str, found: Sequence[tuple[str, Rank]]) -> Verdict:
    places = sorted((place_of(host, rank) for host, rank in found), key=lambda place: (place.rank, place.host))
    expected = max(rank.ranks for _host, rank in found)
    missing = sorted(set(range(min(expected, 4096))) - {place.rank for place in places})
    waiting = [place for place in places if place.waits_for_ranks]
    elsewhere = sorted((place for place in places if not place.waits_for_ranks), key=lambda place: _ORDER.index(place.kind))
    made = Verdict(job=job, said="", stalled=bool(waiting), missing=missing, places=places)
    if not waiting:
        made.said = _said_of_all(elsewhere)
        made.stalled = all(place.kind != "busy" for place in elsewhere)
        made.suspects = [place.rank for place in elsewhere if place.kind != "busy"]
    elif missing:
        made.suspects, made.said = missing, f"{_ranks(missing)} cannot be found on these hosts: ended, or on another host; {_said(waiting)}"
        if elsewhere:
            made.said += f"; {_said(elsewhere)}"
    elif elsewhere:
        made.suspects = sorted(place.rank for place in elsewhere)
        made.said = f"{_said(elsewhere)}; {_others(waiting, places)}"
    else:
        groups = _grouped(waiting)
        if len(groups) > 1:
            fewest = min(groups, key=len)
            is_split = len(groups) == 2 and len(groups[0]) == len(groups[1])
            made.suspects = sorted(place.rank for group in groups if group is fewest or is_split or len(groups) > 2 for place in group)
            made.said = f"the ranks wait in different operations: {'; '.join(_said(group) for group in sorted(groups, key=len))}"
        else:
            made.said = f"{_said(waiting)}, and none is elsewhere"
            made.excluded = ["a rank that is missing, stopped, at work, or at a file or a lock", "operations at different lines"]
            unsent = [line for place in waiting for line in place.evidence if "not acknowledged" in line]
            made.said += f": the network between them: {unsent[0]}" if unsent else ""
    return made


def place_of(host: str, rank: Rank) -> Place:
    """Where a rank stands: what its main thread does, and the processes that it waits for."""
    main = _main(rank.processes)
    if main is None or not main.threads:
        return Place(rank=rank.rank, host=host, pid=0, kind="unknown", doing="could not be looked at", evidence=["no process of it can be read"])
    thread = next((each for each in main.threads if each.tid == main.pid), main.threads[0])
    kind, operation = _kind(main, thread)
    evidence = list(_evidence(main, thread))
    line = _line(thread)
    doing = _doing(kind, operation, thread)
    if kind in ("loader", "child"):
        workers = [each for each in rank.processes if each.parent == main.pid and each.threads]
        told = [(worker, *_kind(worker, worker.threads[0])) for worker in workers]
        odd = min(told, key=lambda each: _ORDER.index(each[1]) if each[1] in _ORDER else len(_ORDER), default=None)
        if odd:
            worker, of_worker, what = odd
            at = _line(worker.threads[0])
            doing += f" for process {worker.pid}, which {_doing(of_worker, what, worker.threads[0])}" + (f" at {at}" if at else "")
            evidence += [f"process {worker.pid}: {each}" for each in _evidence(worker, worker.threads[0])]
    if kind == "lock":
        others = [each for each in main.threads if each is not thread and _line(each)]
        evidence += [f"thread {each.name}: {_doing(*_kind(main, each), each)} at {_line(each)}" for each in others]
    if main.tracer:
        evidence.append(f"process {main.tracer} traces it")
    evidence += [f"no stack: {main.no_stacks}"] if main.no_stacks else []
    return Place(rank=rank.rank, host=host, pid=main.pid, kind=kind, doing=doing, line=line, evidence=evidence[:_MAX_EVIDENCE])


def _main(processes: Sequence[Process]) -> Process | None:
    """The first process that runs Python; without one the last of those that are alone, as a shell and what it started."""
    with_python = [each for each in processes if any(frame.file.endswith(".py") for thread in each.threads for frame in thread.frames)]
    return next(iter([*with_python, *processes[:1]]), None)


def _kind(process: Process, thread: Thread) -> tuple[Kind, str]:
    """(what a thread does, the call that says so)"""
    if thread.state in ("T", "t"):
        return "stopped", ""
    for kind in ("collective", "loader", "child", "lock", "sleep"):
        for frame in _frames(thread):
            if any(each.kind == kind and each.fits(frame) for each in _operations()):
                return (kind, _outermost(thread, kind) if kind == "collective" else _plain(frame))  # type: ignore[return-value]
    if thread.state == "D":
        return "disk", thread.call
    if thread.call in ("flock", "fcntl"):
        return "lock", thread.call
    if thread.call in _FILE_CALLS and not thread.target.startswith("socket:"):
        return "file", thread.call
    if thread.busy > _BUSY or thread.state == "R":
        return "busy", ""
    if thread.target.startswith("socket:") or thread.call in ("connect", "accept", "accept4"):
        return "network", thread.call
    if thread.call in ("nanosleep", "clock_nanosleep", "pause"):
        return "sleep", thread.call
    if thread.call in ("wait4", "waitid"):
        return "child", thread.call
    return ("lock" if thread.call == "futex" else "unknown"), thread.call


def _outermost(thread: Thread, kind: Kind) -> str:
    """The operation as the program calls it: the outermost call of this kind, in Python where there is one."""
    fitting = [frame for frame in _frames(thread) if any(each.kind == kind and each.fits(frame) for each in _operations())]
    python = [_plain(frame) for frame in fitting if frame.file.endswith(".py")]
    named = [name for name in python if name not in ("wrapper", "<module>", "__call__", "inner")]
    return named[-1] if named else re.split(r"[(<]", fitting[-1].name)[0]


def _line(thread: Thread) -> str:
    """The innermost line of the program itself: Python that is in no package."""
    for frame in _frames(thread):
        if frame.file.endswith(".py") and not re.search(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<|/collective_core/src/", frame.file):
            return f"{PurePosixPath(frame.file).name}:{frame.line}"
    return ""


def _doing(kind: Kind, operation: str, thread: Thread) -> str:
    of = f" of {_target(thread)}" if thread.target and not thread.target.startswith("anon_inode") else ""
    match kind:
        case "collective":
            return f"waits for other ranks in {operation}"
        case "network":
            return f"waits in {operation}{f' for {thread.peer}' if thread.peer else ''}"
        case "stopped":
            return "is stopped" if thread.state == "T" else "is stopped by a debugger"
        case "disk":
            return f"is in {operation or 'the kernel'}{of}, which cannot be interrupted"
        case "file":
            return f"waits in {operation}{of}"
        case "lock":
            held = f", which process {thread.holder} holds" if thread.holder else ""
            return f"waits for a lock in {operation}{of if thread.call in ('flock', 'fcntl') else ''}{held}"
        case "loader":
            return f"waits for data in DataLoader.{operation}"
        case "child":
            return f"waits in {operation} for a process that it started"
        case "sleep":
            return "sleeps"
        case "busy":
            return "is at work"
    return f"is in {operation or thread.waits_in or 'a place that cannot be read'}"


def _target(thread: Thread) -> str:
    on = f" on {thread.filesystem} {thread.source}" if thread.filesystem else ""
    return f"{thread.target}{on}"


def _evidence(process: Process, thread: Thread) -> Iterator[str]:
    """What shows where a thread is."""
    if thread.frames:
        calls = [f"{frame.name} ({PurePosixPath(frame.file).name}:{frame.line})" for frame in _frames(thread) if frame.line and frame.file.endswith(".py")]
        yield "stack: " + " ← ".join(calls[:8]) if calls else f"native stack: {' ← '.join(frame.name for frame in thread.frames[:5])}"
    if thread.call or thread.waits_in:
        yield f"system call: {thread.call or '?'}{f' on {_target(thread)}' if thread.target else ''}; state {thread.state}, in the kernel {thread.waits_in or '?'}"
    if thread.peer:
        unsent = f", {thread.unsent} bytes not acknowledged" if thread.unsent else ""
        yield f"socket: {thread.local} to {thread.peer}, {thread.socket}{unsent}" + (f", {thread.unread} bytes not read" if thread.unread else "")
    yield f"processor: {100 * thread.busy:.0f} % of a core, {thread.switches} switches"


def _grouped(places: Iterable[Place]) -> list[list[Place]]:
    groups: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in places:
        groups[place.doing, place.line].append(place)
    return list(groups.values())


def _said(places: Sequence[Place]) -> str:
    """``rank 5 on node3 waits in open of /data/x at train.py:88``, for each group of ranks that stand at the same place."""
    parts = []
    for group in _grouped(places)[:4]:
        hosts = sorted({place.host for place in group})
        on = f" on {hosts[0]}" if len(hosts) == 1 else ""
        doing = group[0].doing if len(group) == 1 else re.sub(r"^(waits|is|sleeps)", lambda found: {"waits": "wait", "is": "are"}.get(found[1], "sleep"), group[0].doing)
        parts.append(f"{_ranks([place.rank for place in group])}{on} {doing}" + (f" at {group[0].line}" if group[0].line else ""))
    return "; ".join(parts)


def _said_of_all(places: Sequence[Place]) -> str:
    kinds = Counter(place.kind for place in places)
    if set(kinds) == {"busy"}:
        return f"all {len(places)} ranks that were found are at work: nothing stands"
    return f"no rank waits for another; {_said(places)}"


def _others(waiting: Sequence[Place], places: Sequence[Place]) -> str:
    count = f"the other {len(waiting)} ranks wait" if len(waiting) > 1 else f"{_ranks([waiting[0].rank])} waits"
    operations = sorted({f"{re.sub('^waits (for other ranks )?', '', place.doing)}{f' at {place.line}' if place.line else ''}" for place in waiting})
    return f"{count} for {'it' if len(places) - len(waiting) == 1 else 'them'} {', '.join(operations[:3])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {folded([str(rank) for rank in ranks]).strip('[]')}"
