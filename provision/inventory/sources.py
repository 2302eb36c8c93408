"""Where things stand in an inventory's text: the file and line of every host and variable. It judges nothing and never raises on bad text.

Ansible merges what it reads and forgets the lines, so they are found by scanning the same files once more. What Ansible does with
the text is Ansible's business (`reading`); here a line is only remembered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_COMPOSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VARIABLE_FILE_ENDINGS = ("", ".yml", ".yaml", ".json")
_GROUP_KEYS = ("hosts", "vars", "children")
_INI_HEADING = re.compile(r"^\[([^:\]\s]+)(?::(\w+))?\]\s*(?:#.*)?$")  # as Ansible's ini plugin has it


@dataclass(frozen=True)
class VariableLine:
    """A variable as written: `owner` is a group's name, or None on a host's own line."""

    name: str
    value: str | None
    place: str
    owner: str | None = None


@dataclass(frozen=True)
class HostLine:
    """A host, or a range of hosts, as written in one group."""

    pattern: str
    names: tuple[str, ...]
    group: str
    place: str
    port: int | None = None
    variables: tuple[VariableLine, ...] = ()

    @property
    def is_range(self) -> bool:
        return len(self.names) > 1


@dataclass
class Sources:
    """All that was found, in the order of the text."""

    hosts: list[HostLine] = field(default_factory=list)
    group_variables: list[VariableLine] = field(default_factory=list)
    host_variables: list[tuple[str, VariableLine]] = field(default_factory=list)
    strange_keys: list[tuple[str, str, str]] = field(default_factory=list)  # (key, group, place): YAML that Ansible skips

    def places_of_hosts(self) -> dict[str, str]:
        """Host → the first line that names it."""
        found: dict[str, str] = {}
        for line in self.hosts:
            for name in line.names:
                found.setdefault(name, line.place)
        return found

    def places_of_variables(self, groups: dict[str, tuple[str, ...]]) -> dict[tuple[str, str], str]:
        """(host, variable) → the line that decides: its own line, else its host_vars, else its groups'.

        Args:
            groups: host → all its groups, widest first.
        """
        by_group: dict[str, list[VariableLine]] = {}
        for line in self.group_variables:
            by_group.setdefault(line.owner or "all", []).append(line)
        found: dict[tuple[str, str], str] = {}
        for host, names in groups.items():
            for group in names:
                for line in by_group.get(group, ()):
                    found[host, line.name] = line.place
        for host_line in self.hosts:
            for host in host_line.names:
                for line in host_line.variables:
                    found[host, line.name] = line.place
        for host, line in self.host_variables:
            found[host, line.name] = line.place
        return found

    def all_variables(self) -> Iterator[VariableLine]:
        """Every variable line once, a range's too."""
        for host_line in self.hosts:
            yield from host_line.variables
        yield from self.group_variables
        for _, line in self.host_variables:
            yield line


def shown(path: Path) -> str:
    """A path as the user would type it: relative to where they stand, when it lies below."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def scan(source: Path, groups: Iterable[str], hosts: Iterable[str], ignored: Any = None) -> Sources:
    """Scan an inventory file or folder, and the group_vars and host_vars beside it.

    Args:
        groups: names whose group_vars count.
        hosts: names whose host_vars count.
        ignored: what Ansible leaves out of an inventory folder: a compiled pattern over file names in bytes.
    """
    found = Sources()
    for path in _inventory_files(source, ignored):
        _scan_file(path, found)
    beside = source if source.is_dir() else source.parent
    for group in groups:
        for path in _variable_files(beside / "group_vars", group):
            found.group_variables += _variables_of_file(path, group)
    for host in hosts:
        for path in _variable_files(beside / "host_vars", host):
            found.host_variables += [(host, line) for line in _variables_of_file(path, None)]
    return found


def expand(pattern: str) -> tuple[tuple[str, ...], int | None]:
    """`node[1:3]:22` → (("node1", "node2", "node3"), 22), by Ansible's own rules."""
    from ansible.errors import AnsibleError
    from ansible.parsing.utils.addresses import parse_address
    from ansible.plugins.inventory import detect_range, expand_hostname_range

    try:
        name, port = parse_address(pattern, allow_ranges=True)
    except AnsibleError:
        name, port = pattern, None
    if not detect_range(name):
        return (str(name),), port
    try:
        return tuple(str(each) for each in expand_hostname_range(name)), port
    except (AnsibleError, ValueError):
        return (str(name),), port


# ---------------------------------------------------------------------------------------------------------------- files


def _inventory_files(source: Path, ignored: Any) -> Iterator[Path]:
    if not source.is_dir():
        yield source
        return
    for name in sorted(os.listdir(source)):
        if name.startswith(".") or name in ("group_vars", "host_vars", "vars_plugins") or (ignored and ignored.search(os.fsencode(name))):
            continue
        yield from _inventory_files(source / name, ignored)


def _variable_files(folder: Path, name: str) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for ending in _VARIABLE_FILE_ENDINGS:
        path = folder / (name + ending)
        if path.is_dir():
            yield from (file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix in _VARIABLE_FILE_ENDINGS)
        elif path.is_file():
            yield path


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _scan_file(path: Path, found: Sources) -> None:
    text = _read(path)
    if text.startswith("#!") and os.access(path, os.X_OK):
        return  # a program that prints an inventory has no lines to point at
    if path.suffix in _VARIABLE_FILE_ENDINGS:
        root = _compose(text)
        if isinstance(root, yaml.MappingNode):
            _scan_yaml(root, shown(path), found)
            return
        if path.suffix:
            return
    _scan_ini(text, shown(path), found)


# ------------------------------------------------------------------------------------------------------------------ INI


def _scan_ini(text: str, file: str, found: Sources) -> None:
    from ansible.utils.shlex import shlex_split

    group, kind = "ungrouped", "hosts"
    for number, raw in enumerate(text.splitlines(), start=1):
        line, place = raw.strip(), f"{file}:{number}"
        if not line or line[0] in "#;":
            continue
        if heading := _INI_HEADING.match(line):
            group, kind = heading.group(1), heading.group(2) or "hosts"
            continue
        if kind == "vars" and "=" in line:
            name, _, value = line.partition("=")
            found.group_variables.append(VariableLine(name.strip(), value.strip(), place, group))
        elif kind == "hosts":
            try:
                tokens = shlex_split(line, comments=True)
            except ValueError:
                continue
            if not tokens:
                continue
            names, port = expand(tokens[0])
            pairs = (token.split("=", 1) for token in tokens[1:] if "=" in token)
            variables = tuple(VariableLine(name, value, place) for name, value in pairs)
            found.hosts.append(HostLine(tokens[0], names, group, place, port, variables))


# ----------------------------------------------------------------------------------------------------------------- YAML


def _compose(text: str) -> Any:
    """The tree of a YAML text with its marks, unknown tags and all; None when it is no YAML."""
    try:
        return yaml.compose(text, Loader=_COMPOSER)
    except (yaml.YAMLError, ValueError):
        return None


def _pairs(node: Any) -> list[tuple[str, Any, int]]:
    """(key, value node, line number) of a mapping; what `<<` merges in comes first."""
    if not isinstance(node, yaml.MappingNode):
        return []
    own, merged = [], []
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value == "<<":
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                merged += _pairs(part)
        elif isinstance(key, yaml.ScalarNode):
            own.append((key.value, value, key.start_mark.line + 1))
    return merged + own


def _variables(node: Any, file: str, owner: str | None) -> list[VariableLine]:
    return [
        VariableLine(name, value.value if isinstance(value, yaml.ScalarNode) else None, f"{file}:{line}", owner)
        for name, value, line in _pairs(node)
    ]


def _variables_of_file(path: Path, owner: str | None) -> list[VariableLine]:
    text = _read(path)
    return [] if text.startswith("$ANSIBLE_VAULT") else _variables(_compose(text), shown(path), owner)


def _scan_yaml(root: Any, file: str, found: Sources) -> None:
    groups = _pairs(root)
    if any(name == "plugin" for name, _, _ in groups):
        return  # the settings of an inventory plugin, which asks somebody else for the hosts
    pending, seen = [(name, node) for name, node, _ in groups], set()
    while pending:
        group, node = pending.pop(0)
        if id(node) in seen:  # an alias that leads back
            continue
        seen.add(id(node))
        for key, value, line in _pairs(node):
            if key not in _GROUP_KEYS:
                found.strange_keys.append((key, group, f"{file}:{line}"))
            elif key == "vars":
                found.group_variables += _variables(value, file, group)
            elif key == "children":
                pending += [(name, child) for name, child, _ in _pairs(value)]
            elif isinstance(value, yaml.ScalarNode) and value.value and value.tag.endswith(":str"):
                names, port = expand(value.value)
                found.hosts.append(HostLine(value.value, names, group, f"{file}:{value.start_mark.line + 1}", port))
            else:
                for pattern, variables, host_line in _pairs(value):
                    names, port = expand(pattern)
                    lines = tuple(_variables(variables, file, None))
                    found.hosts.append(HostLine(pattern, names, group, f"{file}:{host_line}", port, lines))
