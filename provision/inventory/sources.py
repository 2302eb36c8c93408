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
    repeated_keys: list[tuple[str, str, str]] = field(default_factory=list)  # (key, first place, place): YAML where the last one wins
    unreadable: list[tuple[str, int, str]] = field(default_factory=list)  # (file, line, why): INI that Ansible refuses
    encrypted: list[str] = field(default_factory=list)  # files that are encrypted as a whole
    yaml_files: set[str] = field(default_factory=set)

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


def scan(source: Path, groups: Iterable[str] | None, hosts: Iterable[str] | None, ignored: Any = None) -> Sources:
    """Scan an inventory file or folder, and the group_vars and host_vars beside it.

    Args:
        groups: names whose group_vars count; None: all.
        hosts: names whose host_vars count; None: all.
        ignored: what Ansible leaves out of an inventory folder: a compiled pattern over file names in bytes.
    """
    found = Sources()
    for path in _inventory_files(source, ignored):
        _scan_file(path, found)
    beside = source if source.is_dir() else source.parent
    for group, path in _variable_files(beside / "group_vars", groups):
        found.group_variables += _variables_of_file(path, group, found)
    for host, path in _variable_files(beside / "host_vars", hosts):
        found.host_variables += [(host, line) for line in _variables_of_file(path, None, found)]
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


def _variable_files(folder: Path, names: Iterable[str] | None) -> Iterator[tuple[str, Path]]:
    """(name, file) for each of the names: NAME, NAME.yml and so on, or all files in a folder NAME."""
    if not folder.is_dir():
        return
    wanted = None if names is None else frozenset(names)
    for entry in sorted(folder.iterdir()):
        name = entry.stem if entry.suffix in _VARIABLE_FILE_ENDINGS else entry.name
        if entry.name.startswith(".") or (wanted is not None and name not in wanted):
            continue
        if entry.is_dir():
            inside = (file for file in sorted(entry.rglob("*")) if file.is_file() and file.suffix in _VARIABLE_FILE_ENDINGS)
            yield from ((name, file) for file in inside)
        elif entry.suffix in _VARIABLE_FILE_ENDINGS:
            yield name, entry


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
        if path.suffix or isinstance(root, yaml.MappingNode):
            found.yaml_files.add(shown(path))
            _scan_yaml(root, shown(path), found)
            return
    _scan_ini(text, shown(path), found)


# ------------------------------------------------------------------------------------------------------------------ INI


def _scan_ini(text: str, file: str, found: Sources) -> None:
    group, kind = "ungrouped", "hosts"
    declared, awaited = {"all", "ungrouped"}, list[tuple[str, int, str]]()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if heading := _INI_HEADING.match(line):
            group, kind = heading.group(1), heading.group(2) or "hosts"
            if kind not in _GROUP_KEYS:
                found.unreadable.append((file, number, f"`{kind}` is none of `hosts`, `vars`, `children`"))
            elif kind == "vars":
                awaited.append((group, number, f"the group `{group}` is declared nowhere"))
            else:
                declared.add(group)
        elif kind == "vars":
            name, equals, value = line.partition("=")
            if equals:
                found.group_variables.append(VariableLine(name.strip(), value.strip(), f"{file}:{number}", group))
            else:
                found.unreadable.append((file, number, f"`{line}` is no NAME=VALUE"))
        elif kind == "children":
            child = line.split("#")[0].strip()
            awaited.append((child, number, f"the group `{child}` is declared nowhere"))
        else:
            _scan_host_line(line, file, number, group, found)
    found.unreadable += [(file, number, why) for name, number, why in awaited if name not in declared]


def _scan_host_line(line: str, file: str, number: int, group: str, found: Sources) -> None:
    from ansible.utils.shlex import shlex_split

    try:
        tokens = shlex_split(line, comments=True)
    except ValueError:
        found.unreadable.append((file, number, "a quotation mark is not closed"))
        return
    if not tokens:
        return
    place = f"{file}:{number}"
    if tokens[0].count("[") != tokens[0].count("]"):
        found.unreadable.append((file, number, f"`{tokens[0]}` has a bracket that is not closed"))
    elif tokens[0].endswith(":"):
        found.unreadable.append((file, number, f"`{tokens[0]}` ends in a colon; is it YAML? Then the file's name must end in .yml"))
    elif stray := [token for token in tokens[1:] if "=" not in token]:
        found.unreadable.append((file, number, f"`{stray[0]}` is no NAME=VALUE"))
    names, port = expand(tokens[0])
    if names == (tokens[0],) and re.search(r"\[.*:.*\]", tokens[0]):
        found.unreadable.append((file, number, f"`{tokens[0]}` is no range such as node[1:3] or node[a:c]"))
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


def _variables_of_file(path: Path, owner: str | None, found: Sources) -> list[VariableLine]:
    text = _read(path)
    if text.startswith("$ANSIBLE_VAULT"):
        found.encrypted.append(shown(path))
        return []
    root = _compose(text)
    found.repeated_keys += _repeated(root, shown(path))
    return _variables(root, shown(path), owner)


def _repeated(node: Any, file: str) -> Iterator[tuple[str, str, str]]:
    """Keys that stand twice in one mapping, anywhere below a node."""
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
            continue
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, line) != line:
                yield key.value, f"{file}:{first[key.value]}", f"{file}:{line}"
            pending.append(value)


def _scan_yaml(root: Any, file: str, found: Sources) -> None:
    if root is not None and not isinstance(root, yaml.MappingNode):
        found.unreadable.append((file, root.start_mark.line + 1, "it must be a mapping: group → hosts, vars, children"))
    groups = _pairs(root)
    if any(name == "plugin" for name, _, _ in groups):
        return  # the settings of an inventory plugin, which asks somebody else for the hosts
    found.repeated_keys += _repeated(root, file)
    pending, seen = [(name, node) for name, node, _ in groups], set()
    while pending:
        group, node = pending.pop(0)
        if id(node) in seen:  # an alias that leads back
            continue
        seen.add(id(node))
        for key, value, line in _pairs(node):
            if key not in _GROUP_KEYS:
                found.strange_keys.append((key, group, f"{file}:{line}"))
            elif isinstance(value, yaml.SequenceNode):
                found.unreadable.append((file, line, f"`{key}` of group `{group}` must be a mapping, one `NAME:` per line, not a list"))
            elif key == "vars":
                found.group_variables += _variables(value, file, group)
            elif key == "children":
                pending += [(name, child) for name, child, _ in _pairs(value)]
            else:
                _scan_yaml_hosts(value, group, file, found)


def _scan_yaml_hosts(node: Any, group: str, file: str, found: Sources) -> None:
    if isinstance(node, yaml.ScalarNode) and node.value and node.tag.endswith(":str"):  # `hosts: NAME` is short for one host
        names, port = expand(node.value)
        found.hosts.append(HostLine(node.value, names, group, f"{file}:{node.start_mark.line + 1}", port))
    for pattern, variables, line in _pairs(node):
        names, port = expand(pattern)
        found.hosts.append(HostLine(pattern, names, group, f"{file}:{line}", port, tuple(_variables(variables, file, None))))
        if pattern.isdigit():
            found.unreadable.append((file, line, f"the host name {pattern} must stand in quotes"))
        elif isinstance(variables, yaml.ScalarNode) and variables.value and not variables.tag.endswith(":null"):
            found.unreadable.append((file, line, f"`{pattern}` must hold variables, one `NAME: VALUE` per line"))
