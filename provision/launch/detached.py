"""Detached jobs: started, found again, followed and ended from any machine that has the inventory; and files that are fetched from hosts.

All that is known of the jobs is on their first hosts (`hostside/detached.py`), and data: another user, or the host, may have written it.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import secrets
import shlex
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from provision.base import resources, signals
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.base.validation import MAX_COUNT
from provision.launch import jobs
from provision.launch.jobs import Job, JobResult, Verdict
from provision.remote import ssh
from provision.remote.session import RUN_ID, Session

_START_S, _LOOK_S, _CANCEL_S = 130.0, 60.0, 120.0
_TRIES, _PAUSE_S = 30, 10  # in a row to continue a log, and how far they are apart at most
_DAMAGED = (tarfile.TarError, EOFError)
_MAX_GREETING = 1000  # lines of a login shell before the answer
_ROOM = 1 << 30  # bytes that fetched files leave free
_Word = Annotated[str, Field(max_length=4096)]


class DetachedJob(BaseModel):
    """A job as its first host has it, or of another job, its claim (``attached``).

    ``placed``, ``names``: (address, ranks) of its hosts, and address → name. ``host``: by whose name it was found. ``since``: of the epoch.
    """

    model_config = ConfigDict(strict=True)

    job: Annotated[str, Field(pattern=f"^{RUN_ID.pattern}$")]
    state: Literal["starting", "waiting", "running", "ended", "killed", "attached"]
    user: _Word
    program: _Word = "-"
    since: Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)] | None = None
    placed: tuple[tuple[_Word, Annotated[int, Field(ge=1, le=MAX_COUNT)]], ...] = ()
    names: dict[str, _Word] = {}
    workdir: _Word = ""
    host: str = ""
    waiting: Verdict | None = None
    outcome: JobResult | None = None
    cancelled: bool = False

    @property
    def hosts(self) -> list[str]:
        return [self.names.get(address, address) for address, _ in self.placed] or [self.host]

    @property
    def as_job(self) -> Job:
        return Job((), host=self.host, names=self.names)

    @property
    def shown(self) -> str:
        """Its state, for people."""
        if self.waiting is not None:
            return f"waiting: {jobs.describe(self.waiting, self.as_job)}"
        if self.state == "ended" and self.outcome is not None:
            return "cancelled" if self.cancelled else f"failed, exit code {self.outcome.code}" if self.outcome.code else "done"
        return self.state


def look(visitor: ssh.Caller, hosts: Iterable[str]) -> tuple[list[DetachedJob], dict[str, str]]:
    """(the jobs on hosts, the newest first; host → why it is not known what runs there)."""
    scripts = dict.fromkeys(hosts, resources.inline_command("detached.py", "list"))
    answers = ssh.look(visitor, scripts, threading.Event(), dict.fromkeys(scripts, _LOOK_S))
    found = dict[str, DetachedJob]()
    for host, answer in answers.items():
        for line in answer.body.splitlines():
            with contextlib.suppress(ValidationError):  # of another version, or user
                job = DetachedJob.model_validate_json(line).model_copy(update={"host": host})
                if job.job not in found or found[job.job].state in ("attached", "killed"):
                    found[job.job] = job
    failed = {host: answer.error for host, answer in answers.items() if answer.code != 0}
    return sorted(found.values(), key=lambda job: job.job, reverse=True), failed


def start(session: Session, job: Job, about: Mapping[str, JsonValue]) -> DetachedJob:
    """Start a job that goes on without us; returns when it has begun or waits. Raises ProvisionError where it failed, or is unknown."""
    mark, name = f"===PROVISION-JOB-ENDED-{secrets.token_hex(8)}===", session.run_id
    order = {"about": {"job": name, **about}, "script": resources.script("job.py"), "order": job.order(mark), "mark": mark}
    keeper = resources.inline_command("detached.py", "start", name, interpreter=shlex.quote(job.python))
    # The keeper has a mark of its own: what has the job's is ended with the job.
    script = {job.host: f"exec env PROVISION_RUN_ID={name}-keeper {keeper}"}
    try:
        answer = ssh.run(session, script, stdin=f"{json.dumps(order)}\n".encode(), timeout=_START_S)[job.host]
    except Interrupted:
        # Not as a part of this run, which is what is ended.
        cancel(ssh.Visitor(session.inventory, session.passwords), job.host, name, [host.name for host in session.inventory.hosts])
        raise
    try:
        found = DetachedJob.model_validate_json(answer.body).model_copy(update={"host": job.host})
    except ValidationError:
        hint = f"whether it runs: provision jobs {session.inventory.argument}"
        raise ProvisionError(f"the job cannot be left to its first host: {answer.error}", where=job.host, hint=hint) from None
    if found.outcome is not None and found.outcome.verdict is not None and found.outcome.verdict.kind == "busy":
        raise ProvisionError(jobs.describe(found.outcome.verdict, job), hint=jobs.BUSY)
    if found.state == "killed" or (found.outcome is not None and found.outcome.code):
        raise ProvisionError(f"the job is over: {found.shown}", where=job.host, hint=f"provision logs {name}")
    return found


def attach(session: Session, job: Job, title: str, log: Path, on_line: Callable[[str], None], *, name: str, wait: bool) -> JobResult | None:
    """Hand on the output of a detached job from its begin, and how it ended; None where it goes on, which with ``wait`` is waited for.

    Raises:
        ProvisionError: its host cannot be reached any more, or its keeper was killed.
        Interrupted: after Ctrl-C, or where the job was cancelled.
    """
    session.progress.stage(title)
    offset, tries, answer, said, is_over = 0, 0, "", "", threading.Event()

    def take(line: str) -> None:
        nonlocal offset, answer, said
        _, is_ours, rest = line.partition(f"{ssh.ANSWER} ")
        head, _, text = rest.partition(" ")
        if head == "=":
            answer = text
        elif re.fullmatch(r"\d{1,15}", head):
            offset = int(head)
            file.write(text + "\n")
            try:
                on_line(text)
            except BaseException:  # it can no longer be shown
                is_over.set()
                raise
        elif not is_ours:
            said = line or said

    def hold(_: IO[bytes]) -> None:  # the reader ends with its input
        is_over.wait()

    with log.open("w", encoding="utf-8", newline="\n") as file, signals.as_event() as interrupted:
        while not answer and not interrupted.is_set() and tries < _TRIES:
            begin, words = offset, ("follow", name, str(offset), str(int(wait)))
            reader = f"env PROVISION_RUN_ID={session.run_id} {resources.inline_command('detached.py', *words)}"
            code = ssh.stream(session, job.host, reader, hold, take, interrupted.is_set)
            tries = _TRIES if 0 < code < ssh.UNREACHABLE else 0 if offset > begin else tries + 1
            if not answer:
                session.progress.line(f"the connection to {job.host} has ended ({said}); trying again")
                interrupted.wait(min(tries, _PAUSE_S))
        is_over.set()
    goes_on = f"the job goes on: provision logs -f {name}, provision cancel {name}"
    if not answer and interrupted.is_set():
        raise Interrupted("interrupted", hint=goes_on)
    try:
        found = DetachedJob.model_validate_json(answer)
    except ValidationError:
        raise ProvisionError(f"the output cannot be read further: {said}", where=job.host, hint=goes_on) from None
    if found.cancelled:
        raise Interrupted(f"the job {name} was cancelled")
    if found.state == "killed":
        raise ProvisionError("the job's keeper was killed, and the job with it; or the host was restarted", where=job.host)
    return found.outcome


def cancel(visitor: ssh.Caller, host: str, name: str, hosts: Iterable[str]) -> dict[str, str]:
    """End a job on its first host, and what is left of it on its ``hosts``; host → why it is not known that nothing is."""
    sweeps = {each: resources.inline_command("guard.py", name) for each in hosts}
    keeper = resources.inline_command("guard.py", f"{name}-keeper")
    sweeps[host] = f"{resources.inline_command('detached.py', 'cancel', name)}; {keeper}; {sweeps[host]}"
    with signals.as_event():  # a second Ctrl-C must not stop it half-way
        answers = ssh.look(visitor, sweeps, threading.Event(), dict.fromkeys(sweeps, _CANCEL_S))
    return {each: answer.error for each, answer in answers.items() if answer.code != 0}


def fetch(visitor: ssh.Caller, host: str, path: str) -> str:
    """Copy a file or folder of a host to here, without links, which may lead to the user's own files, and special files; its name.

    Raises:
        UsageError: its name is invalid, or here already.
        ProvisionError: it could not be read completely, or leaves too little room here.
    """
    parent, name = posixpath.split(posixpath.normpath(path))
    if not hasattr(tarfile, "data_filter"):
        raise UsageError("fetch needs Python 3.10.12, 3.11.4 or newer on this machine", hint=f"scp -r {host}:{path} .")
    if name in ("", ".", "..") or os.path.lexists(name):
        raise UsageError(f"invalid path {path}: expected the path of a file or folder whose name is not here yet")

    def checked(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        if f"{posixpath.normpath(member.name)}/".partition("/")[0] != name or member.size > shutil.disk_usage(place).free - _ROOM:
            raise ProvisionError(f"{member.name}: not what was requested, or too large for this disk", where=host)
        return tarfile.data_filter(member, place) if member.isreg() or member.isdir() else None

    # 1: a file changes meanwhile, as a running job's do.
    script = f"echo; echo {ssh.ANSWER}; cd; tar -c -f - -C {shlex.quote(parent or '.')} {shlex.quote(f'./{name}')}; [ $? -le 1 ]"
    argv, variables = ssh.login(visitor.inventory.host(host), f"/bin/sh -c {shlex.quote(script)}", visitor.passwords.get("connection"))
    more, null = {**os.environ, **variables}, subprocess.DEVNULL
    with subprocess.Popen(argv, env=more, stdin=null, stdout=subprocess.PIPE, stderr=null) as process, contextlib.suppress(*_DAMAGED):
        pipe = cast(IO[bytes], process.stdout)
        try:
            greeting = islice(iter(lambda: pipe.readline(1 << 16), b""), _MAX_GREETING)
            next((line for line in greeting if line.strip() == ssh.ANSWER.encode()), None)
            with tarfile.open(fileobj=pipe, mode="r|") as archive:
                archive.extractall(".", filter=checked)  # noqa: S202  the filter keeps them in the folder
        except BaseException:
            process.kill()  # it need not end by itself
            raise
    if process.returncode or not os.path.lexists(name):
        raise ProvisionError(f"{path} cannot be read completely", where=host, hint=f"what there is: provision ssh {host} -- ls -lR {path}")
    return name
