"""The files that are copied to the hosts with a user's program: its own, the modules and packages next to it, and others by name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from provision.base.errors import ProvisionError, UsageError
from provision.base.text import counted, joined, size
from provision.remote import ssh
from provision.remote.session import Session

#: Never copied: histories, environments and what Python makes again.
_LEFT_OUT = re.compile(r"\.git|\.hg|__pycache__|\.?venv|node_modules|\.(mypy|pytest|ruff)_cache|\.ipynb_checkpoints")
#: Nor, unless they are named, large data, logs and checkpoints in folders with modules; small ones may be a package's resources.
_DATA = re.compile(
    r"(?i).*\.(?:log|out|err|pth?|ckpt|safetensors|bin|np[yz]|h5|hdf5|parquet|arrow|feather|tfrecords?|lmdb|mdb|db|sqlite3?|csv|tsv|jsonl|pkl"
    r"|tar|t?gz|bz2|xz|zst|zip|7z|jpe?g|png|gif|webp|mp[34]|wav|flac)"
)
_LARGE_DATA, _MAX_DATA = 1 << 20, 10_000  # bytes of one, and how many: then walking takes too long
IGNORE = ".provisionignore"  # in the program's folder, in the grammar of .gitignore: what is not copied from there unless it is named
_FOLDER = "provision-run"  # in the login's home, on every host
_COPY_S = 600.0
#: Bytes of modules and packages that were not named. Code is smaller; what is larger is data next to it.
MAX_NEIGHBOURS = 50 << 20


class Archive(NamedTuple):
    """A program and its files.

    Attributes:
        sources: name there → the file or folder here, as the user has named it.
        folder: in a home on the hosts.
        command: as it is there.
        members: what is copied: a file, folder or link here, and its name there.
        left_out: what is not copied, and why.
    """

    sources: Mapping[str, Path]
    folder: str
    command: list[str]
    members: Sequence[tuple[Path, str]]
    left_out: Sequence[str]

    @property
    def unpack(self) -> str:
        """A script of /bin/sh that reads the archive; other users of the host cannot read what is in the folder."""
        private = f"mkdir -p {self.folder} && chmod 700 {_FOLDER} {self.folder}"
        return f"cd && {private} && tar -x -f - --no-same-owner -C {self.folder}"

    @property
    def sizes(self) -> list[int]:
        """Bytes of each file and link."""
        return [path.lstat().st_size for path, _ in self.members if path.is_symlink() or path.is_file()]

    def write(self, pipe: IO[bytes]) -> None:
        """Write it as a tar archive, a piece at a time. Raises OSError for a file that cannot be read."""
        with tarfile.open(fileobj=pipe, mode="w|") as archive:
            for path, name in self.members:
                member = archive.gettarinfo(path, name)
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                if member.issym():
                    member.linkname = os.path.relpath(os.path.realpath(path), path.parent)
                with path.open("rb") if member.isreg() else contextlib.nullcontext() as content:
                    archive.addfile(member, content)

    def here(self, place: str) -> str:
        """``/home/me/FOLDER/train.py, line 9`` as ``src/train.py, line 9``, if that file was copied from there; other text as it is."""
        _, found, name = place.partition(f"/{self.folder}/")
        path, line, rest = name.partition(", line ")
        first, *below = path.split("/")
        if not found or first not in self.sources:
            return place
        own = self.sources[first].joinpath(*below)
        return f"{own}{line}{rest}" if own.is_file() else place


def syntax_error(command: Sequence[str]) -> tuple[Path, str] | None:
    """The program's file and where it is wrong, if it is a script that this Python cannot compile; it is not run.

    Raises:
        UsageError: the command is the name of a script without its ending, or a file that cannot be executed.
    """
    words = list(command)
    if not os.path.exists(words[0]) and "/" not in words[0] and os.path.isfile(f"{words[0]}.py"):
        raise UsageError(f"{words[0]}: no such file", hint=f"did you mean {words[0]}.py?")
    at, is_python = program_at(words)
    if at == 0 and not is_python and not os.access(words[0], os.X_OK):
        raise UsageError(f"{words[0]}: not executable", hint=f"chmod +x {words[0]}; or name what runs it: sh {words[0]}")
    script = Path() if at is None else Path(words[at])
    if script.suffix != ".py" or not os.path.isfile(script):
        return None
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: zero bytes
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        code = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
        return script, f"{line}{getattr(error, 'msg', error)}" + (f": {code[:80]}" if code else "")
    except OSError:
        return None  # it is reported where it is copied
    return None


def pack(command: Sequence[str], files: Sequence[Path], *, modules: bool = True) -> Archive:
    """The program's file and ``files``, and the command as it is on the hosts.

    Args:
        modules: also what Python would import from next to the program (with ``-m``: from here), as it does on this machine.

    Raises:
        UsageError: a file cannot be read, two files have one name, or the modules are larger than code is.
    """
    words, named = list(command), list(files)
    at, is_python = program_at(words)
    program = Path(words[at]) if at is not None and os.path.isfile(words[at]) else None
    if program is not None and at is not None:
        words[at] = program.name if is_python and at else f"./{program.name}"
        named += [program] if program.absolute() not in [file.absolute() for file in files] else []
    elif at is not None and is_python and words[at].endswith(".py") and not words[at].startswith("/"):
        hint = "name the program as it is here; or --workdir with a folder of the hosts'"
        raise UsageError(f"{words[at]}: no such file", hint=hint)
    folder_here, left_out = Path() if program is None else program.parent, list[str]()
    has_modules = modules and is_python and (at is None or (program is not None and program.suffix == ".py"))
    try:
        neighbours = _neighbours(folder_here.absolute(), {_name(file) for file in named}, left_out) if has_modules else {}
        members = [member for file in named for member in walk(file.resolve(), _name(file), file.resolve(), left_out)]
    except OSError as error:
        advice = "leave the modules next to the program out with --no-modules, and name what it needs with --copy" if modules else None
        raise UsageError(f"it cannot be copied: {error.strerror}", where=str(error.filename), hint=advice) from error
    sources = [*named, *(folder_here / file.name for file in neighbours)]
    names = [_name(file) for file in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two of the files to copy have the same name: {', '.join(twice)}", hint="put them into a folder, and copy that")
    of_program = folder_here.resolve()
    digest = hashlib.sha256(os.fsencode(of_program)).hexdigest()[:6]  # two projects may be called src
    folder = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', of_program.name) or 'job'}-{digest}"
    members += [member for each in neighbours.values() for member in each]
    return Archive(dict(zip(names, sources, strict=True)), f"{_FOLDER}/{folder}", words, members, left_out)


def copy(session: Session, archive: Archive, scripts: Mapping[str, str], *, on_hosts: bool) -> None:
    """Copy it to the hosts, where a script unpacks it. Raises ProvisionError for a host on which that fails.

    Args:
        on_hosts: not in containers: where they reach each other, they hand on what is large.
    """
    sizes = archive.sizes
    session.progress.stage(f"Copy {counted(len(sizes), 'file')}, {size(sum(sizes))} to ~/{archive.folder}", list(scripts))
    for line in archive.left_out:
        session.progress.line(line)
    if on_hosts and sum(sizes) > MAX_NEIGHBOURS:
        from provision.launch import push  # it imports this module

        if len(push.connected(session, scripts)) == len(scripts):
            archive = push.program(session, archive, list(scripts))
    for host, answer in ssh.run(session, scripts, stdin=archive.write, timeout=_COPY_S).items():
        if answer.code != 0:
            raise ProvisionError(answer.error, where=f"{host}, copying the program")


def _name(file: Path) -> str:
    """As it is called there: a link's own name, by which it is imported, not that of its target."""
    return file.name if file.name not in ("", "..") else file.resolve().name


def program_at(words: Sequence[str]) -> tuple[int | None, bool]:
    """(which word is the program's file, if any; whether Python runs it, or without a file a module from here).

    Before it may stand a program that the hosts have, with its options: ``env``, ``bash``, ``timeout 60``.
    """
    behind_python = is_value = False
    for at, word in enumerate(words):
        if is_value:
            is_value = False
        elif behind_python and re.match("-.", word):
            if found := re.match("-[^-WX]*?([cm])", word):
                return None, found[1] == "m"
            is_value = re.fullmatch("-[^-WX]*[WX]|--check-hash-based-pycs", word) is not None
        elif behind_python:
            return (None, False) if word == "-" else (at, True)
        elif re.fullmatch(r"python[\d.]*", Path(word).name):
            behind_python = True
        elif os.path.isfile(word) and (at == 0 or word.endswith((".py", ".sh")) or os.access(word, os.X_OK)):
            of_system = shutil.which(Path(word).name, path=os.defpath)
            if not (of_system and os.path.samefile(of_system, word)):
                return at, word.endswith(".py")
    return None, False


def _neighbours(folder: Path, taken: set[str], left_out: list[str]) -> dict[Path, list[tuple[Path, str]]]:
    """The modules and packages in the folder from which Python imports first, each with its files, but without data and what is ignored."""
    found: dict[Path, list[tuple[Path, str]]] = {}
    sizes, data, ignored = Counter[str](), list[str](), list[str]()
    root, is_ignored = folder.resolve(), _ignored(folder / IGNORE)

    def skip(path: Path, name: str) -> bool:
        if path.name.startswith("."):  # it may be a secret
            return True
        if is_ignored(f"{name}/" if path.is_dir() else name):
            ignored.append(name)
            return True
        is_data = _DATA.fullmatch(name) is not None and path.is_file() and path.stat().st_size > _LARGE_DATA
        data.extend([name] * is_data)
        if len(data) > _MAX_DATA:
            what, hint = f"more than {_MAX_DATA:,} files of data are in its packages", f"name their folders in {IGNORE}"
            raise UsageError(what, where=str(folder), hint=hint)
        return is_data

    for path in sorted(folder.iterdir()):
        target = path.resolve()
        is_within = target.is_relative_to(root)  # else it is named, and left out
        if path.name in taken or not _is_module(path) or (is_within and "/." in f"/{target.relative_to(root)}"):
            continue
        for member in walk(target if is_within else path, path.name, root, left_out, skip):
            found.setdefault(path, []).append(member)
            sizes[path.name] += member[0].lstat().st_size
            if sum(sizes.values()) > MAX_NEIGHBOURS:  # without walking the rest, which may be a data set on a file server
                what = f"the modules and packages next to the program are larger than {MAX_NEIGHBOURS >> 20} MB, most of it "
                hint = "leave them out with --no-modules and name what it needs with --copy; or --workdir with a folder of the hosts'"
                raise UsageError(what + max(sizes, key=lambda name: sizes[name]), where=str(folder), hint=hint)
    if data:
        packages = " ".join(f"--copy {name}" for name in sorted({name.partition("/")[0] for name in data}))
        left_out.append(f"not copied: {joined(data)}, large data, logs or checkpoints; a whole package is: {packages}")
    if ignored:
        left_out.append(f"not copied because of {IGNORE}: {joined(ignored)}")
    return found


def _ignored(file: Path) -> Callable[[str], bool]:
    """Whether a file in the grammar of .gitignore names a path; without the file nothing. Raises UsageError for an invalid one."""
    if not file.is_file():
        return lambda _: False
    from pathspec import GitIgnoreSpec  # not needed where there is none

    lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of `re`, for classes such as [[:alpha:]]
            return GitIgnoreSpec.from_lines(lines, backend="simple").match_file
    except (ValueError, re.error) as error:
        raise UsageError(f"invalid pattern: expected the grammar of .gitignore: {error}", where=str(file)) from error


def _is_module(path: Path) -> bool:
    """A module, or a folder with modules in it: a package need not have an ``__init__.py``."""
    try:
        return any(path.glob("*.py")) if path.is_dir() else path.suffix == ".py"
    except OSError:
        return False  # it belongs to another user


def walk(
    path: Path, name: str, root: Path, left_out: list[str], skip: Callable[[Path, str], bool] = lambda _path, _name: False
) -> Iterator[tuple[Path, str]]:
    """A file, or a folder with what is in it, each with its name there, but what is to be skipped."""
    if _LEFT_OUT.fullmatch(path.name) or skip(path, name):
        return
    target = Path(os.path.realpath(path))
    if path.is_symlink() and not target.is_relative_to(root):
        left_out.append(f"not copied: {path} is a link that leads out of its folder, to {target}; name what is needed with --copy")
    elif path.is_symlink() or path.is_dir():
        yield path, name
        for each in () if path.is_symlink() else sorted(path.iterdir()):
            yield from walk(each, f"{name}/{each.name}", root, left_out, skip)
    elif path.is_file():
        path.open("rb").close()  # what cannot be read is an error before anything is copied
        yield path, name
    else:
        left_out.append(f"not copied: {path} is not a regular file")
