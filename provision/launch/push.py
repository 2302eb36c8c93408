"""Copies data to hosts once: each takes it from the one before it over the cluster's own ssh, the first from here, in pieces.

What a host takes is compared with a manifest whose digest comes from here, so no host trusts another. Where one is lost, or is silent, the
next takes pieces from the one before that, at last from here (`hostside/relay.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import posixpath
import queue
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, Field, ValidationError

from provision.base import resources, signals
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.base.text import counted, joined, size
from provision.inventory import Host
from provision.launch import program_files
from provision.launch.program_files import MAX_NEIGHBOURS, Archive
from provision.plan.requirements import DEFAULT_PREFIX, HOME_PREFIX
from provision.remote import ssh
from provision.remote.session import Session

PIECE = 1 << 20  # bytes: a host hands on whole pieces, so the last of 16 is 15 of them behind the first
STALL_S = 30.0  # without a byte, until a host asks another one
_NEAREST = 3  # hosts that it takes pieces from, before it takes them from here
_TICK_S = 0.2  # how often hosts are looked at
_SLICE = 1 << 16  # bytes that are sent at a time: of several hosts that take from here, none is silent
_Wanted = queue.SimpleQueue[list[int] | None]
_Count = Annotated[int, Field(ge=0, lt=1 << 60)]


class _Message(BaseModel):
    """What a host says (`hostside/relay.py`)."""

    want: list[Annotated[int, Field(ge=-1)]] = []
    have: _Count = 0
    read: _Count = 0
    lost: str = ""
    done: _Count | None = None
    error: str = ""


@dataclass(eq=False)
class Target:
    """A host to which data is copied.

    Attributes:
        have: bytes that are there; came: that had to come, None before all are there; failed: why it does not get them;
            is_cut_off: not by the host itself, which would wait for the end as the others do.
        sign: what grows while it goes on; grew: when it last did; lost: how many hosts it takes no more from.
        wanted: numbers of pieces that it is to get from here, None at the end; served: how many it has requested.
    """

    host: Host
    have: int = 0
    came: int | None = None
    failed: str = ""
    is_cut_off: bool = False
    sign: int = 0
    grew: float = 0.0
    lost: int = 0
    wanted: _Wanted = field(default_factory=_Wanted)
    served: int = 0

    @property
    def is_over(self) -> bool:
        return bool(self.failed) or self.came is not None


class Data:
    """What is pushed: files, each with its name there. ``left_out``: what is not, and why."""

    def __init__(self, source: Path, name: str, members: Iterable[tuple[Path, str]] | None = None) -> None:
        """Read all of it once: what is in ``source``, named as by `program_files.walk`, unless ``members`` say it. Raises UsageError where
        it cannot be read, or there is no file in it."""
        self.left_out, self.bytes = list[str](), 0
        self._pieces, files = list[tuple[str, int, int, str]](), list[tuple[str, bool, int, str]]()
        try:
            source = source.resolve(strict=True)
            # Files of a snapshot in Hugging Face's cache are links to the folder `blobs` of the model.
            root = source.parents[1] if source.parent.name == "snapshots" else source
            for path, place in program_files.walk(source, name, root, self.left_out) if members is None else members:
                if path.is_file():
                    with path.open("rb") as file:
                        found = [hashlib.sha256(part).hexdigest() for part in iter(lambda: file.read(PIECE), b"")]
                        files.append((place, os.access(path, os.X_OK), count := file.tell(), "".join(found)))
                    self._pieces += [(str(path), at * PIECE, min(PIECE, count - at * PIECE), each) for at, each in enumerate(found)]
                    self.bytes += count
                elif path.is_symlink():
                    self.left_out.append(f"not copied: {path} is a link, but not to a file")
        except OSError as error:
            raise UsageError(f"it cannot be read: {error.strerror}", where=str(error.filename or source)) from error
        if not files:
            raise UsageError("there is no file in it", where=str(source), hint="; ".join(self.left_out) or None)
        self.manifest = zlib.compress(json.dumps({"piece": PIECE, "files": files}).encode())
        self.digest, self.files, self.pieces = hashlib.sha256(self.manifest).hexdigest(), len(files), len(self._pieces)

    def read(self, piece: int) -> bytes:
        """A piece; -1: the manifest. Raises ProvisionError where it has changed, or cannot be read any more."""
        if piece < 0:
            return self.manifest
        path, offset, count, digest = self._pieces[piece]
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                if hashlib.sha256(data := file.read(count)).hexdigest() == digest:
                    return data
        except OSError as error:
            raise ProvisionError(f"it cannot be read any more: {error.strerror}", where=path) from error
        raise ProvisionError("it has changed while it was pushed", where=path, hint="push it again")


class Push:
    """One push to hosts of a session. ``targets``: in the order in which data goes through them."""

    def __init__(self, session: Session, data: Data, dest: str, rate: float = 0.0, program_on: Sequence[str] = ()) -> None:
        """``rate``: bytes a second that each host, and this machine, sends at most; 0 for no limit. ``program_on``: the hosts where it is a
        program, of which all is replaced, and nothing of an earlier run left; else it is data, for all hosts."""
        self._session, self._data, self._rate, self._is_program = session, data, rate, bool(program_on)
        self.targets = [Target(host) for host in session.inventory.hosts if not program_on or host.name in program_on]
        self._what = {"dest": dest, "digest": data.digest, "run": session.run_id, "rate": rate}
        self._sending, self._ready = threading.Lock(), 0.0
        self._broken: ProvisionError | None = None

    def run(self) -> None:
        """Copy it. Raises Interrupted after Ctrl-C, ProvisionError where the source has changed; hosts that fail say so in `targets`."""
        progress, began, says = self._session.progress, time.monotonic(), 1.0
        ssh.at_once()  # which raises the limit of open files
        with signals.as_event() as interrupted, ThreadPoolExecutor(len(self.targets)) as pool:
            runs = []
            for at in range(len(self.targets)):
                runs.append(pool.submit(self._attend, at, lambda: interrupted.is_set() or self._broken is not None))
                time.sleep(ssh.START_S / ssh.STARTS)
            while wait(runs, _TICK_S).not_done:
                left = [each for each, run in zip(self.targets, runs, strict=True) if not each.is_over and not run.done()]
                passed = time.monotonic() - began
                for target in self.targets if not left else ():
                    target.wanted.put(None)
                if left and passed > says:
                    last, says = min(left, key=lambda each: each.have), passed + max(1.0, passed / 10)
                    progress.doing(f"{last.host.name}: {size(last.have)} of {size(self._data.bytes)}, {counted(len(left), 'host')} to go")
        if unsure := [each.host.name for each in self.targets if each.came is None]:
            swept = ssh.run_cleanup(self._session, dict.fromkeys(unsure, resources.inline_command("guard.py", self._session.run_id)))
            # Where hosts are one machine, one guard ends the other, by a signal.
            unsure = [name for name, answer in swept.items() if answer.code in (None, ssh.UNREACHABLE, *range(1, 128))]
        for each in runs:
            each.result()
        if interrupted.is_set():
            rest = f"; {joined(unsure)} could not be checked" if unsure else ""
            raise Interrupted(f"interrupted; nothing of it is left running{rest}", hint="the same command goes on where it stopped")
        if unsure:
            progress.line(f"{joined(unsure)} could not be checked for what is left running", "yellow")
        if self._broken is not None:
            raise self._broken

    def _attend(self, at: int, stops: Callable[[], bool]) -> None:
        """Have the host of this number take it, until all hosts have it."""
        target, said, nearest = self.targets[at], "", self.targets[max(0, at - _NEAREST) : at]
        give = base64.b64encode(json.dumps(self._what).encode()).decode()
        order = {**self._what, "size": len(self._data.manifest), "is_program": self._is_program, "hosts": self._session.inventory.argument}
        order["sources"] = [(each.host.name, self._command(each.host, "give", give)) for each in reversed(nearest)]
        order["patience"] = patience = STALL_S * (1 + min(at, 20) / 10)  # where one is silent, the next one notices it first
        longest = patience * (3 * len(nearest) + 2)

        def feed(pipe: IO[bytes], wanted: _Wanted) -> None:
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()
            while (pieces := wanted.get()) is not None:
                for piece in pieces if not target.failed else ():
                    self._send(pipe, piece)

        def take(line: str) -> None:
            nonlocal said
            _, is_ours, text = line.partition(f"{ssh.ANSWER} ")
            said = "" if is_ours else line.strip() or said
            if is_ours and not target.is_over:
                self._hear(target, text)

        def is_enough() -> bool:
            if not target.is_over and time.monotonic() - target.grew > longest:
                self._fail(target, f"nothing has come for {longest:g} s")
            return stops() or target.is_cut_off

        command = self._command(target.host, "take")
        for is_last in (False, True):
            target.grew, target.wanted = time.monotonic(), (wanted := _Wanted())
            try:
                code = ssh.stream(self._session, target.host.name, command, partial(feed, wanted=wanted), take, is_enough)
            except OSError as error:  # no ssh or sshpass here, or too many files are open
                code, said = ssh.UNREACHABLE, str(error)
            wanted.put(None)
            is_lost = code == ssh.UNREACHABLE and not target.sign and time.monotonic() - target.grew < ssh.CONNECT_S
            if is_last or not is_lost or is_enough():  # one lost connection does not end it
                break
        if not target.is_over and not stops():
            self._fail(target, said[-300:] or f"exit code {code}")

    def _command(self, host: Host, *words: str) -> str:
        """Runs relay.py there, by the installation's Python."""
        places = [shlex.quote(host.prefix)] if host.prefix else [DEFAULT_PREFIX, f'"$HOME"/{HOME_PREFIX}']
        script = f"PATH={''.join(f'{each}/venv/bin:' for each in places)}$PATH; exec {resources.inline_command('relay.py', *words)}"
        return f"env PROVISION_RUN_ID={self._session.run_id} PYTHONUTF8=1 /bin/sh -c {shlex.quote(script)}"

    def _send(self, pipe: IO[bytes], piece: int) -> None:
        try:
            data = self._data.read(piece)
        except ProvisionError as error:
            self._broken = error
            raise BrokenPipeError from error  # this connection ends, and then all
        for part in (data[at : at + _SLICE] for at in range(0, len(data), _SLICE)):
            with self._sending:
                self._ready = ready = max(self._ready, time.monotonic()) + (len(part) / self._rate if self._rate else 0.0)
            time.sleep(max(0.0, ready - time.monotonic()))
            pipe.write(part)
            pipe.flush()

    def _hear(self, target: Target, text: str) -> None:
        """Act on what a host says."""
        data = self._data
        try:
            message = _Message.model_validate_json(text)
        except ValidationError:
            message = _Message()
            self._fail(target, "invalid answer")
        # What it may need to read: pieces and files three times, the manifest from each host, and some time for its disk.
        most = 5 * (data.pieces + data.files + len(data.manifest) // _SLICE) + 1000
        if (sign := min(message.have, data.bytes) + min(message.read, most)) > target.sign:
            target.sign, target.grew = sign, time.monotonic()
        target.have, target.came = min(message.have or target.have, data.bytes), target.came if message.done is None else message.done
        target.served, target.lost = target.served + len(message.want), target.lost + bool(message.lost)
        if target.lost > _NEAREST:
            self._fail(target, "invalid answer")
        elif target.served > 2 * data.pieces + 1 or max(message.want, default=-1) >= data.pieces:
            self._fail(target, f"invalid request: expected pieces below {data.pieces}, each twice at most")
        elif message.want:
            target.wanted.put(message.want)
        elif message.lost:
            self._session.progress.line(f"{target.host.name}: {message.lost[:500]}", "yellow")
        if message.error and not target.is_over:
            self._fail(target, message.error[:500])
            target.is_cut_off = False

    def _fail(self, target: Target, why: str) -> None:
        target.failed, target.is_cut_off = why, True
        self._session.progress.line(f"{target.host.name}: {why}", "bold red")


def connected(session: Session, names: Iterable[str]) -> list[str]:
    """Those of these hosts that `provision up` has made ready to take data from each other."""
    look = ssh.run(session, dict.fromkeys(names, "cd && test -e .provision-record.json && test -e .ssh/provision_config"))
    return [name for name, answer in look.items() if answer.code == 0]


def hand_on(session: Session, file: Path, key: str, names: Sequence[str]) -> dict[str, str]:
    """Copy a large file to hosts that reach each other; host → its path there, where who uses it removes it. Those that fail are left out,
    and all of them where the file is small: they are sent it in another way. ``key``: hexadecimal, names its content."""
    ready = connected(session, names) if file.stat().st_size > MAX_NEIGHBOURS else []
    if len(ready) < 2:
        return {}
    there = f"/var/tmp/provision-{key[:16]}.tar"  # noqa: S108 - it is replaced as a whole, and not in another user's place
    session.progress.stage(f"Copy {file.name}, {size(file.stat().st_size)}", ready)
    made = Push(session, Data(file, posixpath.basename(there)), there, program_on=ready)
    made.run()
    return {each.host.name: there for each in made.targets if not each.failed}


def program(session: Session, archive: Archive, names: Sequence[str]) -> Archive:
    """Copy a program's files to hosts. Returns what is left to copy: folders, and links. Raises ProvisionError for a host that fails."""
    name, rest = posixpath.basename(archive.folder), [each for each in archive.members if each[0].is_symlink() or each[0].is_dir()]
    files = [(path, f"{name}/{place}") for path, place in archive.members if not path.is_symlink()]
    made = Push(session, Data(Path(), name, files), archive.folder, program_on=names)
    made.run()
    if failed := [each for each in made.targets if each.failed]:
        raise ProvisionError(failed[0].failed, where=f"{failed[0].host.name}, copying the program")
    return archive._replace(members=rest)
