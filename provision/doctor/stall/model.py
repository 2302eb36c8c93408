"""Models of what hosts say of a job's ranks, within bounds that no honest host leaves, and of the verdict on the job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from provision.base.validation import MAX_COUNT, Answer

_Text = Annotated[str, Field(max_length=600)]  # hosts send 300 letters, to which `parse_answer` adds spaces
_Count = Annotated[int, Field(ge=0, le=1 << 40)]
_Rank = Annotated[int, Field(ge=0, le=MAX_COUNT)]

#: What a rank does. Those in `WAITS` wait for other ranks, or for clients, as far as can be seen; the others are what those may wait for.
Kind = Literal[
    "collective", "network", "client", "hidden", "stopped", "disk", "file", "lock", "loader", "child", "sleep", "busy", "unknown"
]
WAITS: tuple[Kind, ...] = ("collective", "network", "client", "hidden")


class Frame(Answer):
    """A call on a stack. ``line``: 0 where it is not known, as of native code without debugging symbols."""

    name: _Text
    file: _Text
    line: _Count = 0


class Thread(Answer):
    """A thread: its stack, the innermost call first, and its system call.

    Attributes:
        busy, switches: its share of a core while it was watched, and how often it was given to or taken from a core.
        waits_in: the kernel's function in which it waits.
        target: the file, with its file system, pipe or socket of its system call; ``peer`` and ``socket``: the other end, and all of it.
        holder: the process that holds the lock which it waits for.
    """

    tid: _Count
    name: _Text = ""
    state: _Text = ""
    busy: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    switches: _Count = 0
    waits_in: _Text = ""
    frames: Annotated[tuple[Frame, ...], Field(max_length=60)] = ()
    call: _Text = ""
    target: _Text = ""
    peer: _Text = ""
    socket: _Text = ""
    holder: _Count | None = None


class Process(Answer):
    """``threads``: the main thread first. ``no_stacks``: why there are none, or none of native code. ``tracer``: the process that traces
    it, 0 without one. ``moves``: its main thread was at another line seconds later, or our engine has begun another operation.
    ``operations``: what our engine, or PyTorch's NCCL, runs in it. ``unanswered``: its connections of which the peer does not acknowledge
    what is sent to it again and again. ``lacks``: full disks, memory that it waits for, and errors of GPUs."""

    pid: _Count
    parent: _Count = 0
    tracer: _Count = 0
    operations: _Text = ""
    unanswered: Annotated[tuple[_Text, ...], Field(max_length=4)] = ()
    lacks: Annotated[tuple[_Text, ...], Field(max_length=4)] = ()
    threads: Annotated[tuple[Thread, ...], Field(min_length=1, max_length=48)]
    no_stacks: _Text = ""
    moves: bool = False


class Rank(Answer):
    """A rank: its first process and what that started, how many ranks its launcher has started on its host (``local``, 0 where that is
    not known), and since when it runs, in seconds since 1970."""

    rank: _Rank
    ranks: _Rank
    job: _Text
    local: _Rank = 0
    began: _Count = 0
    processes: Annotated[tuple[Process, ...], Field(min_length=1, max_length=24)]


class HostAnswer(Answer):
    """A host's answer. ``missing``, ``refused``: processes that were named and do not exist, or that only another user may read."""

    ranks: Annotated[tuple[Rank, ...], Field(max_length=256)] = ()
    missing: tuple[_Count, ...] = ()
    refused: tuple[_Count, ...] = ()


class Place(BaseModel):
    """Where one rank stands.

    Attributes:
        doing, line: what it does there, such as ``waits in read of /data/x``, and the innermost line of the program itself, such as
            ``train.py:88``; empty where no stack was read.
        at: what ranks at the same place have in common: ``doing`` without the peer or the process that they wait for.
        caller: the line of the program that called the innermost one.
        is_partial: what native code does there was not read.
        alone: it waits at a socket, and its stack says that this is the program's own: for a server, not for another rank.
        evidence: what shows it, line by line.
        holder: the process that holds the file lock which it waits for.
        unanswered: a connection of which the peer does not answer.
        lacks: what its host or control group lacks, which may be why.
        moves: whether it is at work, or went on while it was watched.
    """

    rank: int
    host: str
    pid: int
    kind: Kind
    doing: str
    at: str = ""
    line: str = ""
    caller: str = ""
    is_partial: bool = False
    alone: bool = False
    evidence: list[str] = Field(default_factory=list)
    holder: int | None = None
    unanswered: str = ""
    lacks: tuple[str, ...] = ()
    moves: bool = False


class Verdict(BaseModel):
    """What keeps a job: one paragraph, the ranks at fault, where all ranks stand, and what to do next.

    Attributes:
        began: in seconds since 1970.
        state: it moves; ranks wait for others that are at work, which may be slow or in a loop without end; or it is stalled.
        suspects: the ranks that others wait for; all of a disagreement; empty where it cannot be said.
        missing: ranks that no host has.
    """

    job: str
    began: int
    said: str
    state: Literal["moves", "works", "stalled"]
    suspects: list[int] = Field(default_factory=list)
    missing: list[int] = Field(default_factory=list)
    places: list[Place]
    steps: list[str] = Field(default_factory=list)


class Document(BaseModel):
    """What ``--json`` prints. ``failed``: host → why it could not be looked at."""

    schema_number: Literal[1] = Field(1, alias="schema")
    jobs: list[Verdict]
    failed: dict[str, str] = Field(default_factory=dict)
