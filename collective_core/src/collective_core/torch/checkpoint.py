"""Checkpoints that are whole or not there, written by rank 0 alone, in the background, and read back by all ranks.

    checkpoints = hvd.Checkpoints("checkpoints", keep=3, model=model, optimizer=optimizer, sampler=sampler)
    start = checkpoints.restore()          # {"step": 1200, "epoch": 3}; {} where there is none
    ...
    checkpoints.save(step, epoch=epoch)    # copies, then training goes on
    ...
    checkpoints.wait()                     # the last one is on the disk

A job that was started with ``--restart-from FOLDER`` takes its first ``restore`` from there; what it saves goes where the program says.

A file is one line of JSON (``schema``, ``step``, ``more``, and the ``bytes`` and ``sha256`` of what follows), then what torch.save made of
the parts' states. Sharded tables (torch/sharded.py) are next to it, in a folder with a file of each rank, which is written before; a step
that is saved again has another folder, so that the tables of the file that is there stay until it is replaced. The file is written under
another name, brought to the disk and renamed: a crash at any moment leaves the earlier ones.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import os
import pickle
import re
import shutil
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple

import torch

from collective_core.errors import CollectiveError
from collective_core.runtime import membership
from collective_core.runtime.config import restart_folder
from collective_core.torch import host_copy
from collective_core.torch.functions import allgather_object, broadcast_object, load_in_place
from collective_core.torch.sharded import Shard, is_shard, require_shard

SCHEMA = 1
ROOT = 0
#: Bytes of the line of JSON: ``more`` is for a few numbers, not for data.
MAX_HEADER = 1 << 20
#: Bytes that are read at once.
PIECE = 16 << 20


#: Names of checkpoints that this job has written, or has found when it restored, by folder: those it may delete.
_own: dict[str, set[str]] = {}


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged; an earlier one is used."""


class _Found(NamedTuple):
    """A valid checkpoint, or why none can be used; neither where there is none."""

    header: dict[str, Any]
    error: str
    names: frozenset[str] = frozenset()  # of all that are in the folder


class _Copy:
    """File in memory that torch.save writes to: once, where io.BytesIO would move it whenever it grows."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.length = 0

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        self.length += len(self.pieces[-1])
        return len(self.pieces[-1])

    def flush(self) -> None:
        """torch.save calls it."""


class _Writing:
    """A checkpoint on its way to the disk. The process's only one, whichever :class:`Checkpoints` it is of."""

    def __init__(self, write: Callable[[], None], unsupported_reason: Callable[[Exception], str]) -> None:
        self._error = ""

        def run() -> None:
            try:
                write()
            except Exception as failure:  # noqa: BLE001 - whatever it is, whoever waits is told
                self._error = unsupported_reason(failure)

        # A daemon, because Python would wait for another before it runs what is registered for its end, and after a crash the other
        # ranks must learn of it first: job.py waits for it.
        self._thread = threading.Thread(target=run, name="collective_core checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Waits until it is over. Why there is no checkpoint, or nothing."""
        self._thread.join()
        return self._error


_writing: _Writing | None = None


def _finish_writing() -> str:
    """Waits for the checkpoint that this process is writing, if it is. Why it has failed, or nothing."""
    return _writing.finish() if _writing is not None else ""


def _forget_writing() -> None:
    """Whoever is concerned has been told how it went."""
    global _writing
    _writing = None


def _end_writing() -> None:
    error = _finish_writing()
    _forget_writing()
    if error:
        raise CollectiveError(error, "invalid", (ROOT,))


membership.before_end.append(_end_writing)


class Checkpoints:
    """The last ``keep`` checkpoints of a job in ``folder``, which needs to be reachable on rank 0's host only; with sharded tables
    (``hvd.nn``) on all, because each rank writes its own rows. They can be read by any number of ranks, and with another sharding.

    What this job has written or restored from is a line: when it goes on from an earlier step, its later checkpoints go with the next
    ``save``. Another job's are left alone, and where they are as late as what is saved, so that they would be restored instead of it, they
    are an error. With ``overwrite`` they go.

    ``parts``: what is saved, by name: anything with ``state_dict`` and ``load_state_dict`` (model, optimizer, scheduler, ShardSampler).
    Raises ValueError for a part without them, and for ``keep`` below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, overwrite: bool = False, **parts: Any) -> None:
        if keep < 1:
            raise ValueError(f"keep is the number of checkpoints to keep: at least 1, not {keep}")
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ValueError(f"{name} ({type(part).__name__}) has no state_dict and load_state_dict; pass plain values to save()")
        self._folder = Path(folder)
        self._restart = restart_folder()  # until something is saved or restored
        self._keep = keep
        self._overwrite = overwrite
        self._parts = parts

    def save(self, step: int, **more: Any) -> None:
        """Copies the parts' states after ``step`` steps, and writes the copy in the background. ``more``: plain values, which ``restore``
        returns. Collective; waits for the checkpoint before this one.

        Raises TypeError for values that are not plain, and on every rank :class:`CollectiveError` (kind ``invalid``) naming the host when
        rank 0 cannot write, when it could not write the checkpoint before, or when the folder holds another job's checkpoints of the same
        or later steps. Then this one is not written, and what is there stays. What fails later is raised by the next call of any
        :class:`Checkpoints`, or on rank 0 by ``shutdown``; a process that ends without them says it on stderr.
        """
        header = {"schema": SCHEMA, "step": int(step), "more": more}
        json.dumps(header)  # on all ranks: a value that rank 0 cannot write is an error everywhere
        self.wait()
        own, number = self._agree_on_own(int(step))
        header.update(self._write_tables(int(step), number))
        error = ""
        if membership.rank() == ROOT:
            try:
                self._begin_writing(header, own)
            except Exception as failure:  # noqa: BLE001 - the others wait for a word, whatever it is
                error = self._unsupported_reason(int(step), failure)
        error = broadcast_object(error, ROOT)
        if error:
            raise CollectiveError(error, "invalid", (ROOT,))
        self._restart = None

    def wait(self) -> None:
        """Waits until the checkpoint that was saved last is on the disk. Collective.

        Raises :class:`CollectiveError` (kind ``invalid``) on every rank when it could not be written.
        """
        errors = allgather_object(_finish_writing(), "checkpoint.written")  # of all: after a change of ranks, another than 0 may write
        _forget_writing()
        for rank, error in enumerate(errors):
            if error:
                raise CollectiveError(error, "invalid", (rank,))

    def restore(self, trust: bool = False) -> dict[str, Any]:
        """Brings the parts to the last valid checkpoint, on all ranks; returns ``step`` and what ``save`` was given. {} without any.

        Collective. A damaged one is passed over, with a :class:`CheckpointWarning` on rank 0. ``trust``: read files with other things in
        them than tensors and plain values, too; reading these can run any code. Raises :class:`CollectiveError` on every rank when the
        files cannot be read, or hold other parts than these, when the checkpoint that was saved last could not be written, and when a job
        that was started with ``--restart-from`` finds none there.

        Until it returns, a host needs memory for one copy of the checkpoint beside the parts, whatever its ranks.
        """
        self.wait()
        with contextlib.ExitStack() as opened:
            found, content = self._last_valid(opened) if membership.rank() == ROOT else (None, -1)
            found = broadcast_object(found, ROOT)
            _own_in(self._restart or self._folder).update(found.names)
            if found.error:
                raise CollectiveError(found.error, "invalid", (ROOT,))
            if not found.header:
                return {}
            content = opened.enter_context(host_copy.shared(content, found.header["bytes"], found.header["sha256"]))
            states = _load(content, trust)
        self._read_tables(found.header)
        if set(states) != set(self._parts):
            folder, asked_for = self._restart or self._folder, ", ".join(sorted(self._parts))
            text = f"the checkpoint in {folder} holds {', '.join(sorted(states))}; asked for are {asked_for}"
            raise CollectiveError(text, "mismatch")
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                # It keeps the tensors that it is given, and these would keep the host's copy. The file may be of one of another type.
                load_in_place(part, copy.deepcopy(states[name]), same_model=False)
            else:
                part.load_state_dict({**states[name], **_shards_in(part)})
        self._restart = None
        return {"step": found.header["step"], **found.header["more"]}

    def _tables(self) -> dict[str, Shard]:
        modules = {name: part for name, part in self._parts.items() if isinstance(part, torch.nn.Module)}
        named = {f"{part}.{name}": p for part, module in modules.items() for name, p in module.named_parameters()}
        tables: dict[str, Shard] = {key: p.collective_shard for key, p in named.items() if is_shard(p)}
        for key, table in tables.items():
            require_shard(table, key)
            if table.ranks() != membership.size():
                raise ValueError(f"{key} is divided over {table.ranks()} of {membership.size()} ranks: a checkpoint needs all")
        return tables

    def _write_tables(self, step: int, number: int) -> dict[str, Any]:
        """Every rank's rows, into a file each. What the header says of them; nothing without any. ``number``: of the step's folder."""
        tables = self._tables()
        if not tables:
            return {}
        folder, error, written = _tables_beside(self._folder / _name_of(step), number), "", {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = next(iter(tables.values())).save_rows(tables, folder / _name_of_shard(membership.rank()))
        except Exception as failure:  # noqa: BLE001 - as in save
            error = self._unsupported_reason(step, failure)
        everyone = allgather_object((error, written), "checkpoint.tables")
        for rank, (unsupported_reason, _) in enumerate(everyone):
            if unsupported_reason:
                raise CollectiveError(unsupported_reason, "invalid", (rank,))
        described = {key: table.describe_rows() for key, table in tables.items()}
        return {"tables": described, "shards": [described for _, described in everyone], "folder": number}

    def _read_tables(self, header: dict[str, Any]) -> None:
        """Brings every rank its rows. Raises on all where any cannot read them."""
        tables, written, error = self._tables(), header.get("tables", {}), ""
        if not tables and not written:
            return
        folder = _tables_beside((self._restart or self._folder) / _name_of(header["step"]), header.get("folder", 0))
        try:
            error = _unsupported_tables(tables, written)
            files = [] if error else header["shards"]
            for rank, described in enumerate(files):
                path = folder / _name_of_shard(rank)
                if not path.is_file():
                    raise ValueError(f"there is no {path}: with sharded tables all hosts need the same folder")
                # Each file is read once as a whole, by one of the ranks.
                if rank % membership.size() == membership.rank() and checksum(path) != described["sha256"]:
                    raise ValueError(f"the checksum of {path} is wrong: delete the checkpoint to go on from the one before")
            for rank in range(len(files)):
                next(iter(tables.values())).load_rows(tables, written, folder / _name_of_shard(rank), rank)
        except Exception as failure:  # noqa: BLE001 - as in save
            error = f"the tables cannot be read on {socket.gethostname()}: {failure}"
        for rank, unsupported_reason in enumerate(allgather_object(error, "checkpoint.tables_read")):
            if unsupported_reason:
                raise CollectiveError(unsupported_reason, "invalid", (rank,))
        for key, table in tables.items():
            table.begin_from(written[key]["steps"])

    def _agree_on_own(self, step: int) -> tuple[set[str], int]:
        """Names of the checkpoints that are this job's, with the one that is to be written, and a number for its folder of tables. Raises
        where another job's are in the way.

        In an elastic job rank 0 may have come after the others had written or restored.
        """
        own = _own_in(self._folder)
        late, number, error = [], 0, ""
        if membership.rank() == ROOT:
            try:
                late = [path.name for path in _files(self._folder) if _step_of(path) >= step]
                while _name_of(step) in late and _tables_beside(self._folder / _name_of(step), number).exists():
                    number += 1
            except Exception as failure:  # noqa: BLE001 - as in save
                error = self._unsupported_reason(step, failure)
        everyone = allgather_object((own, socket.gethostname(), late, number, error), "checkpoint.own")
        own |= set().union(*(names for names, *_ in everyone))
        _, host, late, number, error = everyone[ROOT]
        if error:
            raise CollectiveError(error, "invalid", (ROOT,))
        others = [name for name in late if name not in own]
        if others and not self._overwrite:
            named = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
            text = (
                f"the checkpoint of step {step} is not written: {self._folder} on {host} holds another job's of the same or later steps "
                f"({named}). Call restore() before save() to go on from them, choose another folder, or pass overwrite=True to "
                "Checkpoints to delete them"
            )
            raise CollectiveError(text, "invalid", (ROOT,))
        own.add(_name_of(step))
        return own, number

    def _unsupported_reason(self, step: int, failure: Exception) -> str:
        why = failure.strerror if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
        return f"the checkpoint of step {step} cannot be written on {socket.gethostname()} into {self._folder}: {why}"

    def _begin_writing(self, header: dict[str, Any], own: set[str]) -> None:
        global _writing
        content = _Copy()
        torch.save({name: _state_of(part) for name, part in self._parts.items()}, content)
        self._folder.mkdir(parents=True, exist_ok=True)
        known = frozenset(own)
        _writing = _Writing(lambda: self._write(header, content, known), lambda failure: self._unsupported_reason(header["step"], failure))

    def _write(self, header: dict[str, Any], content: _Copy, own: frozenset[str]) -> None:
        digest = hashlib.sha256()
        for piece in content.pieces:
            digest.update(piece)
        line = json.dumps({**header, "bytes": content.length, "sha256": digest.hexdigest()})
        target = self._folder / _name_of(header["step"])
        with brought_to_disk(target) as file:
            file.write(line.encode() + b"\n")
            file.writelines(content.pieces)
        # Those of later steps are of a line that was given up, or were passed over.
        others = [path for path in _files(self._folder) if path != target and (self._overwrite or path.name in own)]
        older = [path for path in others if _step_of(path) < header["step"]]
        drafts = self._folder.glob(".step-*.checkpoint.part")  # of a process that was killed
        for old in {*others, *drafts} - {*older[: self._keep - 1]}:
            old.unlink(missing_ok=True)
        for tables in self._folder.glob("step-*.tables"):
            its = tables.with_name(tables.name.split(".")[0] + target.suffix)
            if not its.exists() or (its == target and tables != _tables_beside(target, header.get("folder", 0))):
                shutil.rmtree(tables, ignore_errors=True)

    def _last_valid(self, opened: contextlib.ExitStack) -> tuple[_Found, int]:
        """On rank 0. And a file in memory with what it holds, which is closed with ``opened``; -1 without one."""
        passed_over = []
        try:
            files = _files(self._restart or self._folder)
            names = frozenset(path.name for path in files)
            for path in files:
                try:
                    header, content = _read(path, opened)
                except ValueError as error:
                    passed_over.append(f"{path} is not used: {error}")
                    warnings.warn(passed_over[-1], CheckpointWarning, stacklevel=3)
                else:
                    if self._restart:
                        print(f"collective_core: goes on from {path} (step {header['step']})", file=sys.stderr, flush=True)
                    return _Found(header, "", names), content
        except Exception as error:  # noqa: BLE001 - as in save
            return _Found({}, f"the checkpoints cannot be read on {socket.gethostname()}: {error}"), -1
        if self._restart is None:
            return _Found({}, "", names), -1
        why = "; ".join(passed_over) or ("it holds none" if self._restart.is_dir() else "there is no such folder")
        return _Found({}, f"--restart-from {self._restart}: no valid checkpoint on {socket.gethostname()}: {why}"), -1


def _state_of(part: Any) -> Any:
    """What rank 0 keeps of a part: not its rows of sharded tables."""
    state = part.state_dict()
    return {key: value for key, value in state.items() if not is_shard(value)} if isinstance(part, torch.nn.Module) else state


def _shards_in(part: Any) -> dict[str, Any]:
    state = part.state_dict() if isinstance(part, torch.nn.Module) else {}
    return {key: value for key, value in state.items() if is_shard(value)}


def _unsupported_tables(tables: dict[str, Shard], written: dict[str, Any]) -> str:
    """Why these tables cannot be what was written; empty if they can."""
    if set(tables) != set(written):
        return f"the checkpoint has the sharded tables {', '.join(sorted(written)) or 'none'}; asked for are {', '.join(sorted(tables))}"
    return next(filter(None, (table.mismatch(key, written[key]) for key, table in tables.items())), "")


def _tables_beside(checkpoint: Path, number: int) -> Path:
    return checkpoint.with_suffix(f".{number:d}.tables" if number else ".tables")


def _name_of_shard(rank: int) -> str:
    return f"{rank:06d}.safetensors"


@contextlib.contextmanager
def brought_to_disk(target: Path) -> Iterator[BinaryIO]:
    """A file to write, under another name; then it is brought to the disk and renamed. After an error it is not there."""
    draft = target.with_name(f".{target.name}.part")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    # The folder's list of names, without which a renamed file may be gone after a power cut.
    number = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(PIECE), b""):
            digest.update(piece)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last first."""
    named = [path for path in folder.glob("step-*.checkpoint") if re.fullmatch(r"step-\d+\.checkpoint", path.name)]
    return sorted(named, key=_step_of, reverse=True)


def _own_in(folder: Path) -> set[str]:
    return _own.setdefault(os.path.abspath(folder), set())


def _name_of(step: int) -> str:
    return f"step-{int(step):012d}.checkpoint"


def _step_of(path: Path) -> int:
    return int(path.name[len("step-") : -len(".checkpoint")])


def _read(path: Path, opened: contextlib.ExitStack) -> tuple[dict[str, Any], int]:
    """Its first line, and a file in memory with the rest. Raises ValueError, saying why, for a file that is not what was written."""
    with path.open("rb") as file:
        line = file.readline(MAX_HEADER)
        try:
            header = json.loads(line)
            schema, length, expected = header["schema"], header["bytes"], header["sha256"]
            if type(length) is not int or type(header["step"]) is not int or not isinstance(header["more"], dict):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError("its first line is damaged") from None
        if schema != SCHEMA:
            raise ValueError(f"it has schema {schema}, this version reads {SCHEMA}")
        found = os.fstat(file.fileno()).st_size - len(line)
        if found != length:
            raise ValueError(f"it holds {found} of {length} bytes")
        with contextlib.ExitStack() as filled:
            content = filled.enter_context(host_copy.new_file())
            if host_copy.fill(content, file) != expected:
                raise ValueError("its checksum is wrong")
            for rank, described in enumerate(header.get("shards", ())):
                shard = _tables_beside(path, header.get("folder", 0)) / _name_of_shard(rank)
                if not shard.is_file() or shard.stat().st_size != described["bytes"]:
                    raise ValueError(f"{shard} is not there, or not whole")
            opened.push(filled.pop_all())
    return header, content


def _load(content: int, trust: bool) -> dict[str, Any]:
    """The states in a file, whose tensors are pages of it where this version of PyTorch can do that."""
    known = inspect.signature(torch.load).parameters
    options: dict[str, Any] = {"map_location": "cpu"}
    if "weights_only" in known:  # older versions of PyTorch know no safe way
        options["weights_only"] = not trust
    path = host_copy.path_of(content)
    try:
        if "mmap" in known and os.path.exists(path):
            states: dict[str, Any] = torch.load(path, mmap=True, **options)
        else:
            with open(content, "rb", closefd=False) as file:
                file.seek(0)  # whoever has written it has left it at its end
                states = torch.load(file, **options)
    except pickle.UnpicklingError as error:
        text = "the checkpoint holds other things than tensors and plain values; if you trust whoever wrote it: restore(trust=True)"
        raise CollectiveError(f"{text} ({str(error).splitlines()[0]})", "invalid") from error
    return states
