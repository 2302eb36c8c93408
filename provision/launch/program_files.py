"""What goes to the hosts with a program of the user's: its file, the modules and packages next to it, and what was named besides."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from provision.base.errors import ProvisionError, UsageError
from provision.remote import shell
from provision.remote.session import Session

#: Never brought along: histories, environments and what Python makes anew.
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
_PLACE = "provision-run"  # in the login's home, on every host
_BRING_S = 600.0  # a guard against what hangs; programs may bring folders with them
#: Bytes of modules and packages that nobody has named. Code is smaller; what is larger is data next to it.
MOST_NEIGHBOURS = 50 << 20


class Packed(NamedTuple):
    """A program and what goes with it. ``place``: its folder in a home; ``unpack``: the script there that takes ``archive``."""

    names: list[str]
    place: str
    command: list[str]
    archive: bytes

    @property
    def unpack(self) -> str:
        """A script of /bin/sh."""
        return f"cd && mkdir -p {self.place} && tar -x -f - --no-same-owner -C {self.place}"


def pack(command: Sequence[str], bring: Sequence[Path], *, modules: bool = True) -> Packed:
    """The program's file and what was named besides, and the command as it is there.

    ``modules``: also what Python would import from next to the program (with ``-m``: from here), as it does on this machine.

    Raises:
        UsageError: two have one name, or the modules are larger than code is.
    """
    words, files = list(command), list(bring)
    at = next((number for number, word in enumerate(words) if Path(word).is_file() and not (number == 0 and _is_python(word))), None)
    program = Path(words[at]) if at is not None else None
    if program is not None and at is not None:
        words[at] = program.name if at else f"./{program.name}"
        files.append(program)
    missing = next((word for word in takewhile(lambda word: not word.startswith("-"), words[1:2])), "") if _is_python(words[0]) else ""
    if program is None and missing.endswith(".py") and not Path(missing).is_absolute():
        raise UsageError(
            f"{missing}: there is no such file here", hint="name the program as it is here; or --workdir with a folder of the hosts'"
        )
    named = {_name(file) for file in files}
    try:
        neighbours = [file for file in _neighbours(words, program) if file.name not in named] if modules else []
        archive = _archive(files, neighbours)
    except OSError as error:
        hint = "leave the modules next to the program out with --no-modules, and name what it needs with --bring" if modules else None
        raise UsageError(f"it cannot be brought: {error.strerror}", where=str(error.filename), hint=hint) from error
    names = [_name(file) for file in [*files, *neighbours]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two of the files to bring have the same name: {', '.join(twice)}", hint="put them into a folder, and bring that")
    name = re.sub(r"[^\w.-]", "_", Path.cwd().name) or "job"
    return Packed(names, f"{_PLACE}/{name}", words, archive)


def _name(file: Path) -> str:
    """As it is called there: a link's own name, by which it is imported, not that of what it leads to."""
    return file.name if file.name not in ("", "..") else file.resolve().name


def _is_python(word: str) -> bool:
    return Path(word).name.startswith("python")


def ship(session: Session, packed: Packed, scripts: Mapping[str, str]) -> None:
    """Bring it to the hosts, on each by its script. Raises ProvisionError where one of them fails."""
    session.progress.stage(f"Bring {', '.join(packed.names) or 'nothing'} to ~/{packed.place}", list(scripts))
    answers = shell.ask(session, scripts, stdin=packed.archive, timeout=_BRING_S)
    for host, answer in answers.items():
        if answer.code != 0:
            said = answer.err.strip() or f"exit code {answer.code}"
            raise ProvisionError("not done in time" if answer.code is None else said, where=f"{host}, bringing the program")


def _neighbours(words: Sequence[str], program: Path | None) -> list[Path]:
    """The modules and packages that the program could import from the folder that Python would look in first."""
    if words and _is_python(words[0]) and "-m" in takewhile(lambda word: word.startswith("-"), words[1:]):
        folder = Path.cwd()
    elif program is not None and program.suffix == ".py":
        folder = program.absolute().parent
    else:
        return []
    found = sorted(path for path in folder.iterdir() if path.name not in _LEFT_OUT and not path.name.startswith(".") and _is_module(path))
    sizes = dict.fromkeys(found, 0)
    for path in found:
        for size in _sizes(path.resolve()):
            sizes[path] += size
            if sum(sizes.values()) > MOST_NEIGHBOURS:
                largest = max(sizes, key=lambda each: sizes[each])
                raise UsageError(
                    f"the modules and packages next to the program are larger than {MOST_NEIGHBOURS >> 20} MB, most of it {largest.name}",
                    where=str(folder),
                    hint="leave them out with --no-modules and name what it needs with --bring; or --workdir with a folder of the hosts'",
                )
    return found


def _is_module(path: Path) -> bool:
    """A module, or a folder with modules in it: a package need not have an ``__init__.py``."""
    try:
        return any(path.glob("*.py")) if path.is_dir() else path.suffix == ".py"
    except OSError:
        return False  # not ours to read


def _sizes(path: Path) -> Iterator[int]:
    if path.name in _LEFT_OUT or path.name.startswith("."):
        return
    if path.is_symlink() or not path.is_dir():
        yield path.lstat().st_size
        return
    for each in path.iterdir():
        yield from _sizes(each)


def _archive(files: Sequence[Path], neighbours: Sequence[Path]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as packed:
        for file in files:
            packed.add(file.resolve(), _name(file), filter=_wanted)
        for file in neighbours:
            packed.add(file.resolve(), _name(file), filter=_wanted_unasked)
    return archive.getvalue()


def _wanted_unasked(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Nothing hidden of what nobody has named: it may be a secret."""
    return None if Path(member.name).name.startswith(".") else _wanted(member)


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in _LEFT_OUT:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
