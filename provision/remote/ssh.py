"""The one way to run a command on hosts next to Ansible: over ssh with the inventory's own settings, or here for ``localhost``.

For short commands that must start at once (a playbook takes seconds before its first task) and for output that is streamed, which
Ansible cannot do. Host keys are checked as the inventory and the user's ssh configuration say. Nothing secret is put on a command
line: what a command needs travels through its standard input.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Protocol, cast

from provision.base import signals
from provision.inventory import ENCRYPTED, Host, Inventory
from provision.remote.ansible import Event, Kind

if TYPE_CHECKING:
    from provision.remote.session import Session

TIMEOUT_S = 60.0
#: A script prints this line before its answer: a login shell may print something first.
ANSWER = "===PROVISION-ANSWER==="
#: ssh's own exit code: the host could not be reached.
UNREACHABLE = 255
#: A ssh master that outlives the command would hold its output open, one that is there already could be stopped or cut off.
OWN_CONNECTION = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
PARALLEL = 256  # hosts on which a command runs at the same time
STARTS, START_S = 64, 2.0  # logins that begin within so many seconds: a jump host refuses more
_FILES, _MAX_FILES = 8, 1 << 16  # that each may need open here, and that all may where the system allows it
#: What sshpass, which prints nothing itself, means by its exit code.
_SSHPASS = {5: "Permission denied", 6: "Host key verification failed"}
_POLL_S = 0.2  # how soon an interrupt is noticed
CONNECT_S = 10  # until a host that does not answer is given up
_LONGEST_LINE = 1 << 20  # bytes; longer ones come in parts
_MAX_ANSWER = 16 << 20  # bytes that a script may print

_MARK = "===PROVISION-INPUT==="  # behind it, what a script as root reads

Feed = Callable[[IO[bytes]], None]
#: The standard input of commands: bytes, or what a function writes whenever it is called; the same for every host, or one for each.
Input = bytes | Feed | Mapping[str, bytes] | Mapping[str, Feed]


class Caller(Protocol):
    """What a command on hosts needs to know of who runs it: a `Session`, or a `Visitor`."""

    @property
    def inventory(self) -> Inventory: ...
    @property
    def passwords(self) -> Mapping[str, str]: ...
    @property
    def run_id(self) -> str: ...


@dataclass(frozen=True)
class Visitor:
    """Who only looks at hosts: no run with a folder, and nothing on them to clean up."""

    inventory: Inventory
    passwords: Mapping[str, str]
    run_id: str = "look"


@dataclass(frozen=True)
class Answer:
    """What a command printed on one host, its exit code (None where it did not end in time, `UNREACHABLE` where ssh failed), and when it
    began and ended, in seconds since 1970."""

    code: int | None
    out: str
    err: str
    began: float = field(default_factory=time.time, compare=False)
    ended: float = field(default_factory=time.time, compare=False)

    @property
    def body(self) -> str:
        """What the script printed behind the line `ANSWER`."""
        return self.out.partition(ANSWER)[2].strip()

    @property
    def error(self) -> str:
        """Why it failed, on one line: the end of what it printed, else its exit code."""
        printed = " ".join((self.err or self.out).split())[-500:]
        return printed or ("it did not end in time" if self.code is None else f"exit code {self.code}")


def run(
    session: Session, scripts: Mapping[str, str], *, stdin: Input = b"", timeout: float = TIMEOUT_S, task: str = ""
) -> dict[str, Answer]:
    """Run a script of /bin/sh on each host that is named, on all of them at the same time.

    Args:
        scripts: host → script.
        stdin: what each of them reads.
        timeout: seconds after which a script is killed.
        task: what the hosts do: it is shown and timed, host by host.

    Raises:
        Interrupted: after Ctrl-C, when everything has been ended.
    """

    def show(kind: Kind, name: str, **result: str) -> None:
        if task:
            session.take(Event(kind, name, "", task, result), session.step, quiet=True)

    def answered(name: str, answer: Answer) -> None:
        kind: Kind = "unreachable" if answer.code == UNREACHABLE else "failed"
        show(kind, name, msg=answer.error) if answer.code != 0 else show("ok", name)

    for name in scripts:
        show("started", name)
    with signals.as_event() as interrupted:
        answers = _run(session, scripts, stdin, timeout, interrupted, answered, session.progress.waiting)
    if interrupted.is_set():
        session.abort()
    return answers


def run_cleanup(session: Session, scripts: Mapping[str, str], *, timeout: float = TIMEOUT_S) -> dict[str, Answer]:
    """The same for scripts that clean up: no signal stops them half-way."""
    with signals.as_event():
        return _run(session, scripts, b"", timeout, threading.Event(), waiting=session.progress.waiting)


def look(
    visitor: Caller,
    scripts: Mapping[str, str],
    stopped: threading.Event,
    timeouts: Mapping[str, float],
    answered: Callable[[str, Answer], object] = lambda *_: None,
    stdin: Input = b"",
) -> dict[str, Answer]:
    """The same for scripts that only read, in any thread: where ``stopped`` is set, or the host's timeout is over, one is cut off, and
    ends by itself on its host. ``answered`` is called with each host as its answer is there."""
    return _run(visitor, scripts, stdin, timeouts, stopped, answered)


def as_root(session: Caller, name: str, script: str, feed: Feed) -> tuple[str, Feed]:
    """(a script that runs ``script`` as root, by sudo where the login is another user, which ``PROVISION_LOGIN`` then names: "UID HOME";
    its input: that of ``script``, behind a password)"""
    password = secret(session.inventory.host(name).sudo_password, session.passwords.get("become"))
    # sudo asks for none where it does not need to, and a process that it starts does not have our environment.
    inner = shlex.quote(f'while read -r line && [ "$line" != "{_MARK}" ]; do :; done; {script}')
    sudo = f'sudo {"-S" if password else "-n"} -p \'\' env PROVISION_RUN_ID="$PROVISION_RUN_ID" PROVISION_LOGIN="$(id -u) $HOME"'

    def whole(pipe: IO[bytes]) -> None:
        pipe.write(f"{password or ''}\n{_MARK}\n".encode())
        feed(pipe)

    return f'[ "$(id -u)" = 0 ] || set -- {sudo}; exec "$@" /bin/sh -c {inner}', whole


def stream(session: Session, name: str, command: str, feed: Feed, on_line: Callable[[str], None], stopping: Callable[[], bool]) -> int:
    """Run a command on one host and hand on each line that it prints, on standard output and error, until it ends.

    Args:
        name: of the host.
        command: a shell command that marks its processes as of this run itself.
        feed: writes the command's standard input, in a thread of its own.
        stopping: whether the command is to be killed now.

    Returns:
        The exit code, negative for a signal.
    """
    rest = b""

    def take(_pipe: IO[bytes], data: bytes) -> None:
        nonlocal rest
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        for line in whole:
            on_line(line.decode(errors="replace").rstrip("\r"))

    with _start(session, name, command, stderr=subprocess.STDOUT) as process:
        _attend(process, feed, take, stopping)
    if rest:
        on_line(rest.decode(errors="replace"))
    return process.returncode


def login(host: Host, command: str, password: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The argv that runs a shell command on ``host``, and what must be added to its environment.

    For a password, sshpass types it, which reads it from its environment; without one, ssh asks nothing.
    """
    if host.connection == "local":
        return ["sh", "-c", command], {}
    argv, known = _connection(host), secret(host.password, password)
    argv[1:1] = ["-o", f"ConnectTimeout={CONNECT_S}", *OWN_CONNECTION, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    if known:
        return ["sshpass", "-e", *argv, host.address, command], {"SSHPASS": known}
    return [*argv, "-o", "BatchMode=yes", host.address, command], {}


def terminal(host: Host, command: str, password: str | None = None, *, is_session: bool) -> tuple[list[str], dict[str, str]]:
    """The same for a person: ssh asks what it has to, and there is a terminal for a session, or where this one has both ends.

    A terminal writes ``\\r\\n`` for ``\\n``: what a command writes into a file or pipe would be another file.
    """
    if host.connection == "local":
        return ["sh", "-c", command], {}
    argv, known = _connection(host), secret(host.password, password)
    argv += ["-t"] if os.isatty(0) and (is_session or os.isatty(1)) else []
    return (["sshpass", "-e"] if known else []) + [*argv, host.address, command], {"SSHPASS": known} if known else {}


def secret(of_host: str | None, typed: str | None) -> str | None:
    """A password: the inventory's before the typed one, as Ansible has it."""
    return of_host if of_host and of_host != ENCRYPTED else typed


def _connection(host: Host) -> list[str]:
    """ssh and its options as the inventory has them."""
    variables = host.variables
    argv = [str(variables.get("ansible_ssh_executable", "ssh"))]
    for name in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
        argv += shlex.split(str(variables.get(name, "")))
    if host.key_file:
        argv += ["-i", os.path.expanduser(host.key_file)]
    if host.port:
        argv += ["-p", str(host.port)]
    if host.user:
        argv += ["-l", host.user]
    return argv


def _run(
    session: Caller,
    scripts: Mapping[str, str],
    stdin: Input,
    timeout: float | Mapping[str, float],
    interrupted: threading.Event,
    answered: Callable[[str, Answer], object] = lambda *_: None,
    waiting: Callable[[Iterable[str], float], object] = lambda *_: None,
) -> dict[str, Answer]:
    starts = threading.BoundedSemaphore(STARTS)

    def run_on(name: str) -> Answer:
        starts.acquire()
        later = threading.Timer(START_S, starts.release)
        later.daemon = True
        later.start()
        content = stdin.get(name, b"") if isinstance(stdin, Mapping) else stdin
        began = time.monotonic()
        deadline = began + (timeout[name] if isinstance(timeout, Mapping) else timeout)
        answer = attempt(name, content, deadline)
        if answer.code == UNREACHABLE and not answer.out and time.monotonic() - began < CONNECT_S:
            return attempt(name, content, deadline)  # one lost connection does not end it
        return answer

    def attempt(name: str, content: bytes | Feed, deadline: float) -> Answer:
        was_late, began = False, time.time()

        def is_endless() -> bool:
            return sum(map(len, printed.values())) > _MAX_ANSWER

        def stopping() -> bool:
            nonlocal was_late
            was_late = was_late or is_endless() or interrupted.is_set() or time.monotonic() > deadline
            return was_late

        failures: list[Exception] = []

        def feed(pipe: IO[bytes]) -> None:
            try:
                pipe.write(content) if isinstance(content, bytes) else content(pipe)
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001 - raised in a thread: the answer says it
                failures.append(error)

        command = f"env PROVISION_RUN_ID={session.run_id} /bin/sh -c {shlex.quote(scripts[name])}"
        try:
            process = _start(session, name, command)
        except OSError as error:  # no ssh here, or no sshpass
            return Answer(UNREACHABLE, "", str(error))
        printed: dict[IO[bytes] | None, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}

        def take(pipe: IO[bytes], data: bytes) -> None:
            printed[pipe] += data

        with process:
            _attend(process, feed, take, stopping)
        out, err = (text.decode(errors="replace") for text in printed.values())
        if not out and not err and cast(list[str], process.args)[0] == "sshpass" and process.returncode in _SSHPASS:
            return Answer(UNREACHABLE, "", _SSHPASS[process.returncode])
        if failures:
            return Answer(process.returncode or 1, out, f"its input could not be read: {failures[0]}")
        if is_endless():
            return Answer(None, out, f"it printed more than {_MAX_ANSWER >> 20} MB")
        return Answer(None if was_late else process.returncode, out, err, began)

    done, answers = SimpleQueue[Future[Answer]](), dict[str, Answer]()
    began = time.monotonic()
    with ThreadPoolExecutor(min(len(scripts), at_once()) or 1) as pool:
        names = {pool.submit(run_on, name): name for name in scripts}
        for each in names:
            each.add_done_callback(done.put)
        while len(answers) < len(names):
            with contextlib.suppress(Empty):
                each = done.get(timeout=_POLL_S)
                answers[names[each]] = each.result()
                answered(names[each], each.result())
            waiting((name for name in scripts if name not in answers), began)
    return {name: answers[name] for name in scripts}


def at_once() -> int:
    """On how many hosts a command may run at the same time: each needs open files, of which the limit is raised as far as it may be."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _MAX_FILES:
        limit = _MAX_FILES if most < 0 else min(most, _MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return PARALLEL if limit < 0 else max(1, min(PARALLEL, (limit - 100) // _FILES))


def _start(session: Caller, name: str, command: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start a command on a host, as leader of a process group here: a Ctrl-C of the terminal must not kill ssh before we act on it."""
    argv, environment = login(session.inventory.host(name), command, session.passwords.get("connection"))
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **environment}, start_new_session=True
    )


def _attend(process: subprocess.Popen[bytes], feed: Feed, take: Callable[[IO[bytes], bytes], None], stopping: Callable[[], bool]) -> None:
    """Feed a process and hand on what it prints until it ends; kill it with its children, which hold its output, when it has to stop."""
    pipe, process.stdin = cast(IO[bytes], process.stdin), None

    def feed_and_close() -> None:
        with contextlib.suppress(BrokenPipeError), pipe:  # it ended without having read everything
            feed(pipe)

    threading.Thread(target=feed_and_close, daemon=True).start()
    with selectors.DefaultSelector() as selector:
        for output in filter(None, (process.stdout, process.stderr)):
            selector.register(output, selectors.EVENT_READ, output)
        stops = was_ended = False
        while selector.get_map() and not was_ended:
            was_ended = stops  # a process in another group may hold its output open: what is there is read, and no more
            for key, _ in selector.select(_POLL_S * max(1.0, threading.active_count() / 128)):  # a thousand hosts are not polled more often
                if data := os.read(key.fd, 65536):
                    take(key.data, data)
                else:
                    selector.unregister(key.fileobj)
            if not stops and (stops := stopping()):  # after reading: where this machine is late, no host is
                os.killpg(process.pid, signal.SIGKILL)
    process.wait()
