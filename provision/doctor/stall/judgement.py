"""Who keeps a job waiting: where each rank stands, which stand elsewhere than the others, and what they wait for.

A rank in a collective operation, or at a socket, waits for others; one that is stopped, at a file, a lock, its data loader or at work does
not. Where there are both, the latter are the suspects. Where all wait, but in different operations or at different lines, they disagree
on the order; where all wait at the same line, ranks that no host has are missing, or the network or the shape of their data is at fault.
Where one waits for clients, the others wait for what these ask for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Literal

from provision.base import validation
from provision.base.text import folded
from provision.base.validation import Model
from provision.doctor.stall.model import WAITS, Frame, Kind, Place, Rank, Thread, Verdict

_BUSY = 0.5  # of a core: more is work, and not waiting
_IDLE = 0.01  # of a core: a rank that goes on uses more
_MOVES = 4  # switches while it was watched: more is a rank that goes on; one that waits has none, or those of a time-out
_LOOKS: tuple[Kind, ...] = ("hidden", "sleep", "client")  # calls of a thread that looks again and again, such as a watchdog
_IDLE_SERVER: tuple[Kind, ...] = ("lock", "sleep")  # what the other ranks of an idle server do, too
_MAX_EVIDENCE = 8
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<(?!stdin)|/collective_core/src/")
#: Of libraries whose own threads compute and communicate while the one that has called them waits.
_EXECUTORS = re.compile(r"-packages/(?:tensorflow|jax|jaxlib)/")
#: Of several places, the one that explains most is said first.
_ORDER: tuple[Kind, ...] = ("stopped", "disk", "file", "lock", "loader", "child", "sleep", "busy", "unknown", *WAITS)
_STACKS: tuple[Kind, ...] = ("collective", "loader", "child", "lock", "sleep", "hidden")  # what stacks show, the first first
#: What a system call says, or where that may not be read the kernel's function.
_CALLS: Mapping[str, Kind] = {
    r"open(at)?|p?(read|write)(v|64)?|newfstatat|statx|getdents64|f(data)?sync": "file",
    r"(anon_)?pipe_(read|write)|wait_for_partner|fifo_open|(fuse|nfs|rpc)_\w+": "file",
    r"flock\w*|fcntl|locks_lock_\w+": "lock",
    r"accept4?|inet_csk_accept": "client",
    r"connect|sk_wait\w+|wait_woken|inet_csk_\w+": "network",
    r"(clock_|hrtimer_|do_)?nanosleep|pause": "sleep",
    r"wait4|waitid|do_wait": "child",
    r"futex\w*|\w*poll\w*|\w*select\w*": "hidden",
}


class _Operation(Model):
    """An entry of operations.yaml."""

    kind: Kind
    of: Literal["python", "native"]
    name: str
    file: str = ""

    def fits(self, frame: Frame) -> bool:
        if self.of == "native":
            return not _line_of(frame) and re.search(self.name, frame.name) is not None
        return bool(_line_of(frame)) and re.search(self.file, frame.file) is not None and re.match(self.name, _plain(frame)) is not None


class _Operations(Model):
    operations: tuple[_Operation, ...]
    steps: dict[str, tuple[str, ...]]


@cache
def _known() -> _Operations:
    return validation.load(_Operations, Path(str(resources.files(__package__).joinpath("operations.yaml"))))


def judge(hosts: Mapping[str, Sequence[Rank]]) -> list[Verdict]:
    """One verdict for each job, the newest first. Host → its ranks."""
    jobs: dict[tuple[str, str], list[tuple[str, Rank]]] = defaultdict(list)
    for host, rank in ((host, rank) for host, ranks in hosts.items() for rank in ranks):
        is_whole = rank.local >= rank.ranks  # other hosts may have a job of the same name, such as that of torchrun without options
        jobs[rank.job, host if is_whole else ""].append((host, rank))
    return sorted((_verdict(job, found) for (job, _host), found in jobs.items()), key=lambda each: (-each.began, each.job))


def _verdict(job: str, found: Sequence[tuple[str, Rank]]) -> Verdict:
    places = sorted((place_of(host, rank) for host, rank in found), key=lambda place: (place.rank, place.host))
    known = {place.line: place for place in places if place.kind == "collective" and place.line}
    alike = [place for place in places if place.is_partial and place.line in known and place.kind in ("busy", "hidden")]
    spin = [place for place in alike if place.kind == "busy"]
    may_spin = len(spin) + sum(place.kind in WAITS for place in places) < len(places)  # else one of them may be what keeps the others
    for place, same in ((place, known[place.line]) for place in alike if may_spin or place not in spin):
        place.moves = same.moves or (place.moves and place not in spin)
        place.kind, place.doing, place.at = same.kind, same.doing, same.at
    missing = sorted(set(range(min(max(rank.ranks for _host, rank in found), 4096))) - {place.rank for place in places})
    among_ranks = any(place.kind == "collective" for place in places)
    waits = {id(place): place.kind in WAITS and not (place.alone and among_ranks) for place in places}
    waiting, hosts = [place for place in places if waits[id(place)]], {host for host, _rank in found}
    elsewhere = sorted((each for each in places if not waits[id(each)]), key=lambda place: (place.moves, _ORDER.index(place.kind)))
    made = Verdict(job=job, began=min(rank.began for _host, rank in found), said="", state="stalled", missing=missing, places=places)
    suspects = [place for place in elsewhere if not place.moves] or (elsewhere if waiting else [])
    made.suspects, first = sorted(place.rank for place in suspects), {place.kind: place for place in reversed(suspects)}
    made.steps = [step.format(pid=each.pid, host=each.host) for each in first.values() for step in _known().steps.get(each.kind, ())]
    # Each launcher says how many ranks it has started on its host: whether the missing ones are among them.
    ended = sum({host: rank.local for host, rank in found}.values()) >= len(places) + len(missing)
    if any(place.moves for place in (waiting or elsewhere)):
        made.state, made.suspects, made.missing, made.steps = "moves", [], [], []
        made.said = f"the job goes on: {_said(places)}"
    elif missing and (ended or not suspects):
        where = f"{'has' if len(missing) == 1 else 'have'} ended" if ended else "cannot be found on these hosts: ended, or on another host"
        rest = f"; {_said(elsewhere)}" if elsewhere else ""
        made.said = f"{_ranks(missing)} {where}; {_others(waiting, len(missing)) if waiting else 'no rank waits for another'}{rest}"
        made.suspects, made.steps = missing, [*_known().steps["missing"], *made.steps]
    elif not missing and any(place.kind == "client" for place in waiting) and all(map(_is_idle, suspects)):
        made.state, made.suspects, made.steps = "works", [], []
        made.said = f"{_said(places)}: an idle server"
    elif elsewhere and waiting:
        made.said = f"{_said(elsewhere)}; {_others(waiting, len(elsewhere))}"
        if all(place.moves for place in elsewhere):
            made.state = "works"
            made.said += "; slow, or in a loop without end: look again, and compare its lines"
    elif elsewhere:
        made.said = f"no rank waits for another; {_said(elsewhere)}"
        made.state = "works" if all(place.kind == "sleep" for place in elsewhere) else "stalled"  # none keeps another waiting
    elif [place.kind for place in places] == ["network"]:
        made.state, made.said = "works", f"{_said(waiting)}; no other rank is there: it waits for a server"
    # What its ends have come to differs; at different lines it could be a connection to anybody.
    elif len({place.line for place in waiting}) == 1 < len(hosts) and (lost := [place for place in waiting if place.unanswered]):
        what = f"the network loses what rank {lost[0].rank} on {lost[0].host} sends, or the answers"
        made.said = f"{_said(waiting)}, and none is elsewhere: {what}: {lost[0].unanswered}"
        made.steps = [*_known().steps["same"][1:]]
    elif len(waiting) > 1 and (way := _one_way(waiting)):
        made.suspects = [place.rank for place in waiting]
        made.said = f"{_said(waiting)}: all of them {way}"
        made.steps = [*_known().steps["order"]]
    elif len(groups := sorted(grouped(waiting), key=len)) > 1:
        made.suspects = _odd(groups)
        lines = {place.line for place in waiting}
        made.said = f"the ranks wait in different operations: {'; '.join(map(_says_of_callers if len(lines) == 1 else _said, groups))}"
        made.steps = [*_known().steps["order"]]
    elif len({place.caller for place in waiting}) > 1:
        made.said = f"the ranks wait at one line, which they have called at different ones: {_says_of_callers(waiting)}"
        made.suspects = _odd([[place for place in waiting if place.caller == each] for each in {place.caller for place in waiting}])
        made.steps = [*_known().steps["order"], *_known().steps["same"]]  # the callers may differ where nothing is wrong
    else:
        made.said = f"{_said(waiting)}, and none is elsewhere: another shape on one of them, or the network"
        may_go_on = re.search("MPI_|(?i:synchronize)", waiting[0].doing)  # MPI's ranks and GPUs: where they are cannot be seen
        made.state, made.steps = "works" if may_go_on else "stalled", [*_known().steps["same"]]
    if made.missing and made.suspects != missing:
        made.said += f"; {_ranks(missing)} cannot be found on these hosts"
    lacks = {f"; on {place.host} {each}" for place in places if place.rank in made.suspects for each in place.lacks}
    made.said += "".join(sorted(lacks)[:4])
    return made


def _odd(groups: Sequence[Sequence[Place]]) -> list[int]:
    """The ranks of the smaller groups; of all where each has as many: each may be the one that is wrong."""
    most = max(map(len, groups))
    odd = [group for group in groups if len(group) < most] or groups
    return sorted(place.rank for group in odd for place in group)


def _one_way(waiting: Sequence[Place]) -> str:
    """What all ranks do of the two that a message needs: none does the other. A large message waits for who receives it."""
    for pattern, way in ((r"MPI_[SBR]?send\b", "send, and none receives"), (r"MPI_M?(recv|probe)\b", "receive, and none sends")):
        if all(re.search(pattern, place.doing, re.IGNORECASE) for place in waiting):
            return way
    return ""


def _is_idle(place: Place) -> bool:
    """Whether it may be a rank of a server without clients: one that waits for a file lock waits for who holds it."""
    return place.kind in _IDLE_SERVER and place.holder is None


def place_of(host: str, rank: Rank) -> Place:
    """Where a rank stands: what its main thread does, and the processes that it waits for."""
    # The first process that runs Python; without one the first that does not only wait for what it has started, as a shell does.
    python = [each for each in rank.processes if any(_line_of(frame) for thread in each.threads for frame in thread.frames)]
    main = [*python, *(each for each in rank.processes if each.threads[0].waits_in != "do_wait"), *rank.processes][0]
    thread = main.threads[0]
    kind, operation = _kind(thread)
    if kind == "hidden" and _is_in_executor(thread) and any(map(_is_busy, main.threads[1:])):
        kind, operation = "busy", ""
    kind = "collective" if kind == "hidden" and main.operations else kind
    doing = _doing(kind, (kind == "collective" and main.operations) or operation, thread)  # the engine knows the tensor and the process set
    place = Place(rank=rank.rank, host=host, pid=main.pid, kind=kind, doing=doing, line=_line(thread))
    place.holder, place.unanswered, place.lacks = thread.holder, next(iter(main.unanswered), ""), main.lacks
    place.at = operation if kind in ("network", "client", "loader", "child") else place.doing
    place.caller, place.is_partial = _line(thread, 1), bool(main.no_stacks or (kind == "hidden" and any(map(_line_of, thread.frames[:1]))))
    place.alone = kind == "network" and bool(place.line) and not any("/torch/distributed/" in frame.file for frame in thread.frames)
    place.evidence += _evidence(thread)
    # It waits, but looks again and again whether the others are there, as in init_process_group, in all of MPI and of our engine.
    is_ours = thread.busy < _IDLE and any("/collective_core/" in frame.file for frame in thread.frames)
    polls = is_ours or thread.call.endswith("nanosleep") or operation.endswith("_group") or "MPI" in operation
    # So does one that sleeps in a loop until something is there, or a client.
    spins = (kind in WAITS and (polls or thread.busy > _BUSY)) or (kind in ("sleep", "client") and thread.busy < _IDLE)
    place.moves = kind == "busy" or (kind != "stopped" and (main.moves or (thread.switches > _MOVES and not spins)))
    if kind in ("loader", "child"):
        workers = [(each, *_kind(each.threads[0])) for each in rank.processes if each.parent == main.pid]
        for worker, of_worker, what in sorted(workers, key=lambda each: _ORDER.index(each[1]))[:1]:
            first, at = worker.threads[0], _line(worker.threads[0])
            place.doing += f"{' from' if kind == 'loader' else ':'} process {worker.pid}, which {_doing(of_worker, what, first)}" + (
                f" ({at})" if at else ""
            )
            place.evidence += [f"process {worker.pid}: {each}" for each in _evidence(first)]
            place.moves = place.moves or first.switches > _MOVES
    if kind in ("loader", "child", "lock", "sleep"):
        started = (each for process in rank.processes if process is not main for each in process.threads)
        place.moves = place.moves or any(map(_goes_on, started))
    if kind in ("lock", "sleep"):
        others = [each for each in main.threads[1:] if _line(each)]
        place.evidence += [f"thread {each.name}: {_doing(*_kind(each), each)} at {_line(each)}" for each in others]
        # Native threads that wait, such as those of NCCL, may keep a core at work.
        place.moves = place.moves or any(
            _goes_on(each) for each in main.threads[1:] if kind == "sleep" or each.frames or not _is_busy(each)
        )
    place.evidence = place.evidence[:_MAX_EVIDENCE]
    place.evidence += [*main.lacks, *([f"process {main.tracer} traces it"] if main.tracer else [])]
    place.evidence += [f"no {'native ' * bool(thread.frames)}stack: {main.no_stacks}"] if main.no_stacks else []
    return place


def _is_busy(thread: Thread) -> bool:
    return thread.busy > _BUSY or thread.state == "R"


def _goes_on(thread: Thread) -> bool:
    """Whether a thread is at work or gets data, and does not only look again and again whether something has happened."""
    return _is_busy(thread) or (thread.switches > _MOVES and _call(thread)[0] not in _LOOKS)


def _call(thread: Thread) -> tuple[Kind, str]:
    """(what a thread's system call says that it does, the call)"""
    call = thread.call or thread.waits_in
    found: Kind = next((kind for pattern, kind in _CALLS.items() if re.fullmatch(pattern, call)), "unknown")
    if thread.peer.endswith(":0"):  # the port of no peer: a socket that listens
        found = "client"
    elif thread.target.startswith("socket:") and found != "client":
        found = "network"
    return found, call


def _kind(thread: Thread) -> tuple[Kind, str]:
    """(what a thread does, the call that says so)"""
    if thread.state in ("T", "t"):
        return "stopped", ""
    for kind in _STACKS:
        fitting = [frame for frame in _frames(thread) if any(each.kind == kind and each.fits(frame) for each in _known().operations)]
        if fitting:
            return kind, _operation(fitting, thread) if kind == "collective" else _plain(fitting[0])
    if thread.state == "D":
        return "disk", thread.call
    found, call = _call(thread)
    if found not in ("file", "lock", "network", "client") and (thread.busy > _BUSY or thread.state == "R"):
        return "busy", ""
    if found == "hidden" and thread.frames and "/torch/" in thread.frames[0].file:
        call = _plain(thread.frames[0])  # without the calls of native code: an operation of a process group, or work of other threads
    elif found == "hidden" and thread.frames and not _is_in_executor(thread):
        found = "lock" if call.startswith("futex") else "unknown"
    return found, call


def _is_in_executor(thread: Thread) -> bool:
    """Whether the program has called a library of `_EXECUTORS`, and nothing of its own since."""
    return any(_EXECUTORS.search(frame.file) for frame in takewhile(lambda frame: not _is_of_program(frame), _frames(thread)))


def _operation(fitting: Sequence[Frame], thread: Thread) -> str:
    """The operation as the program calls it: the outermost of the calls that fit, in Python where there is one, else the one of a library,
    or the Python function that is in native code."""
    native = [frame for frame in fitting if re.match("P?MPI_|r?nccl", frame.name)]
    called = [frame for frame in fitting if _line_of(frame)] or native or [frame for frame in _frames(thread) if _line_of(frame)][:1]
    named = [name for name in map(_plain, called or fitting) if name not in ("wrapper", "<module>", "__call__", "inner")]
    return named[-1] if named else "an operation"


def _plain(frame: Frame) -> str:  # ``__next__`` of ``_BaseDataLoaderIter.__next__``
    return frame.name.rpartition(".")[2] if _line_of(frame) else frame.name


def _frames(thread: Thread) -> tuple[Frame, ...]:
    """The stack; of a process that multiprocessing has forked without what its parent did before."""
    for at, frame in enumerate(thread.frames):
        if frame.file.endswith("/multiprocessing/process.py") and _plain(frame) == "_bootstrap":
            return thread.frames[:at]
    return thread.frames


def _line(thread: Thread, depth: int = 0) -> str:
    """The innermost line of the program itself, Python that is in no package; with ``depth`` 1 the one that called it."""
    lines = [_line_of(frame) for frame in _frames(thread) if _is_of_program(frame)]
    return next(iter(lines[depth:]), "")


def _is_of_program(frame: Frame) -> bool:
    return bool(_line_of(frame)) and not _LIBRARIES.search(frame.file)


def _line_of(frame: Frame) -> str:
    """``train.py:88`` of Python; empty of native code: a library, or a source file of another language."""
    file = PurePosixPath(frame.file)
    return f"{file.name}:{frame.line}" if frame.line and file.suffix in (".py", "") else ""


def _doing(kind: Kind, operation: str, thread: Thread) -> str:
    of = f" of {thread.target}" if thread.target and not thread.target.startswith("anon_inode") else ""
    held = f", which process {thread.holder} holds" if thread.holder else ""
    said: dict[Kind, str] = {
        "collective": f"waits for other ranks in {operation}",
        "network": f"waits in {operation}{f' for {thread.peer}' if thread.peer else ''}",
        "client": f"waits in {operation} for a client",
        "hidden": f"waits in {operation}, for what cannot be read",
        "stopped": "is stopped" if thread.state == "T" else "is stopped by a debugger",
        "disk": f"is in {operation or 'the kernel'}{of}, which cannot be interrupted",
        "file": f"waits in {operation}{of}",
        "lock": f"waits for a lock in {operation}{of if thread.call in ('flock', 'fcntl') else ''}{held}",
        "loader": f"waits for data in DataLoader.{operation}",
        "child": f"waits in {operation} for a process that it has started",
        "sleep": "sleeps",
        "busy": "is at work",
    }
    return said.get(kind, f"is in {operation or 'a place that cannot be read'}")


def _evidence(thread: Thread) -> Iterator[str]:
    """What shows where a thread is."""
    if thread.frames:
        calls = [f"{frame.name} ({_line_of(frame)})" for frame in _frames(thread) if _line_of(frame)]
        yield "stack: " + " ← ".join(calls[:8]) if calls else f"native stack: {' ← '.join(frame.name for frame in thread.frames[:5])}"
    if thread.call or thread.waits_in:
        on = f" on {thread.target}" if thread.target else ""
        yield f"system call: {thread.call or '?'}{on}; state {thread.state}, in the kernel {thread.waits_in or '?'}"
    if thread.socket:
        yield f"socket: {thread.socket}"
    yield f"processor: {100 * thread.busy:.0f} % of a core, {thread.switches} switches"


def grouped(places: Iterable[Place]) -> list[list[Place]]:
    """The ranks that stand at the same place together."""
    groups: dict[tuple[str, str, str], list[Place]] = defaultdict(list)
    for place in places:
        groups[place.kind, place.at, place.line].append(place)
    return list(groups.values())


def says(group: Sequence[Place], *, calls: bool = False) -> str:
    """``rank 5 on node3 waits in open of /data/x at train.py:88``, of ranks that stand at the same place.

    ``calls``: also which line has called that, as where it is in another file: a helper's line alone says little.
    """
    hosts = sorted({place.host for place in group})
    doing, many = group[0].doing, {"waits": "wait", "is": "are", "sleeps": "sleep"}
    doing = doing if len(group) == 1 else re.sub(r"^\w+", lambda verb: many.get(verb[0], verb[0]), doing)
    on = f" on {folded(hosts)}" if len(hosts) <= 4 else ""
    line, callers = group[0].line, {place.caller for place in group}
    is_named = len(callers) == 1 and (caller := group[0].caller) and (calls or caller.partition(":")[0] != line.partition(":")[0])
    called = f", called at {group[0].caller}" if is_named else ""
    return f"{_ranks([place.rank for place in group])}{on} {doing}" + (f" at {line}{called}" if line else "")


def _says_of_callers(places: Sequence[Place]) -> str:
    """The same, by the lines that have called the one at which the ranks wait."""
    callers = sorted({place.caller for place in places})[:4]
    return "; ".join(says([place for place in places if place.caller == caller], calls=True) for caller in callers)


def _said(places: Sequence[Place]) -> str:
    return "; ".join(says(group) for group in grouped(places)[:4])


def _others(waiting: Sequence[Place], count: int) -> str:
    who = f"the other {len(waiting)} ranks wait" if len(waiting) > 1 else f"{_ranks([waiting[0].rank])} waits"
    where = {f"{re.sub('^waits (for other ranks )?', '', each.doing)}{f' at {each.line}' if each.line else ''}" for each in waiting}
    return f"{who} for {'it' if count == 1 else 'them'} {', '.join(sorted(where)[:3])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {folded([str(rank) for rank in ranks]).strip('[]')}"
