"""Lines of files: of files that grow, of a directory into which files are put, and of standard input.

A position in a file is [offset in bytes, fingerprint of the file, whether it was read wholly]. The fingerprint is of the file's first bytes
and of the last ones before the offset, because files of one kind may begin alike. It tells a file from another
that has taken its name: what was not read of the former cannot be found, and that is an error.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import select
import stat
from typing import Any, BinaryIO, Mapping, Sequence

from collective_core.extensions.streaming.source import Position, Positions, Read, Source

#: Bytes of a line at most.
MAX_RECORD = 16 << 20
#: Bytes at a file's begin, and before an offset, that tell it from others.
FINGERPRINTED = 256
#: Bytes that are read at once.
READ_BYTES = 1 << 16

BEGIN: Position = [0, "", False]
ROTATED = (
    "To train on files that are rotated, give each file a name of its own and put it into a hvd.data.Directory when it is whole; "
    "to start over, start without the saved state"
)


class _LineFile:
    """An open file of lines."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - it stays open from call to call
        self._identity = os.fstat(self._file.fileno())
        self._begin, self._ahead = 0, b""  # what was read beyond the lines that were taken, and where that begins

    def is_at(self, status: os.stat_result) -> bool:
        return os.path.samestat(status, self._identity)

    def fingerprint(self, offset: int) -> str:
        length = min(offset, FINGERPRINTED)
        parts = [os.pread(self._file.fileno(), length, begin) for begin in (0, offset - length)]
        return "".join(hashlib.sha256(part).hexdigest()[:16] for part in parts) if offset else ""

    def has(self, offset: int, fingerprint: str) -> bool:
        """Whether it is the file that has this fingerprint at this offset."""
        return fingerprint == self.fingerprint(offset)

    def check(self, position: Position, size: int) -> None:
        """Raises ValueError where this is not the file, or no longer what it was, in which ``position`` was."""
        offset, fingerprint, _ = position
        if size < offset:
            raise ValueError(f"{self.path} has {size} bytes, of which {offset} were read: it was truncated or replaced. {ROTATED}")
        if not self.has(offset, fingerprint):
            raise ValueError(f"{self.path} does not begin with the {offset} bytes that were read of it: it was replaced. {ROTATED}")
        if 0 < offset < size and os.pread(self._file.fileno(), 1, offset - 1) != b"\n":
            raise ValueError(f"{self.path} went on after its last line, which did not end with a newline, was read at {offset} bytes")

    def take(self, offset: int, most: int, is_whole: bool) -> tuple[list[bytes], int]:
        """Lines, and the offset behind them. ``is_whole``: nothing will come after the last one, even if no newline ends it."""
        if self._begin <= offset <= self._begin + len(self._ahead):
            self._ahead = self._ahead[offset - self._begin :]
        else:
            self._ahead = b""
        self._begin = offset
        lines: list[bytes] = []
        while True:
            *found, rest = self._ahead.split(b"\n", most - len(lines))
            lines += found
            self._begin += len(self._ahead) - len(rest)
            self._ahead = rest
            if len(lines) == most:
                break
            if len(rest) > MAX_RECORD:
                raise ValueError(f"{self.path} has a line of more than {MAX_RECORD >> 20} MiB at byte {self._begin}")
            more = os.pread(self._file.fileno(), READ_BYTES, self._begin + len(rest))
            self._ahead += more
            if not more:
                if is_whole and rest:
                    lines.append(rest)
                    self._begin, self._ahead = self._begin + len(rest), b""
                break
        return _without_returns(lines), self._begin

    def close(self) -> None:
        self._file.close()


def _without_returns(lines: list[bytes]) -> list[bytes]:
    """Of lines that end as those of Windows do."""
    return [line[:-1] if line.endswith(b"\r") else line for line in lines]


class _LineFiles(Source):
    """Base of files and a directory. ``follow``: whether more may come."""

    def __init__(self, follow: bool) -> None:
        self._follow = follow
        self._opened: dict[str, _LineFile] = {}

    def _path_of(self, partition: str) -> str:
        raise NotImplementedError

    def _missing(self, path: str, offset: int) -> str:
        """What to say of a file that is not there, of which ``offset`` bytes were read."""
        raise NotImplementedError

    def _open(self, partition: str, status: os.stat_result) -> _LineFile:
        found = self._opened.get(partition)
        if found is None or not found.is_at(status):
            self._close(partition)
            found = self._opened[partition] = _LineFile(self._path_of(partition))
        return found

    def _close(self, partition: str) -> None:
        if partition in self._opened:
            self._opened.pop(partition).close()

    def _take(self, partition: str, position: Position, most: int, is_whole: bool) -> tuple[list[bytes], Position, bool]:
        """Lines, the position behind them, and whether they reach to the file's end."""
        path = self._path_of(partition)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise ValueError(self._missing(path, position[0])) from None
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file. For a pipe, use hvd.data.StandardInput")
        file = self._open(partition, status)
        file.check(position, status.st_size)
        lines, offset = file.take(position[0], most, is_whole)
        return lines, [offset, file.fingerprint(offset), False], len(lines) < most

    def validate(self, partition: str, position: Position) -> None:
        is_position = isinstance(position, (list, tuple)) and [type(value) for value in position] == [int, str, bool]
        if not is_position or position[0] < 0:
            raise ValueError(f"{position!r} is not a valid position in {partition}: it is [offset, fingerprint, whether it is read wholly]")

    def close(self) -> None:
        for partition in list(self._opened):
            self._close(partition)


class Files(_LineFiles):
    """Lines of files that grow, as ``tail -f`` shows them; a line counts when its newline is there. Each file is a partition.

    ``follow=False``: the stream ends where the files end, with a last line that no newline ends. With ``follow`` files may also come
    later. A file that is truncated or replaced is an error: what had not been read of it would be lost without a word. All ranks that
    read need the files; with ``shard="record"``, the default, rank 0 alone. Raises ValueError without files.
    """

    kind = "files"
    shard = "record"

    def __init__(self, *paths: str | os.PathLike[str], follow: bool = True) -> None:
        super().__init__(follow)
        self._paths = [os.fspath(path) for path in paths]
        if not paths or len(set(self._paths)) < len(paths):
            raise ValueError(f"Files needs one path or more, each once, not {self._paths}")
        self._begin = 0  # the files take turns at being the first

    def _path_of(self, partition: str) -> str:
        return partition

    def _missing(self, path: str, offset: int) -> str:
        return f"{path} is gone, and {offset} bytes of it were read: it was renamed. {ROTATED}" if offset else f"{path} is not there"

    def discover(self, known: Mapping[str, Position]) -> tuple[Positions, Sequence[str]]:
        return {path: BEGIN for path in self._paths if path not in known}, ()

    def read(self, positions: Mapping[str, Position], most: int) -> Read:
        records: list[bytes] = []
        found: Positions = {}
        names = list(positions)
        first = self._begin % max(1, len(names))
        is_ended = not self._follow
        for name in names[first:] + names[:first]:
            if self._follow and positions[name][0] == 0 and not os.path.exists(name):
                continue
            lines, behind, is_end = self._take(name, positions[name], most - len(records), not self._follow)
            is_ended = is_ended and is_end
            if lines:
                records += lines
                found[name] = behind
                self._begin = names.index(name) + 1
            if len(records) == most:
                return Read(records, found, False)
        return Read(records, found, is_ended)

    def validate(self, partition: str, position: Position) -> None:
        if partition not in self._paths:
            raise ValueError(f"the state has a position for {partition}, which is not one of {', '.join(self._paths)}")
        super().validate(partition, position)


class Directory(_LineFiles):
    """Lines of the files in a folder, in the order in which the files come, of those that come together by name. Each is a partition.

    A file must be whole when it appears under a name that ``pattern`` (of the shell) fits: write it under another, as ``.name`` or
    ``name.tmp``, and rename it. One that changes after it was read is an error. Files that were read wholly, and whose steps are
    committed, may be removed; the state holds a position for each that is there. ``follow=False``: the stream ends when all that are
    there are read. All ranks that read need the folder. Raises ValueError where it is none.
    """

    kind = "directory"

    def __init__(self, folder: str | os.PathLike[str], pattern: str = "*", follow: bool = True) -> None:
        super().__init__(follow)
        self._folder, self._pattern = os.fspath(folder), pattern
        self._looked: dict[str, tuple[object, ...]] = {}  # at files that were read wholly: their status and position
        if not os.path.isdir(self._folder):
            raise ValueError(f"{self._folder} is not a folder")

    def _path_of(self, partition: str) -> str:
        return os.path.join(self._folder, partition)

    def _missing(self, path: str, offset: int) -> str:
        text = f"{path} is not there, and {offset} bytes of it were read: put it back, or make it reachable for every rank"
        return f'{text}, or pass shard="record" to have rank 0 alone read'

    def _fits(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self._pattern) and not name.startswith(".") and not name.endswith((".tmp", ".part"))

    def discover(self, known: Mapping[str, Position]) -> tuple[Positions, Sequence[str]]:
        with os.scandir(self._folder) as entries:
            there = {entry.name: entry for entry in entries if self._fits(entry.name) and entry.is_file()}
        for name in there.keys() & known.keys():
            if known[name][2]:
                with contextlib.suppress(FileNotFoundError):  # removed at this moment
                    self._check_read(name, known[name])
        gone = [name for name, position in known.items() if position[2] and name not in there]
        for name in gone:
            self._looked.pop(name, None)
        return dict.fromkeys(sorted(there.keys() - known.keys()), BEGIN), gone

    def _check_read(self, name: str, position: Position) -> None:
        """Raises ValueError where a file that was read wholly has changed, or another has its name."""
        path, (offset, fingerprint, _) = self._path_of(name), position
        status = os.stat(path)
        look = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, offset, fingerprint)
        if self._looked.get(name) == look:
            return
        text = ""
        if status.st_size != offset:
            text = f"{path} has {status.st_size} bytes; it had {offset} when it was read to its end"
        else:
            file = _LineFile(path)
            if not file.has(offset, fingerprint):
                text = f"{path} was replaced by another file of {offset} bytes after it was read to its end"
            file.close()
        if text:
            advice = "Give each file a name of its own, write it under a name that begins with a dot, and rename it when it is whole"
            raise ValueError(f"{text}. {advice}")
        self._looked[name] = look

    def read(self, positions: Mapping[str, Position], most: int) -> Read:
        records: list[bytes] = []
        found: Positions = {}
        for name, position in positions.items():
            if position[2]:
                continue
            if len(records) == most:
                return Read(records, found, False)
            lines, behind, is_end = self._take(name, position, most - len(records), True)
            records += lines
            if is_end:
                self._close(name)
            found[name] = [*behind[:2], is_end]
        return Read(records, found, not self._follow)

    def validate(self, partition: str, position: Position) -> None:
        if not isinstance(partition, str) or os.path.basename(partition) != partition or not self._fits(partition):
            raise ValueError(f"the state has a position for {partition!r}, which does not match {self._pattern} in {self._folder}")
        super().validate(partition, position)


class StandardInput(Source):
    """Lines of rank 0's standard input, which it hands out. A position is the number of lines.

    mpirun gives its standard input to rank 0, and torchrun to all. Once the stream's state was asked for, lines are kept in
    memory until ``Stream.release``. A job that is started again is given the same input from its begin, and passes over what was
    committed; where rank 0 itself was replaced, the input is gone, which is an error.
    """

    kind = "standard input"
    shard = "record"
    only_rank_0 = True
    PARTITION = "standard input"

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._first = 0  # the number of the first of them
        self._rest = bytearray()  # of a line whose newline has not come
        self._is_at_end = False

    def discover(self, known: Mapping[str, Position]) -> tuple[Positions, Sequence[str]]:
        return ({} if known else {self.PARTITION: 0}), ()

    def read(self, positions: Mapping[str, Position], most: int) -> Read:
        if not positions:
            return Read([], {}, False)
        position = positions[self.PARTITION]
        if position < self._first:
            raise ValueError(f"line {position} of standard input is to be read again, but all before line {self._first} were given up")
        self._fill(position + most)
        begin = position - self._first
        if self._is_at_end and begin > len(self._lines):
            text = f"standard input of rank 0 ended after {self._first + len(self._lines)} lines, of which {position} are committed"
            raise ValueError(f"{text}: start the job again with the same input from its begin")
        records = self._lines[begin : begin + most]
        is_ended = self._is_at_end and begin + len(records) == len(self._lines)
        return Read(records, {self.PARTITION: position + len(records)} if records else {}, is_ended)

    def _fill(self, behind: int) -> None:
        """Takes what is there until line ``behind - 1`` is."""
        while not self._is_at_end and self._first + len(self._lines) < behind and select.select([0], [], [], 0)[0]:
            data = os.read(0, READ_BYTES)
            if not data:
                self._check_end()
                self._is_at_end = True
                data = b"\n" if self._rest else b""
            *whole, rest = data.split(b"\n")
            if whole:
                whole[0] = bytes(self._rest) + whole[0]
                self._rest.clear()
                self._lines += _without_returns(whole)
            self._rest += rest
            if len(self._rest) > MAX_RECORD:
                number = self._first + len(self._lines)
                raise ValueError(f"line {number} of standard input has more than {MAX_RECORD >> 20} MiB")

    def _check_end(self) -> None:
        status = os.fstat(0)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev:
            text = f"standard input of rank 0 is {os.devnull}: its launcher does not hand it on, or rank 0 was replaced"
            raise ValueError(f"{text}. Start with mpirun or torchrun, or use hvd.data.Files")

    def validate(self, partition: str, position: Any) -> None:
        if partition != self.PARTITION or type(position) is not int or position < 0:
            raise ValueError(f"{partition!r}: {position!r} is not a valid position in standard input: it is a number of lines")

    def release(self, positions: Mapping[str, Position]) -> None:
        dropped = min(max(0, positions.get(self.PARTITION, 0) - self._first), len(self._lines))
        del self._lines[:dropped]
        self._first += dropped
