"""The hosts of an inventory of Ansible's, as far as it takes to start ranks there: names, slots, and how ssh gets there.

Read are INI files with groups, ranges, children, and variables in the file itself. Whatever else could say how a host is reached (YAML,
variables in other files, templates, passwords) is refused, and never passed over: `provision run --hosts` reads all of it.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from typing import Dict, Iterator, Mapping

from collective_core.errors import CollectiveError

Variables = Dict[str, str]
_SECTION = re.compile(r"\[([^:\]\s]+)(?::(vars|children|hosts))?\]")
#: What only a whole reader of inventories can use.
_TOO_MUCH = (
    *("ansible_password", "ansible_ssh_pass", "ansible_ssh_password", "ansible_ssh_executable", "ansible_ssh_args"),
    *("ansible_ssh_host", "ansible_ssh_port", "ansible_ssh_user"),
)
_OPTIONS = {"ansible_port": "-p", "ansible_user": "-l", "ansible_ssh_private_key_file": "-i"}
_MORE = ("ansible_ssh_common_args", "ansible_ssh_extra_args")


def is_one(text: str) -> bool:
    """Whether the text of a file is an inventory, and not a host file of mpirun: it has groups, or variables of Ansible's."""
    return bool(re.search(r"^\s*\[[^:\]\s]+(:\w+)?\]\s*([#;].*)?$|\bansible_\w+\s*=|^---|^all:|\b\w+\[\w+:\w+\]", text, re.MULTILINE))


def read(path: str, text: str) -> dict[str, Variables]:
    """Host → its variables, in the file's order: its own line's before its groups', of these the narrower ones before the wider.

    Raises :class:`CollectiveError` with file and line for what cannot be read.
    """
    beside = [name for name in ("group_vars", "host_vars") if os.path.isdir(os.path.join(os.path.dirname(path) or ".", name))]
    if path.endswith((".yml", ".yaml")) or re.match(r"---|all:|ungrouped:", text) or beside:
        what = f"there are variables in {beside[0]} beside it" if beside else "this is YAML"
        raise CollectiveError(f"{path}: {what}; only inventories in one INI file are read: use `provision run --hosts {path}`", "invalid")
    own: dict[str, Variables] = {}
    members: dict[str, list[str]] = {}
    children: dict[str, list[str]] = {}
    shared: dict[str, Variables] = {}
    group, kind = "ungrouped", "hosts"
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}:{number}"
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("["):
            section = _SECTION.fullmatch(line.partition("#")[0].strip())
            if not section:
                raise CollectiveError(f"{where}: {line!r} is no section: write [group], [group:vars] or [group:children]", "invalid")
            group, kind = section[1], section[2] or "hosts"
        elif kind == "vars":
            shared.setdefault(group, {}).update(_assignments(where, [line]))
        elif kind == "children":
            children.setdefault(group, []).append(line.split()[0])
        else:
            pattern, *rest = _words(where, line)
            for name in _names(where, pattern):
                own.setdefault(name, {}).update(_assignments(where, rest))
                members.setdefault(group, []).append(name)
    if not own:
        raise CollectiveError(f"{path}: it names no host", "invalid")
    found = {name: dict(shared.get("all", {})) for name in own}
    for wider in _widest_first({*members, *children, *shared} - {"all"}, children, path):
        for name in _hosts_of(wider, members, children):
            found[name].update(shared.get(wider, {}))
    for name, variables in found.items():
        variables.update(own[name])
    return found


def way_to(name: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """What ssh is given to get to a host; nothing where it is this machine. Raises :class:`CollectiveError` for what we cannot do."""
    if variables.get("ansible_connection") == "local":
        return ()
    unknown = [key for key in _TOO_MUCH if key in variables]
    if variables.get("ansible_connection", "ssh") not in ("ssh", "smart"):
        unknown.append("ansible_connection")
    if unknown:
        todo = "write ansible_host, ansible_port, ansible_user and a key that asks nothing, or use `provision run --hosts`"
        raise CollectiveError(f"host {name}: {unknown[0]} is not read here: {todo}", "invalid")
    words = [word for key, option in _OPTIONS.items() if key in variables for word in (option, os.path.expanduser(variables[key]))]
    for key in _MORE:
        try:
            words += shlex.split(variables.get(key, ""))
        except ValueError as error:
            raise CollectiveError(f"host {name}: {key}: {error}", "invalid") from error
    return (*words, variables.get("ansible_host", name))


def _words(where: str, line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise CollectiveError(f"{where}: {line!r}: {error}", "invalid") from error
    remark = next((at for at, word in enumerate(words) if word.startswith(";")), len(words))
    return words[:remark]


def _assignments(where: str, words: list[str]) -> Variables:
    found = {}
    for word in words:
        name, sign, value = (part.strip() for part in word.partition("="))
        if not sign or not name.isidentifier():
            raise CollectiveError(f"{where}: {word!r} is not NAME=VALUE", "invalid")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":  # a whole line's; a host's line has lost its quotes already
            value = value[1:-1]
        if "{{" in value:
            raise CollectiveError(f"{where}: {name} is a template; write the value itself, or use `provision run --hosts`", "invalid")
        found[name] = value
    return found


def _names(where: str, pattern: str) -> Iterator[str]:
    """``gpu[01:03].site`` → gpu01.site … gpu03.site, as Ansible counts: ends included, leading zeros kept, letters too."""
    pieces = re.split(r"\[(\w+:\w+(?::\d+)?)\]", pattern)
    choices = [[piece] if at % 2 == 0 else _range(where, piece) for at, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _range(where: str, text: str) -> list[str]:
    first, last, *step = text.split(":")
    by = int(step[0]) if step else 1
    if first.isdigit() and last.isdigit() and by > 0:
        return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1, by)]
    if len(first) == len(last) == 1 and first.isalpha() and last.isalpha() and by > 0:
        return [chr(letter) for letter in range(ord(first), ord(last) + 1, by)]
    raise CollectiveError(f"{where}: [{text}] is no range of hosts", "invalid")


def _widest_first(groups: set[str], children: Mapping[str, list[str]], path: str) -> list[str]:
    """In the order in which one overrules the one before: children after their parents; those beside each other by name, as in Ansible."""
    depth = dict.fromkeys(groups, 0)
    for _ in range(len(groups) + 1):
        changed = False
        for parent, inner in children.items():
            for child in inner:
                if child not in groups:
                    raise CollectiveError(f"{path}: [{parent}:children] names {child}, and there is no such group", "invalid")
                deeper = depth.get(parent, 0) + 1
                changed = changed or deeper > depth[child]
                depth[child] = max(depth[child], deeper)
        if not changed:
            return sorted(groups, key=lambda group: (depth[group], group))
    raise CollectiveError(f"{path}: groups are children of each other", "invalid")


def _hosts_of(group: str, members: Mapping[str, list[str]], children: Mapping[str, list[str]]) -> set[str]:
    return set(members.get(group, ())).union(*(_hosts_of(child, members, children) for child in children.get(group, ())))
