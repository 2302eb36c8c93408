"""Starts a program on one host and streams its output: over ssh with the inventory's own settings, or here for ``localhost``.

Ansible cannot stream; a training job must. Host keys are checked as the inventory and the user's ssh configuration say; nothing
secret is put on a command line: what the program needs travels through its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import IO, Any, Literal, cast, get_args

from provision.base import resources, signals
from provision.inventory import Host

_END_S = 30.0  # for the job to end itself on all hosts before ssh is killed
_BEAT_S = 5.0  # how often the job hears that we are there
#: A master of ssh that outlives the job would hold its output open, one that is there already could be stopped or cut off.
_OWN_CONNECTION = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
_LONGEST_LINE = 1 << 20  # bytes; longer ones come in parts

Kind = Literal["ended", "launcher", "orphaned", "stopped", "silent", "lost", "unreachable", "refused", "controller", "gone"]


@dataclass(frozen=True)
class Verdict:
    """What ended a job first, by its facts.

    ``kind``: ``ended`` (a rank, with ``code``), ``launcher`` (it was itself ended, by a signal), ``orphaned`` (ranks of a host, by the
    end of the launcher's process there), ``stopped`` (a rank, or with None a process of the launcher, for ``seconds``), ``silent`` and
    ``lost`` (a host), ``unreachable`` (a host, before anything was started), ``refused`` (a host, whose guard has said why it cannot take
    part), ``controller`` (we, for ``seconds``), ``gone`` (the first host, or our job there, without a word). ``host``: as the job calls
    it; empty for the first one. ``code``: of the process, negative for a signal. ``said``: by ssh or the host.
    """

    kind: Kind
    host: str
    rank: int | None = None
    code: int = 0
    seconds: float = 0.0
    name: str = ""
    pid: int = 0
    said: Sequence[str] = ()


@dataclass(frozen=True)
class JobResult:
    """How a job ended: its exit code, its report, whether it was interrupted, and what ended it first, as far as that is known.

    ``last``: what it printed after an interrupt, which is about that.
    """

    code: int
    report: dict[str, Any] | None
    interrupted: bool
    verdict: Verdict | None = None
    last: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """What to run.

    In ``argv``, ``program`` and ``ssh``, ``{job}`` stands for the job's private folder on its hosts, ``{home}`` for the user's home; in
    ``argv`` also ``{shm}`` for the private folder in shared memory, ``{run}`` for the run's id. ``files`` are written into the job's
    folder first. ``:{inherited}`` at the end of a value of ``environment`` stands for what the variable holds there already.
    ``program``: what `RANK`, which the launcher starts, runs. ``hosts``: the others that take part, reached with ``ssh``; each gets a
    guard and the folders, and the job ends when one is lost. ``names``: what people call those of them whose name is no address.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    report: str | None = None
    program: Sequence[str] = ()
    hosts: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    ssh: Sequence[str] = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *_OWN_CONNECTION)


#: What runs ``Job.program`` on a host with Python before it, and notes how it ended.
RANK = "{job}/rank.py"


def ssh_argv(host: Host) -> list[str]:
    """The ssh command line up to the host, from the variables that Ansible would use."""
    variables = host.variables
    argv = [str(variables.get("ansible_ssh_executable", "ssh")), "-o", "ConnectTimeout=10", *_OWN_CONNECTION]
    argv += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    for name in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
        argv += shlex.split(str(variables.get(name, "")))
    if host.key_file:
        argv += ["-i", os.path.expanduser(host.key_file)]
    if host.port:
        argv += ["-p", str(host.port)]
    if host.user:
        argv += ["-l", host.user]
    return [*argv, host.address]


def login(host: Host, command: str, password: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The argv that runs a shell command on ``host``, and what must be added to its environment.

    For a password, the program that types it, which reads it from its environment; else a login that asks nothing.
    """
    if host.connection == "local":
        return ["sh", "-c", command], {}
    known = password or host.variables.get("ansible_password") or host.variables.get("ansible_ssh_pass")
    if known:
        return ["sshpass", "-e", *ssh_argv(host), command], {"SSHPASS": str(known)}
    return [*ssh_argv(host)[:-1], "-o", "BatchMode=yes", host.address, command], {}


def run_job(
    host: Host, job: Job, *, python: str, run_id: str, on_line: Callable[[str], None], password: str | None = None, inside: str = ""
) -> JobResult:
    """Run ``job`` on ``host`` and hand on each line of its output as it comes, until it is interrupted.

    ``inside``: words of the shell before the command, with which it runs in a container there.

    Ctrl-C, SIGTERM and SIGHUP close the job's standard input, on which it ends itself; so does the death of this process.
    """
    command = f"{inside} env PROVISION_RUN_ID={run_id} ".lstrip() + resources.inline_command("job.py", interpreter=shlex.quote(python))
    argv, environment = login(host, command, password)
    mark = f"===PROVISION-JOB-ENDED-{secrets.token_hex(8)}==="  # no rank can know it, whatever it prints
    order = asdict(job) | {"mark": mark, "python": python, "scripts": {name: resources.script(f"{name}.py") for name in ("guard", "rank")}}
    outcome = ""
    last: list[str] = []
    with signals.as_event() as interrupted:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # a Ctrl-C of the terminal must not kill ssh before the job has been ended through it
            bufsize=0,
        )
        with process, _beats(process, json.dumps(order), interrupted):
            for line in _lines(process, interrupted):
                text, is_end, after = line.partition(mark)
                outcome = after or outcome
                if text or not is_end:
                    (last.append if interrupted.is_set() else on_line)(text)
    try:
        return _result(outcome, interrupted.is_set(), last)
    except (ValueError, RecursionError):  # none, or none of job.py's
        gone = Verdict("gone", "", code=process.returncode)
        return JobResult(process.returncode or 1, None, interrupted.is_set(), gone, last)


def _result(outcome: str, interrupted: bool, last: Sequence[str]) -> JobResult:
    """What job.py says at the end; ValueError for all that it would not say, because the host may say anything."""

    def expect(holds: bool) -> None:
        if not holds:
            raise ValueError(outcome)

    def is_whole(thing: Any) -> bool:
        return isinstance(thing, int) and abs(thing) < 1e9

    ended = json.loads(outcome)
    expect(isinstance(ended, dict) and {*ended} == {"code", "verdict", "report"} and is_whole(ended["code"]))
    expect(ended["report"] is None or isinstance(ended["report"], dict))
    verdict = ended["verdict"]
    if verdict is not None:
        expect(isinstance(verdict, dict) and {"kind", "host"} <= {*verdict} <= {each.name for each in fields(Verdict)})
        verdict = Verdict(**verdict)
        expect(isinstance(verdict.kind, str) and verdict.kind in get_args(Kind))
        expect(isinstance(verdict.host, str) and isinstance(verdict.name, str))
        expect(is_whole(verdict.rank) if verdict.kind == "ended" else verdict.rank is None or is_whole(verdict.rank))
        expect(is_whole(verdict.code) and is_whole(verdict.pid))
        expect(isinstance(verdict.seconds, int | float) and abs(verdict.seconds) < 1e9)
        expect(isinstance(verdict.said, list | tuple) and all(isinstance(line, str) for line in verdict.said))
    return JobResult(ended["code"], ended["report"], interrupted, verdict, last)


@contextlib.contextmanager
def _beats(process: subprocess.Popen[bytes], order: str, interrupted: threading.Event) -> Iterator[None]:
    """Within the block the job, which gets ``order`` first, hears that we are there; its standard input closes after it, or on interrupt.

    From a thread: whoever takes the lines may wait for as long as a terminal is held or a pager is not read on.
    """
    stdin, over = cast(IO[bytes], process.stdin), threading.Event()

    def send(text: str) -> None:
        left = memoryview(text.encode() + b"\n")
        while left:
            left = left[stdin.write(left) :]

    def beat() -> None:
        last = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # ssh could not connect, or has ended; its message and exit code follow
            send(order)
            while not over.wait(0.2) and not interrupted.is_set():
                if time.monotonic() > last + _BEAT_S:
                    last = time.monotonic()
                    send("")
        stdin.close()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _lines(process: subprocess.Popen[bytes], interrupted: threading.Event) -> Iterator[str]:
    """The job's output line by line until it ends. On interrupt it gets ``_END_S`` to end itself."""
    stdout = cast(IO[bytes], process.stdout)
    deadline: float | None = None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            if interrupted.is_set() and deadline is None:
                deadline = time.monotonic() + _END_S
            if deadline is not None and time.monotonic() > deadline:
                process.kill()
            if not selector.select(timeout=0.2):
                continue
            data = os.read(stdout.fileno(), 65536)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                whole, rest = [*whole, rest], b""
            for line in whole:
                yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")
