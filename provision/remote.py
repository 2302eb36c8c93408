"""Starts a program on one host and streams its output: over ssh with the inventory's own settings, or here for ``localhost``.

Ansible cannot stream; a training job must. Host keys are checked as the inventory and the user's ssh configuration say; nothing
secret is put on a command line: what the program needs travels through its standard input.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from provision import interrupts, resources
from provision.inventory import Host

REPORT_MARK = "===PROVISION-REPORT==="  # as hostside/job.py writes it
_END_S = 15.0  # for the job to end itself on all hosts before ssh is killed


@dataclass(frozen=True)
class JobResult:
    """How a job ended: its exit code (255: ssh itself failed), its report, and whether it was interrupted."""

    code: int
    report: dict[str, Any] | None
    interrupted: bool


@dataclass(frozen=True)
class Job:
    """What to run. In ``argv``, ``{job}`` stands for the job's private folder on the host, ``{home}`` for the user's home; ``files`` are
    written into the former first. ``:{inherited}`` at the end of a value of ``environment`` stands for what the variable holds there
    already."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    report: str | None = None


def ssh_argv(host: Host) -> list[str]:
    """The ssh command line up to the host, from the variables that Ansible would use."""
    variables = host.variables
    argv = [str(variables.get("ansible_ssh_executable", "ssh")), "-o", "ConnectTimeout=10"]
    # A connection of its own: a master that outlives the job would hold its output open.
    argv += ["-o", "ControlMaster=no", "-o", "ControlPath=none"]
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
    """Run ``job`` on ``host`` and hand on each line of its output as it comes.

    ``inside``: words of the shell before the command, with which it runs in a container there.

    Ctrl-C, SIGTERM and SIGHUP close the job's standard input, on which it ends itself; so does the death of this process.
    """
    command = f"{inside} env PROVISION_RUN_ID={run_id} ".lstrip() + resources.inline_command("job.py", interpreter=shlex.quote(python))
    argv, environment = login(host, command, password)
    order = {"argv": list(job.argv), "environment": dict(job.environment), "files": dict(job.files), "report": job.report}
    report: dict[str, Any] | None = None
    with interrupts.noted() as interrupted:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # a Ctrl-C of the terminal must not kill ssh before the job has been ended through it
        )
        with process:
            _send(process, order)
            for line in _lines(process, interrupted):
                if line.startswith(REPORT_MARK):
                    report = json.loads(line[len(REPORT_MARK) :])
                else:
                    on_line(line)
        return JobResult(process.returncode, report, interrupted.is_set())


def _send(process: subprocess.Popen[bytes], order: Mapping[str, Any]) -> None:
    stdin = cast(IO[bytes], process.stdin)
    try:
        stdin.write(json.dumps(order).encode() + b"\n")
        stdin.flush()
    except BrokenPipeError:
        return  # ssh could not connect; its message and exit code follow


def _lines(process: subprocess.Popen[bytes], interrupted: threading.Event) -> Iterator[str]:
    """The job's output line by line until it ends. On interrupt: standard input closes, and the job gets ``_END_S`` to end itself."""
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    deadline: float | None = None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            if interrupted.is_set() and deadline is None:
                stdin.close()
                deadline = time.monotonic() + _END_S
            if deadline is not None and time.monotonic() > deadline:
                process.kill()
            if not selector.select(timeout=0.2):
                continue
            data = os.read(stdout.fileno(), 65536)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")
