"""Files that come with the toolkit: playbooks, the engine's sources and benchmark, image templates, scripts for the hosts.

In a checkout they are next to the package, in an installed wheel inside it; only this module knows which.
"""

from __future__ import annotations

import ast
import base64
import shlex
import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jinja2

from provision.base.errors import ProvisionError

_PACKAGE = Path(__file__).resolve().parents[1]
_PARSING = threading.Lock()  # CPython 3.11 counts the depth of syntax trees that threads make at the same time as of one (gh-106905)
ENGINE_WHEELS = _PACKAGE / "_bundled/wheels"  # where `make dist` puts them; a checkout has none before
# By path: on the package index the name `provision` belongs to another project.
REINSTALL_HINT = "install it again: in its checkout pip install --force-reinstall . (or its wheel, by path)"


def folder(name: str) -> Path:
    """The folder ``playbooks``, ``collective_core``, ``benchmarks`` or ``images``; raises ProvisionError when the installation lacks it."""
    for place in (_PACKAGE / "_bundled" / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise ProvisionError(f"the installation of provision lacks its folder {name!r}", hint=REINSTALL_HINT)


@cache
def templates(place: Path, finalize: Callable[[object], object] | None = None) -> jinja2.Environment:
    """The templates of a folder: playbooks or Dockerfiles. They have their own delimiters, because Ansible, shell and Docker use the usual
    ones. ``finalize`` is applied to every value that is filled in."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(place),
        block_start_string="[%",
        block_end_string="%]",
        variable_start_string="[[",
        variable_end_string="]]",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  none of them is HTML
        finalize=finalize,
    )


def hostside(name: str) -> Path:
    """A script that runs on a host, e.g. ``job.py``."""
    return _PACKAGE / "hostside" / name


@cache
def script(name: str) -> str:
    """The text of a script for hosts: a module such as ``job.py``, or a package such as ``survey``, with all that it imports of ours.

    The modules are joined in the order of their imports, beginning with those of the script, and their imports are dropped.
    """
    place = hostside(name)
    texts: dict[Path, str] = {}

    def add(path: Path) -> None:
        if path not in texts:
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines()
            with _PARSING:
                nodes = ast.parse(source).body
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and node.level:
                    for needed in [node.module] if node.module else [alias.name for alias in node.names]:
                        add(path.parents[node.level - 1] / f"{needed}.py")
                    lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
            texts[path] = "\n".join(lines) + "\n"

    add(place if place.is_file() else place / "__main__.py")
    return "".join(texts.values())


@cache
def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def inline_command(name: str, *arguments: str, interpreter: str = "python3") -> str:
    """A shell command that contains a whole `script`: one round trip, nothing to copy first and nothing to clean up.

    The script is compressed, so that it stays well below the 128 KiB that Linux allows one argument.
    """
    packed = _packed(script(name))
    loader = f"import base64,zlib;exec(compile(zlib.decompress(base64.b64decode('{packed}')),'{name}','exec'))"
    return " ".join([interpreter, "-c", shlex.quote(loader), *map(shlex.quote, arguments)])
