"""Ansible's own parser, called quietly: what it says goes into a list instead of onto the user's terminal. It judges nothing.

Works with ansible-core 2.17 to 2.21. Ansible is imported only when an inventory is read: the import alone costs a quarter of a second.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provision.inventory.model import ENCRYPTED
from provision.inventory.names import CONNECTION, READ_BY_US


@dataclass(frozen=True)
class Complaint:
    """Something Ansible said: a failure of a parser (`plugin` is its name, `source` what it was given), or a warning."""

    message: str
    plugin: str | None = None
    source: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class ReadHost:
    """A host as Ansible has it.

    Args:
        groups: all groups it belongs to, widest first, ``all`` included.
        variables: merged by Ansible's precedence, as plain Python values.
        resolved: the few variables we read ourselves, templates worked out.
        unresolved: of these, the ones whose template fails, with Ansible's reason.
    """

    name: str
    groups: tuple[str, ...]
    variables: Mapping[str, Any]
    resolved: Mapping[str, Any]
    unresolved: Mapping[str, str]


@dataclass
class Reading:
    """What came out of one inventory."""

    hosts: list[ReadHost] = field(default_factory=list)
    groups: tuple[str, ...] = ()
    named: frozenset[str] = frozenset()  # variables that the inventory itself sets, not a fact cache
    selected: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    failure: Complaint | None = None  # Ansible stopped altogether
    complaints: list[Complaint] = field(default_factory=list)


def read(source: str, *, limit: str | None = None) -> Reading:
    """Read an inventory file, folder, or list with a comma in it.

    Args:
        source: as for ``ansible -i``.
        limit: as for ``ansible --limit``.
    """
    result = Reading()
    with _quiet(result.complaints):
        from ansible.errors import AnsibleError

        try:
            _read(source, limit, result)
        except AnsibleError as error:
            result.failure = _from_exception(error)
    return result


def defaults() -> dict[str, Any]:
    """How ansible.cfg and the environment say to connect where the inventory says nothing: port, user, connection, key_file."""
    with _quiet([]):
        from ansible import constants

        return {
            "port": constants.DEFAULT_REMOTE_PORT,
            "user": constants.DEFAULT_REMOTE_USER,
            "connection": constants.DEFAULT_TRANSPORT,
            "key_file": constants.DEFAULT_PRIVATE_KEY_FILE,
        }


def known_to_ansible() -> frozenset[str]:
    """The variable names by which the installed Ansible can be told how to connect and become root."""
    names = set(CONNECTION)
    with _quiet([]):
        from ansible import constants

        for mapped in constants.MAGIC_VARIABLE_MAPPING.values():
            names.update(mapped)
        names.update(constants.COMMON_CONNECTION_VARS)
        with contextlib.suppress(Exception):  # other plugins only add names: without them the list is shorter, not wrong
            for kind, plugin in (
                ("connection", "ssh"),
                ("connection", "local"),
                ("connection", "paramiko_ssh"),
                ("become", "sudo"),
                ("shell", "sh"),
            ):
                from ansible.plugins.loader import become_loader, connection_loader, shell_loader

                {"connection": connection_loader, "become": become_loader, "shell": shell_loader}[kind].get(plugin, class_only=True)
                for definition in constants.config.get_configuration_definitions(kind, plugin).values():
                    names.update(entry["name"] for entry in definition.get("vars") or ())
    return frozenset(str(name) for name in names)


def ignored_names() -> Any:
    """The pattern of file names that Ansible leaves out of an inventory folder."""
    with _quiet([]):
        from ansible.inventory import manager

        return getattr(manager, "IGNORED", None)


# --------------------------------------------------------------------------------------------------------------- inside


def _read(source: str, limit: str | None, result: Reading) -> None:
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.vars.manager import VariableManager

    loader = DataLoader()
    if "," not in source:
        path = Path(source)
        loader.set_basedir(str(path if path.is_dir() else path.parent))
    _give_vault_passwords(loader)
    manager = InventoryManager(loader=loader, sources=[source])
    variables = VariableManager(loader=loader, inventory=manager)
    hosts = manager.get_hosts("all")
    result.groups = tuple(str(name) for name in manager.groups)
    result.named = frozenset(str(name) for owner in (*manager.groups.values(), *hosts) for name in owner.vars)
    for host in hosts:
        result.hosts.append(_read_host(host, loader, variables))
    result.selected, result.unmatched = _select(manager, [host.name for host in hosts], limit)


def _read_host(host: Any, loader: Any, variables: Any) -> ReadHost:
    from ansible.errors import AnsibleError
    from ansible.inventory.helpers import sort_groups
    from ansible.template import Templar

    everything = variables.get_vars(host=host, include_hostvars=False)
    resolved: dict[str, Any] = {}
    unresolved: dict[str, str] = {}
    for name in READ_BY_US:
        if name not in everything:
            continue
        value = everything[name]
        try:
            if isinstance(value, str) and ("{{" in value or "{%" in value):
                value = Templar(loader=loader, variables=everything).template(value)
            resolved[name] = plain(value)
        except AnsibleError as error:
            unresolved[name] = _one_line(str(error))
    return ReadHost(
        name=str(host.name),
        groups=tuple(str(group.name) for group in sort_groups(host.get_groups())),
        variables={str(name): plain(value) for name, value in everything.items() if name not in _NOT_THE_USERS},
        resolved=resolved,
        unresolved=unresolved,
    )


# What `get_vars` adds by itself.
_NOT_THE_USERS = frozenset(
    {"ansible_check_mode", "ansible_config_file", "ansible_diff_mode", "ansible_facts", "ansible_forks", "ansible_inventory_sources"}
    | {"ansible_playbook_python", "ansible_run_tags", "ansible_skip_tags", "ansible_verbosity", "ansible_version", "group_names", "groups"}
    | {"hostvars", "inventory_dir", "inventory_file", "inventory_hostname", "inventory_hostname_short", "omit", "playbook_dir", "vars"}
)


def _select(manager: Any, names: list[str], limit: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts that `--limit` leaves, and those parts of it that match none."""
    if limit is None:
        return tuple(str(name) for name in names), ()
    from ansible.inventory.manager import split_host_pattern

    unmatched = []
    for pattern in split_host_pattern(limit):
        bare = pattern.lstrip("!&")
        if not pattern.startswith("@") and bare and not manager.get_hosts(bare):
            unmatched.append(pattern)
    manager.subset(limit)
    left = {host.name for host in manager.get_hosts("all")}
    return tuple(str(name) for name in names if name in left), tuple(unmatched)


def _give_vault_passwords(loader: Any) -> None:
    """The passwords that ansible.cfg or the environment names; nobody is asked."""
    from ansible import constants
    from ansible.parsing.vault import get_file_vault_secret

    files = [("default", constants.DEFAULT_VAULT_PASSWORD_FILE)] if constants.DEFAULT_VAULT_PASSWORD_FILE else []
    for identity in constants.DEFAULT_VAULT_IDENTITY_LIST or ():
        name, at, file = str(identity).rpartition("@")
        if file and not file.startswith("prompt"):
            files.append((name if at else "default", file))
    secrets = []
    for name, file in files:
        secret = get_file_vault_secret(filename=file, vault_id=name, loader=loader)
        secret.load()
        secrets.append((name, secret))
    loader.set_vault_secrets(secrets)


def plain(value: Any) -> Any:
    """Ansible's tagged values as ordinary ones; what is encrypted stays so."""
    if _is_encrypted(value):
        return ENCRYPTED
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _is_encrypted(value: Any) -> bool:
    return type(value).__name__ in ("AnsibleVaultEncryptedUnicode", "EncryptedString")


# ---------------------------------------------------------------------------------------------------- what Ansible says


@contextlib.contextmanager
def _quiet(complaints: list[Complaint]) -> Iterator[None]:
    """Collect Ansible's warnings in `complaints` and keep its display silent.

    Its methods are shadowed on the one display object: its own lists of what was already said would swallow a second reading's.
    """
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        from ansible.utils.display import Display

    display = Display()

    def warning(msg: str, *_: Any, **__: Any) -> None:
        complaints.append(_from_warning(str(msg)))

    def error_as_warning(msg: str | None, exception: BaseException, *_: Any, **__: Any) -> None:
        complaint = _from_exception(exception)
        named = re.search(r"with '(\w+)' plugin", msg or "")
        complaints.append(replace(complaint, plugin=named.group(1)) if named else complaint)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    shadows = {"warning": warning, "error_as_warning": error_as_warning, "display": nothing, "deprecated": nothing}
    before = {name: vars(display)[name] for name in shadows if name in vars(display)}
    vars(display).update(shadows)
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            yield
    finally:
        for name in shadows:
            vars(display).pop(name, None)
        vars(display).update(before)


def _from_warning(message: str) -> Complaint:
    """Up to 2.18 a parser's failure comes as a warning: `* Failed to parse FILE with NAME plugin: FILE:3: reason`."""
    failed = re.match(r"\s*\* Failed to parse (?P<source>.+?) with (?P<plugin>\w+) plugin: (?P<why>.*)", message, re.S)
    if not failed:
        return Complaint(_one_line(message))
    return replace(_located(failed["why"]), plugin=failed["plugin"], source=failed["source"])


def _from_exception(error: BaseException) -> Complaint:
    """A failure with the place Ansible gives it: an Origin tag (2.19 on), `ansible_pos` (before), or its text."""
    plugin = source = file = line = None
    seen: BaseException | None = error
    while seen is not None and line is None:
        subject = getattr(seen, "obj", None)
        given = re.search(r"<inventory plugin '(\w+)' with source '(.+)'>", str(getattr(subject, "description", None) or ""))
        if given:
            plugin, source = given.groups()
        found_file, line = _origin(subject)
        file = found_file or file
        seen = seen.__cause__ or seen.__context__
    if file:
        return Complaint(_one_line(str(error)), plugin, source, file, line)
    return replace(_located(str(error)), plugin=plugin, source=source)


def _origin(subject: Any) -> tuple[str | None, int | None]:
    if position := getattr(subject, "ansible_pos", None):
        return str(position[0]), int(position[1])
    path, line = getattr(subject, "path", None), getattr(subject, "line_num", None)
    if path is None:
        with contextlib.suppress(ImportError):
            from ansible._internal._datatag._tags import Origin

            tag = Origin.get_tag(subject)
            path, line = getattr(tag, "path", None), getattr(tag, "line_num", None)
    return (str(path) if path else None), (int(line) if line else None)


def _located(text: str) -> Complaint:
    """Take the place out of Ansible's text: `/a/hosts.ini:3: reason`, or `in '/a/hosts.yml': line 3, column 5` (its two older styles)."""
    in_front = re.match(r"\s*(?P<file>/[^\n:]+):(?P<line>\d+): (?P<why>.*)", text, re.S)
    if in_front:
        return Complaint(_one_line(in_front["why"]), file=in_front["file"], line=int(in_front["line"]))
    named = re.search(r"in '(?P<file>/[^']+)': line (?P<line>\d+)", text)
    return Complaint(_one_line(text), file=named["file"] if named else None, line=int(named["line"]) if named else None)


# What says nothing to the reader of an inventory → what to say instead.
_NOISE = (
    (re.compile(r"\n\s*(?:The error appears to be in|The offending line appears).*", re.S), ""),
    (re.compile(r"We were unable to read either as JSON nor YAML.*?Syntax Error while loading YAML\.\s*", re.S), "YAML parsing failed: "),
    (re.compile(r'\s+in "<unicode string>", line \d+, column \d+'), ""),
    (re.compile(r"\"?<class '[\w.]*(?:List|Sequence|list)\w*'>\"?"), "a list"),
    (re.compile(r"\"?<class '[\w.]*(?:Str|Unicode|str)\w*'>\"?"), "a text"),
)


def _one_line(text: str) -> str:
    """The sentence of a message, without the excerpts and advice that older versions add."""
    for pattern, instead in _NOISE:
        text = pattern.sub(instead, text)
    return " ".join(text.split())
