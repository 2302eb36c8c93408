"""Copies data to hosts once: each takes it from the one before it over the cluster's own ssh, the first from here, in pieces.

"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shlex
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, Field, ValidationError

from provision.base import resources, signals
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.base.text import counted, size
from provision.inventory import Host
from provision.launch import program_files
from provision.plan.requirements import DEFAULT_PREFIX, HOME_PREFIX
from provision.remote import ssh
from provision.remote.session import Session

PIECE = 1 << 20  # bytes: a host hands on whole pieces, so the last of 16 is 15 of them behind the first
STALL_S = 30.0  # without a sign of a host
_TICK_S, _STARTS_S = 0.2, 3.0  # how often hosts are looked at; within which all are started
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
        source: the host from which it takes pieces; None: from here.
        have: bytes that are there; came: that had to come, None before all are there; failed: why it does not get them.
        sign: what grows while it goes on; grew: when it last did; lost: why no more comes from its source.
        wanted: numbers of pieces that it is to get from here, None at the end; served: how many it has requested.
    """

    host: Host
    source: Target | None
    have: int = 0
    came: int | None = None
    failed: str = ""
    sign: int = 0
    grew: float = 0.0
    lost: str = ""
    wanted: queue.SimpleQueue[list[int] | None] = field(default_factory=queue.SimpleQueue)
    served: int = 0

    @property
    def is_over(self) -> bool:
        return bool(self.failed) or self.came is not None


class Data:
    """What is pushed: a file or folder, of which each file is named as by `program_files.walk`. ``left_out``: what is not, and why."""

    def __init__(self, source: Path, name: str) -> None:
        """Read all of it once. Raises UsageError where it cannot be read, or there is no file in it."""
        self.left_out, self.bytes = list[str](), 0
        self._pieces, files = list[tuple[Path, int, str]](), list[tuple[str, bool, int, str]]()
        try:
            source = source.resolve(strict=True)
            # Files of a snapshot in Hugging Face's cache are links to the folder `blobs` of the model.
            root = source.parents[1] if source.parent.name == "snapshots" else source
            for path, place in program_files.walk(source, name, root, self.left_out):
                if path.is_file():
                    with path.open("rb") as file:
                        found = [hashlib.sha256(part).hexdigest() for part in iter(lambda: file.read(PIECE), b"")]
                        files.append((place, os.access(path, os.X_OK), file.tell(), "".join(found)))
                    self._pieces += [(path, at * PIECE, digest) for at, digest in enumerate(found)]
                    self.bytes += files[-1][2]
                elif path.is_symlink():
                    self.left_out.append(f"not copied: {path} is a link, but not to a file")
        except OSError as error:
            raise UsageError(f"it cannot be read: {error.strerror}", where=str(error.filename or source)) from error
        if not files:
            raise UsageError("there is no file in it", where=str(source), hint="; ".join(self.left_out) or None)
        self.manifest = zlib.compress(json.dumps({"piece": PIECE, "files": files}).encode())
        self.digest, self.files, self.pieces = hashlib.sha256(self.manifest).hexdigest(), len(files), len(self._pieces)

    def read(self, piece: int) -> bytes:
        """A piece; -1: the manifest. Raises ProvisionError where it has changed."""
        if piece < 0:
            return self.manifest
        path, offset, digest = self._pieces[piece]
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(offset)
            if hashlib.sha256(data := file.read(PIECE)).hexdigest() == digest:
                return data
        raise ProvisionError("it has changed while it was pushed", where=str(path), hint="push it again")


class Push:
    """One push to the hosts of a session. ``targets``: in the order in which data goes through them."""

    def __init__(self, session: Session, data: Data, dest: str, rate: float) -> None:
        """``rate``: bytes a second that each host, and this machine, sends at most; 0 for no limit."""
        self._session, self._data, self._dest, self._rate = session, data, dest, rate
        self.targets: list[Target] = []
        for host in session.inventory.hosts:
            self.targets.append(Target(host, self.targets[-1] if self.targets else None))
        self._lock, self._sending, self._ready = threading.RLock(), threading.Lock(), 0.0
        self._broken: ProvisionError | None = None

    def run(self) -> None:
        """Copy it. Raises Interrupted after Ctrl-C, ProvisionError where the source has changed; hosts that fail say so in `targets`."""
        progress, began, says = self._session.progress, time.monotonic(), 1.0
        what = f"{counted(self._data.files, 'file')}, {size(self._data.bytes)}"
        progress.stage(f"Push {what}", [each.host.name for each in self.targets])
        for line in self._data.left_out:
            progress.line(line.partition(";")[0])
        with signals.as_event() as interrupted, ThreadPoolExecutor(len(self.targets)) as pool:
            runs = []
            for target in self.targets:
                target.grew = time.monotonic() + _STARTS_S
                runs.append(pool.submit(self._attend, target, lambda: interrupted.is_set() or self._broken is not None))
                time.sleep(min(0.1, _STARTS_S / len(self.targets)))  # the first ones need this machine's processor now, the last ones later
            while wait(runs, _TICK_S).not_done:
                left, passed = self._judge(), time.monotonic() - began
                for target in self.targets if not left else ():
                    target.wanted.put(None)
                if left and passed > says:
                    last, says = min(left, key=lambda each: each.have), passed + max(1.0, passed / 10)
                    progress.doing(f"{last.host.name}: {size(last.have)} of {size(self._data.bytes)}, {counted(len(left), 'host')} to go")
        if left_over := [each.host.name for each in self.targets if each.came is None]:
            ssh.run_cleanup(self._session, dict.fromkeys(left_over, resources.inline_command("guard.py", self._session.run_id)))
        for each in runs:
            each.result()
        if self._broken is not None:
            raise self._broken
        if interrupted.is_set():
            raise Interrupted("interrupted; nothing of it is left running", hint="the same command goes on where it stopped")

    def _attend(self, target: Target, stops: Callable[[], bool]) -> None:
        """Have a host take it, again where it gets another source, until all hosts have it."""
        while not target.is_over and not stops():
            source, target.sign, target.lost, target.wanted = target.source, 0, "", queue.SimpleQueue()
            said = self._take(target, source, stops)
            with self._lock:
                if target.is_over or stops() or target.source is not source:
                    continue
                if source is not None and target.lost:
                    self._move(target, source.source, target.lost)
                else:
                    self._fail(target, said)

    def _take(self, target: Target, source: Target | None, stops: Callable[[], bool]) -> str:
        """Have a host take it from there. Returns why that has ended, where the host does not say it."""
        said, wanted = "", target.wanted
        words = (self._dest, self._data.digest, self._session.run_id, str(self._rate))
        order = {"size": len(self._data.manifest), **dict(zip(("dest", "digest", "run"), words, strict=False))}
        order |= {"from": source.host.name, "give": self._command(source.host, "give", *words)} if source else {"from": ""}

        def feed(pipe: IO[bytes]) -> None:
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()
            while (pieces := wanted.get()) is not None:
                for piece in pieces:
                    pipe.write(self._read(piece))
                    pipe.flush()

        def take(line: str) -> None:
            nonlocal said
            _, is_ours, text = line.partition(f"{ssh.ANSWER} ")
            said = "" if is_ours else line.strip() or said
            if is_ours:
                self._hear(target, text)

        def is_enough() -> bool:
            return stops() or bool(target.failed) or target.source is not source

        code = ssh.stream(self._session, target.host.name, self._command(target.host, "take"), feed, take, is_enough)
        wanted.put(None)
        return said[-300:] or f"exit code {code}"

    def _command(self, host: Host, *words: str) -> str:
        """Runs relay.py there, by the installation's Python."""
        places = [shlex.quote(host.prefix)] if host.prefix else [DEFAULT_PREFIX, f'"$HOME"/{HOME_PREFIX}']
        script = f"PATH={''.join(f'{each}/venv/bin:' for each in places)}$PATH; exec {resources.inline_command('relay.py', *words)}"
        return f"env PROVISION_RUN_ID={self._session.run_id} /bin/sh -c {shlex.quote(script)}"

    def _read(self, piece: int) -> bytes:
        try:
            data = self._data.read(piece)
        except ProvisionError as error:
            self._broken = error
            raise BrokenPipeError from error  # this connection ends, and then all
        with self._sending:
            self._ready = max(self._ready, time.monotonic()) + (len(data) / self._rate if self._rate else 0.0)
            time.sleep(max(0.0, self._ready - time.monotonic()))
        return data

    def _hear(self, target: Target, text: str) -> None:
        """Act on what a host says."""
        try:
            message = _Message.model_validate_json(text)
        except ValidationError:
            message = _Message(error="invalid answer")
        with self._lock:
            if (sign := message.have + message.read) > target.sign:
                target.sign, target.grew = sign, time.monotonic()
            target.have = max(target.have, min(message.have, self._data.bytes))
            target.lost, target.came = message.lost or target.lost, target.came if message.done is None else message.done
            target.served += len(message.want)
            if target.served > self._data.pieces + 1 or max(message.want, default=-1) >= self._data.pieces:
                message.error = "it requests what there is not"
            elif message.want:
                target.wanted.put(message.want)
            if message.error and not target.is_over:
                self._fail(target, message.error)

    def _judge(self) -> list[Target]:
        """Give hosts to which nothing comes another source, or up; the hosts that go on."""
        why = f"nothing has come for {STALL_S:g} s"
        with self._lock:
            for target in self.targets:
                source, silent = target.source, time.monotonic() - target.grew
                if target.is_over or silent < STALL_S:
                    continue
                if source is None:
                    self._fail(target, why)
                elif source.is_over or source.have > target.have or silent > 3 * STALL_S:  # else the source itself waits
                    self._bypass(target)
                    self._move(target, None, why)
            return [each for each in self.targets if not each.is_over]

    def _bypass(self, target: Target) -> None:
        """Those that take pieces from it take them from its source."""
        for follower in self.targets:
            if follower.source is target and not follower.is_over:
                follower.source, follower.grew = target.source, time.monotonic()

    def _move(self, target: Target, source: Target | None, why: str) -> None:
        lost = target.source.host.name if target.source else ""
        target.source, target.grew = source, time.monotonic()
        where = source.host.name if source else "this machine"
        self._session.progress.line(f"{target.host.name}: {lost}: {why}; goes on with {where}", "yellow")

    def _fail(self, target: Target, why: str) -> None:
        target.failed = why
        self._session.progress.line(f"{target.host.name}: {why}", "bold red")
        self._bypass(target)
