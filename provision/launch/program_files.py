"""The files that are copied to the hosts with a user's program: its own, the modules and packages next to it, and others by name."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from provision.base.errors import ProvisionError, UsageError
from provision.remote import ssh
from provision.remote.session import Session

#: Never copied: histories, environments and what Python makes again.
_LEFT_OUT = {
    ".git",
    ".hg",
    "__pycache__",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
}
_FOLDER = "provision-run"  # in the login's home, on every host
_COPY_S = 600.0
#: Bytes of modules and packages that nobody has named. Code is smaller; what is larger is data next to it.
MOST_NEIGHBOURS = 50 << 20


class Archive(NamedTuple):
    """A program and its files.

    Attributes:
        sources: name there → the file or folder here, as the user has named it.
        folder: in a home on the hosts.
        command: as it is there.
        content: a tar archive.
    """

    sources: Mapping[str, Path]
    folder: str
    command: list[str]
    content: bytes

    @property
    def unpack(self) -> str:
        """A script of /bin/sh that reads the archive."""
        return f"cd && mkdir -p {self.folder} && tar -x -f - --no-same-owner -C {self.folder}"

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
        UsageError: the command is the name of a script without its ending.
    """
    words = list(command)
    if not Path(words[0]).exists() and "/" not in words[0] and Path(f"{words[0]}.py").is_file():
        raise UsageError(f"{words[0]}: there is no such file here", hint=f"did you mean {words[0]}.py?")
    at = 1 if _is_python(words[0]) and words[1:] else 0
    script = Path(words[at])
    if script.suffix != ".py" or not script.is_file():
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
        UsageError: two files have one name, or the modules are larger than code is.
    """
    words, named = list(command), list(files)
    at = next((number for number, word in enumerate(words) if Path(word).is_file() and not (number == 0 and _is_python(word))), None)
    program = Path(words[at]) if at is not None else None
    if program is not None and at is not None:
        words[at] = program.name if at else f"./{program.name}"
        named.append(program)
    elif _is_python(words[0]) and words[1:] and words[1].endswith(".py") and not words[1].startswith(("-", "/")):
        hint = "name the program as it is here; or --workdir with a folder of the hosts'"
        raise UsageError(f"{words[1]}: there is no such file here", hint=hint)
    try:
        taken = {_name(file) for file in named}
        neighbours = [file for file in _neighbours(words, program) if file.name not in taken] if modules else []
        content = _tar(named, neighbours)
    except OSError as error:
        advice = "leave the modules next to the program out with --no-modules, and name what it needs with --copy" if modules else None
        raise UsageError(f"it cannot be copied: {error.strerror}", where=str(error.filename), hint=advice) from error
    folder_here = Path() if program is None else program.parent
    sources = [*named, *(folder_here / file.name for file in neighbours)]
    names = [_name(file) for file in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two of the files to copy have the same name: {', '.join(twice)}", hint="put them into a folder, and copy that")
    folder = re.sub(r"[^\w.-]", "_", Path.cwd().name) or "job"
    return Archive(dict(zip(names, sources, strict=True)), f"{_FOLDER}/{folder}", words, content)


def copy(session: Session, archive: Archive, scripts: Mapping[str, str]) -> None:
    """Copy it to the hosts, where a script unpacks it. Raises ProvisionError for a host on which that fails."""
    session.progress.stage(f"Copy {', '.join(archive.sources) or 'nothing'} to ~/{archive.folder}", list(scripts))
    for host, answer in ssh.run(session, scripts, stdin=archive.content, timeout=_COPY_S).items():
        if answer.code != 0:
            raise ProvisionError(answer.error, where=f"{host}, copying the program")


def _name(file: Path) -> str:
    """As it is called there: a link's own name, by which it is imported, not that of its target."""
    return file.name if file.name not in ("", "..") else file.resolve().name


def _is_python(word: str) -> bool:
    return Path(word).name.startswith("python")


def _neighbours(words: Sequence[str], program: Path | None) -> list[Path]:
    """The modules and packages in the folder from which Python imports first."""
    if words and _is_python(words[0]) and "-m" in takewhile(lambda word: word.startswith("-"), words[1:]):
        folder = Path.cwd()
    elif program is not None and program.suffix == ".py":
        folder = program.absolute().parent
    else:
        return []
    found = sorted(path for path in folder.iterdir() if path.name not in _LEFT_OUT and not path.name.startswith(".") and _is_module(path))
    sizes = dict.fromkeys(found, 0)
    total = 0
    for path in found:
        for size in _sizes(path.resolve()):
            sizes[path] += size
            total += size
            if total > MOST_NEIGHBOURS:  # without walking the rest, which may be a data set on a file server
                break
        if total > MOST_NEIGHBOURS:
            break
    if total > MOST_NEIGHBOURS:
        largest = max(sizes, key=lambda each: sizes[each])
        raise UsageError(
            f"the modules and packages next to the program are larger than {MOST_NEIGHBOURS >> 20} MB, most of it {largest.name}",
            where=str(folder),
            hint="leave them out with --no-modules and name what it needs with --copy; or --workdir with a folder of the hosts'",
        )
    return found


def _is_module(path: Path) -> bool:
    """A module, or a folder with modules in it: a package need not have an ``__init__.py``."""
    try:
        return any(path.glob("*.py")) if path.is_dir() else path.suffix == ".py"
    except OSError:
        return False  # it belongs to somebody else


def _sizes(path: Path) -> Iterator[int]:
    if path.name in _LEFT_OUT or path.name.startswith("."):
        return
    if path.is_symlink() or not path.is_dir():
        yield path.lstat().st_size
        return
    for each in path.iterdir():
        yield from _sizes(each)


def _tar(named: Sequence[Path], neighbours: Sequence[Path]) -> bytes:
    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if Path(member.name).name in _LEFT_OUT else member

    def wanted_neighbour(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """Nothing hidden of what nobody has named: it may be a secret."""
        return None if Path(member.name).name.startswith(".") else wanted(member)

    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for file in named:
            archive.add(file.resolve(), _name(file), filter=wanted)
        for file in neighbours:
            archive.add(file.resolve(), _name(file), filter=wanted_neighbour)
    return content.getvalue()
