"""Reads a catalogue file: YAML without double keys, held against its shape. The first mistake is said with its line."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from provision.base.errors import UsageError
from provision.catalog.shapes import Path, Shape

_WAY_OUT = "correct the file, or install provision again"


class CatalogError(UsageError):
    """A catalogue file that cannot be used; nothing was read from it."""


class _Loader(yaml.SafeLoader):
    """YAML silently keeps the last of two equal keys; here the second one is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read(content: bytes, where: str, shape: Shape | None) -> dict[str, Any]:
    """The mapping that a file holds. ``where`` is its name for messages; without a shape any mapping will do.

    Raises:
        CatalogError: it is no UTF-8, no YAML, no mapping, or has another shape; the message names the line.
    """
    try:
        text = content.decode("utf-8")
        data = yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except UnicodeDecodeError as error:
        raise CatalogError("this is no UTF-8", where=f"{where}:{_lines(content[: error.start])}", hint=_WAY_OUT) from error
    except yaml.reader.ReaderError as error:
        what = f"this is no catalogue: YAML has no character U+{error.character:04X}"
        raise CatalogError(what, where=f"{where}:{_lines(text[: error.position].encode())}", hint=_WAY_OUT) from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise CatalogError(f"this is no catalogue: {error.problem}", where=f"{where}{line}", hint=_WAY_OUT) from error
    if not isinstance(data, dict):
        raise CatalogError("a catalogue file must hold a mapping", where=where, hint=_WAY_OUT)
    for path, complaint in shape(data) if shape else ():
        named = ".".join(str(step) for step in path)
        at = f"{where}:{_line(yaml.compose(text, yaml.SafeLoader), path)}"
        raise CatalogError(f"{named}: {complaint}" if named else complaint, where=at, hint=_WAY_OUT)
    return data


def _lines(before: bytes) -> int:
    """The line (from 1) on which what follows ``before`` stands."""
    return before.count(b"\n") + 1


def _line(node: yaml.Node | None, path: Path) -> int:
    """The line (from 1) of the deepest entry of ``path`` that is there."""
    line = 1
    for step in path:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if yaml.SafeLoader("").construct_object(key) == step), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line
