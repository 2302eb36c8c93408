"""Models of what hosts say of a job's ranks, within bounds that no honest host leaves, and of the verdict on the job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from provision.base.validation import MAX_COUNT, Answer

_Text = Annotated[str, Field(max_length=300)]
_Count = Annotated[int, Field(ge=0, le=1 << 40)]
_Rank = Annotated[int, Field(ge=0, le=MAX_COUNT)]

#: What a rank does. The first two wait for other ranks; the others are what those may wait for.
Kind = Literal["collective", "network", "stopped", "disk", "file", "lock", "loader", "child", "sleep", "busy", "unknown"]


class Frame(Answer):
    """A call on a stack. ``line``: 0 where it is not known, as of native code without debugging symbols."""

    name: _Text
    file: _Text
    line: _Count = 0


class Thread(Answer):
    """A thread: its stack, the innermost call first, and its system call.

    Attributes:
        busy: its share of a core while it was watched.
        switches: how often it was given to or taken from a core in that time.
        waits_in: the kernel's function in which it waits.
        target: the file, pipe or socket of its system call, with its file system or the other end.
        holder: the process that holds the lock which it waits for.
    """

    tid: _Count
    name: _Text = ""
    state: _Text = ""
    busy: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    switches: _Count = 0
    waits_in: _Text = ""
    kernel: Annotated[tuple[_Text, ...], Field(max_length=8)] = ()
    frames: Annotated[tuple[Frame, ...], Field(max_length=60)] = ()
    call: _Text = ""
    target: _Text = ""
    filesystem: _Text = ""
    source: _Text = ""
    peer: _Text = ""
    local: _Text = ""
    socket: _Text = ""
    unsent: _Count = 0
    unread: _Count = 0
    holder: _Count | None = None


class Process(Answer):
    """``no_stacks``: why there are none; ``tracer``: the process that traces it, 0 without one."""

    pid: _Count
    parent: _Count = 0
    command: Annotated[tuple[_Text, ...], Field(max_length=12)] = ()
    tracer: _Count = 0
    threads: Annotated[tuple[Thread, ...], Field(max_length=48)] = ()
    no_stacks: _Text = ""


class Rank(Answer):
    """A rank: its first process and what that started; ``left``: how many processes were not looked at."""

    rank: _Rank
    ranks: _Rank
    job: _Text
    processes: Annotated[tuple[Process, ...], Field(max_length=24)] = ()
    left: _Count = 0


class HostAnswer(Answer):
    """A host's answer. ``there``: whether the process that was asked for exists."""

    ranks: Annotated[tuple[Rank, ...], Field(max_length=256)] = ()
    uid: _Count = 0
    there: bool = True


class Place(BaseModel):
    """Where one rank stands.

    Attributes:
        doing: what it does there, such as ``waits in all_reduce``.
        line: the innermost line of the program itself, such as ``train.py:88``; empty where no stack was read.
        evidence: what shows it, line by line.
    """

    rank: int
    host: str
    pid: int
    kind: Kind
    doing: str
    line: str = ""
    evidence: list[str] = Field(default_factory=list)

    @property
    def waits_for_ranks(self) -> bool:
        """Whether it waits for other ranks, as far as its place says."""
        return self.kind in ("collective", "network")


class Verdict(BaseModel):
    """What keeps a job: one paragraph, who is at fault, and where all ranks stand.

    Attributes:
        suspects: the ranks that others wait for; all of a disagreement; empty where it cannot be said.
        missing: ranks that no host has.
        stalled: whether some rank waits for another.
        excluded: what it is not, where no suspect is left.
    """

    job: str
    said: str
    stalled: bool
    suspects: list[int] = Field(default_factory=list)
    missing: list[int] = Field(default_factory=list)
    places: list[Place] = Field(default_factory=list)
    excluded: list[str] = Field(default_factory=list)
