"""One shell command on many hosts at the same time, over ssh as in ssh.py (here for ``localhost``), and what each of them said.

For looks and small errands of commands that must start at once: a playbook takes seconds before its first task.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, cast

from provision.base import signals
from provision.remote import ssh
from provision.remote.session import Session

#: What scripts read: the same bytes everywhere, other ones on each host, or what a function writes to each of them.
Input = bytes | Mapping[str, bytes] | Callable[[IO[bytes]], None]

TIMEOUT_S = 60.0
_MOST_AT_ONCE = 64
_SSH_ITSELF = 255
_POLL_S = 0.2  # how soon an interrupt is noticed


@dataclass(frozen=True)
class Answer:
    """What the command came to on one host; ``code`` is None where it was not done in time. 255 is ssh's own."""

    code: int | None
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Why it failed, on one line: what was said last, else how it ended."""
        said = " ".join((self.err or self.out).split())[-500:]
        return said or ("it was not done in time" if self.code is None else f"exit code {self.code}")


def ask(session: Session, scripts: Mapping[str, str], *, stdin: Input = b"", timeout: float = TIMEOUT_S) -> dict[str, Answer]:
    """Run scripts of /bin/sh, one for each host that is named.

    Args:
        stdin: what each of them reads.
        timeout: seconds after which an answer is no longer waited for.

    Raises:
        Interrupted: after Ctrl-C, when everything has been ended.
    """
    with signals.as_event() as interrupted:
        answers = _all(session, scripts, stdin, timeout, interrupted)
    if interrupted.is_set():
        session.abort()
    return answers


def tidy(session: Session, scripts: Mapping[str, str], *, timeout: float = TIMEOUT_S) -> dict[str, Answer]:
    """The same for what puts things away: no signal ends it half-way."""
    with signals.as_event():
        return _all(session, scripts, b"", timeout, threading.Event())


def _start(session: Session, name: str, script: str) -> subprocess.Popen[bytes]:
    """Start a script of /bin/sh on a host, marked as of this run, as leader of a process group here.

    Raises:
        OSError: no ssh here, or no sshpass where a password is to be given.
    """
    command = f"env PROVISION_RUN_ID={session.run_id} /bin/sh -c {shlex.quote(script)}"
    argv, environment = ssh.login(session.inventory.host(name), command, session.passwords.get("connection"))
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def _all(
    session: Session,
    scripts: Mapping[str, str],
    stdin: Input,
    timeout: float,
    interrupted: threading.Event,
) -> dict[str, Answer]:
    def one(name: str) -> Answer:
        until = time.monotonic() + timeout
        try:
            process = _start(session, name, scripts[name])
        except OSError as error:
            return Answer(_SSH_ITSELF, "", str(error))
        return _attend(process, stdin.get(name, b"") if isinstance(stdin, Mapping) else stdin, until, interrupted)

    with ThreadPoolExecutor(min(len(scripts), _MOST_AT_ONCE) or 1) as pool:
        return dict(zip(scripts, pool.map(one, scripts), strict=True))


def _attend(
    process: subprocess.Popen[bytes], stdin: bytes | Callable[[IO[bytes]], None], until: float, interrupted: threading.Event
) -> Answer:
    with process:
        # By a thread of its own: what `communicate` has not sent when its time is over, it never sends.
        pipe, process.stdin = cast(IO[bytes], process.stdin), None
        failed: list[Exception] = []
        threading.Thread(target=_feed, args=(pipe, stdin, failed), daemon=True).start()
        while True:
            try:
                out, err = process.communicate(timeout=_POLL_S)
                if failed:
                    return Answer(process.returncode or 1, out.decode(errors="replace"), f"its input could not be read: {failed[0]}")
                return Answer(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
            except subprocess.TimeoutExpired:
                pass
            if interrupted.is_set() or time.monotonic() > until:
                os.killpg(process.pid, signal.SIGKILL)  # its children, too: they hold its output
                out, err = process.communicate()
                return Answer(None, out.decode(errors="replace"), err.decode(errors="replace"))


def _feed(pipe: IO[bytes], content: bytes | Callable[[IO[bytes]], None], failed: list[Exception]) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:  # it ended without having read everything
        if isinstance(content, bytes):
            pipe.write(content)
            return
        try:
            content(pipe)
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - of a thread: it is told in the answer
            failed.append(error)
