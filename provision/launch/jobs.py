"""A job on hosts: what to run, how it is started on its first host and followed, and what ended it.

Everything that runs on the hosts is started by `hostside/job.py` there. The job ends when this process dies or is interrupted.
"""

from __future__ import annotations

import json
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from provision.base import resources, run_folders, signals
from provision.base.text import duration
from provision.launch.stall_watch import StallWatch
from provision.launch.stragglers import Window
from provision.remote import ssh
from provision.remote.session import Session

_LOG_TAIL, _LOG_TAIL_LINES = 1 << 16, 15  # bytes, and lines, of the log of a job that wrote no report
_END_S = 30.0  # for an interrupted or stalled job to end itself on all hosts
_HEARTBEAT_S = 5.0
#: Runs ``Job.program`` on a host, with Python before it, and notes how it ended.
RANK = "{job}/rank.py"
BUSY = "--wait waits for its end; --oversubscribe runs next to it"

Kind = Literal["ended", "launcher", "orphaned", "stopped", "silent", "lost", "unreachable", "refused", "busy", "controller", "gone"]
_Whole = Annotated[int, Field(gt=-1_000_000_000, lt=1_000_000_000)]


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Verdict:
    """What ended a job first.

    Attributes:
        kind: ``ended``: a rank, with ``code``. ``launcher``: the launcher, by a signal. ``orphaned``: ranks of a host, by the end of the
            launcher's process there. ``stopped``: a rank, or where that is None a
            process of the launcher, has been stopped for ``seconds``. ``silent``, ``lost``: a host. ``unreachable``, ``refused``, ``busy``
            (another job has it): a host, before the ranks started. ``controller``: the job heard nothing from here for ``seconds``.
            ``gone``: the connection to the first host, or our job there.
        host: address of the host; empty for the first one.
        code: exit code of the process, negative for a signal.
        output: what ssh or the host printed about it.
    """

    kind: Kind
    host: str
    rank: _Whole | None = None
    code: _Whole = 0
    seconds: Annotated[float, Field(lt=1e9, allow_inf_nan=False)] = 0.0
    name: str = ""
    pid: _Whole = 0
    output: tuple[str, ...] = ()


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Ended:
    """How a rank ended: with exit code ``code``, negative for a signal. ``host``: its address; empty for the first one."""

    rank: _Whole
    host: str
    code: _Whole


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class JobResult:
    """How a job ended, as the last line of job.py says it: its exit code, the report that it wrote, and what ended it first (if known).

    ``interrupted``: from here. ``ended``: of a job that failed, the ranks that have ended, the first of them first; none where nothing has
    recorded it.
    """

    code: _Whole
    report: dict[str, JsonValue] | None
    interrupted: bool = False
    verdict: Verdict | None = None
    ended: tuple[Ended, ...] = ()


class _Message(BaseModel):
    """A line of job.py: how many ranks have started, for how long none goes on, where their time has gone, or for what the job waits."""

    model_config = ConfigDict(strict=True, extra="forbid")

    quiet: Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)] | None = None
    host: str = ""
    ranks: Annotated[list[Window], Field(max_length=256)] = []
    waiting: Verdict | None = None
    started: Annotated[int, Field(ge=0, le=1_000_000)] = 0


@dataclass(frozen=True)
class Job:
    """What to run on hosts.

    In ``argv``, ``program`` and ``ssh``, ``{job}`` stands for the job's private folder on its hosts and ``{home}`` for the user's home; in
    ``argv`` also ``{shm}`` for the private folder in shared memory and ``{run}`` for the run's id.

    Attributes:
        argv: the launcher's command line, run on the first host.
        host: name of the first host in the inventory.
        python: interpreter for our scripts on all hosts.
        environment: ``:{inherited}`` at the end of a value stands for the variable's value there.
        free_ports: names of further variables, each of which gets a TCP port that is free on the first host.
        files: written into the job's folder first; one that begins with ``#!`` can be executed.
        report: name of the file in the job's folder that is read at the end.
        program: what `RANK` runs, which the launcher starts.
        hosts: addresses of the other hosts, reached with ``ssh``; the job ends when one of them is lost.
        names: address → name in the inventory.
        inside: words of the shell that run a command in the first host's container; empty without one.
        sample: seconds between two samples of what the ranks do; 0: none.
        shared: whether it runs next to other jobs, which see that it has the hosts; None: nothing is known of other jobs.
        wait: for other jobs that have a host, instead of ending with the verdict ``busy``.
        tuned: address of a host, empty for the first one → variables that its ranks get where they have none of the name.
    """

    argv: Sequence[str]
    host: str = "localhost"
    python: str = "python3"
    environment: Mapping[str, str] = field(default_factory=dict)
    free_ports: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    report: str | None = None
    program: Sequence[str] = ()
    hosts: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""
    sample: float = 0.0
    shared: bool | None = None
    wait: bool = False
    tuned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ssh: Sequence[str] = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *ssh.OWN_CONNECTION)

    def order(self, mark: str) -> str:
        """What job.py reads: one line of JSON. It prints ``mark`` before its outcome; ranks cannot know it."""
        scripts = {name: resources.script(f"{name}.py") for name in ("guard", "rank")}
        return json.dumps({**vars(self), "mark": mark, "scripts": scripts})


def run(
    session: Session,
    job: Job,
    title: str,
    log: Path,
    on_line: Callable[[str], None],
    noted: Callable[[str], str] = str,
    watch: StallWatch | None = None,
) -> JobResult:
    """Run a job and hand on each line of its output as it comes, until it is interrupted; ``log`` gets all of them.

    Ctrl-C, SIGTERM and SIGHUP close the job's standard input, on which it ends itself; so does the death of this process.

    Args:
        noted: what the log gets of a line.
        watch: watches for a stall, and may have the job ended, or its ranks started again.
    """
    session.progress.stage(title)
    mark = f"===PROVISION-JOB-ENDED-{secrets.token_hex(8)}==="
    command = (
        f"{job.inside} env PROVISION_RUN_ID={session.run_id} {resources.inline_command('job.py', interpreter=shlex.quote(job.python))}"
    )
    outcome, has_ended, restarts, deadline = "", threading.Event(), threading.Event(), None
    with log.open("w", encoding="utf-8") as file, signals.as_event() as interrupted:

        def take(line: str) -> None:
            nonlocal outcome
            text, is_end, after = line.partition(mark)
            outcome = after or outcome
            with suppress(ValidationError):
                message = _Message.model_validate_json(after) if is_end else _Message()
                if message.waiting is not None:
                    session.progress.line(f"waiting: {describe(message.waiting, job)}")
                if message.started and (ranks := sum(session.record.ranks.values())):
                    session.progress.starting(message.started, ranks)
                if watch is not None and message.quiet is not None:
                    watch.quiet(message.quiet)
                elif watch is not None and message.ranks and message.host in ("", *job.hosts):
                    watch.ranks(name_of(message.host, job), message.ranks)
            if text or not is_end:
                if watch is not None:
                    watch.line(text)
                file.write(noted(text) + "\n")
                file.flush()
                if not interrupted.is_set():
                    try:
                        on_line(text)
                    except BaseException:  # the output can no longer be shown: without heartbeats the job ends itself
                        has_ended.set()
                        raise

        def feed(pipe: IO[bytes]) -> None:
            """The order, then a line every few seconds: from a thread, because a terminal or pager may hold our output."""
            pipe.write(job.order(mark).encode())
            waited = _HEARTBEAT_S  # the order ends with the first of them
            while not interrupted.is_set() and not has_ended.is_set():
                is_restart = restarts.is_set()
                if waited >= _HEARTBEAT_S or is_restart:
                    if is_restart:
                        restarts.clear()  # where it was seen: it may be set again meanwhile
                    pipe.write(b"restart\n" if is_restart else b"\n")
                    pipe.flush()
                    waited = 0.0
                has_ended.wait(0.2)
                waited += 0.2

        def stopping() -> bool:
            nonlocal deadline
            if watch is not None and not interrupted.is_set() and not has_ended.is_set():
                watch.attend()
                action, watch.action = watch.action, None
                if action is not None:
                    (has_ended if action == "kill" else restarts).set()  # without heartbeats the job ends itself
                if action == "kill":
                    deadline = time.monotonic() + _END_S
            if interrupted.is_set() and deadline is None:
                deadline = time.monotonic() + _END_S
            return deadline is not None and time.monotonic() > deadline

        code = ssh.stream(session, job.host, command.lstrip(), feed, take, stopping)
        has_ended.set()
    try:
        return replace(TypeAdapter(JobResult).validate_json(outcome), interrupted=interrupted.is_set())
    except ValidationError:  # the host printed nothing, or something else
        return JobResult(code or 1, None, interrupted.is_set(), Verdict("gone", "", code=code))


def describe(verdict: Verdict, job: Job) -> str:
    """What ended a job, for people."""
    name = name_of(verdict.host, job)
    host = f"{name} ({verdict.host})" if verdict.host not in ("", name) else name
    rank, output = f"rank {verdict.rank} on {host}", f": {' / '.join(verdict.output)}" if verdict.output else ""
    ended = how_it_ended(verdict.code)
    # The kernel ends a process that has taken too much in this way and leaves no word about it with the process.
    memory = f"; often the kernel does that when memory runs out: `dmesg` on {name} says so" if verdict.code == -signal.SIGKILL else ""
    stopped = f"{rank if verdict.rank is not None else f'{verdict.name} on {host}'} has been stopped by a signal"
    silence = duration(verdict.seconds)
    return {
        "ended": f"rank {verdict.rank} on {name} {ended}{memory}",
        "launcher": f"the launcher on {host} {ended}",
        "orphaned": f"the launcher's process on {host} was killed, or has crashed",
        "stopped": f"{stopped} for {silence} (pid {verdict.pid}; kill -CONT would have continued it)",
        "silent": f"{host} has not answered for {silence}: it hangs, or the network to it is cut{output}",
        "lost": f"the connection to {host} has ended{output}",
        "unreachable": f"{host} cannot take part: it cannot be reached from the first host{output}",
        "busy": f"{host} is busy{output}",
        "refused": f"{host} cannot take part{output}",
        "controller": f"{host} has not heard from `provision` for {silence}: it was stopped (Ctrl-Z), or the network is cut",
        "gone": f"the connection to {host} has ended, or the job's process there was killed",
    }[verdict.kind]


def name_of(host: str, job: Job) -> str:
    """The name in the inventory of the host with that address."""
    return job.names.get(host, host) or job.host


def how_it_ended(code: int) -> str:
    """A process, in words: ``code`` is negative for a signal."""
    names: dict[int, str] = {each: each.name for each in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"


def no_report(result: JobResult, job: Job, log: Path) -> str:
    """The message for a job that ended without its report: why, and the end of its log."""
    lines = [line for line in run_folders.tail(log, _LOG_TAIL) if line.strip()][-_LOG_TAIL_LINES:]
    why = f" ({describe(result.verdict, job)})" if result.verdict else ""
    return "\n".join(
        [f"the job ended with exit code {result.code}{why} and wrote no report; its last lines:", *(f"    {line}" for line in lines)]
    )
