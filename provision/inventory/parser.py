"""Ansible's own parser, called quietly: the one reader of inventory files. What it says goes into a list, not onto the user's terminal.

Works with ansible-core 2.17 to 2.21. Ansible is imported only when an inventory is read: the import alone costs a quarter of a second.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.base.problems import Problem
from provision.inventory.model import ENCRYPTED, Host, shown
from provision.inventory.values import READ_BY_US, whole_number


@dataclass
class Reading:
    """What came out of one inventory.

    Args:
        hosts: all, in its order.
        groups: all, ``all`` and ``ungrouped`` included.
        selected: names of the hosts that ``--limit`` leaves.
        unmatched: parts of ``--limit`` that match no host.
        unresolved: (host, variable) → why its template cannot be worked out.
        problems: files that Ansible cannot read (it goes on without their hosts), else its warnings.
    """

    hosts: list[Host] = field(default_factory=list)
    groups: tuple[str, ...] = ()
    selected: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    unresolved: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(problem.severity == "error" for problem in self.problems)


def read(source: str, *, limit: str | None = None) -> Reading:
    """Read an inventory file, folder, or list with a comma in it.

    Args:
        source: as for ``ansible -i``.
        limit: as for ``ansible --limit``.
    """
    result = Reading()
    place = source if "," in source else shown(Path(source))
    failures: dict[str, dict[str, Exception]] = {}
    warnings: list[str] = []
    with _quiet(warnings.append):
        from ansible import constants
        from ansible.errors import AnsibleError
        from ansible.inventory.manager import InventoryManager
        from ansible.parsing.dataloader import DataLoader

        if constants.TRANSFORM_INVALID_GROUP_CHARS == "never":  # as `ignore`, but for a warning of every group called `gpu-nodes`
            constants.TRANSFORM_INVALID_GROUP_CHARS = "ignore"
        loader = DataLoader()
        try:
            _give_vault_passwords(loader)
            manager = InventoryManager(loader=loader, sources=[source], parse=False)
            _read(source, manager, loader, failures, result)
        except (AnsibleError, RecursionError, ValueError) as error:
            result.problems.append(_failure(error, place))
        for file, said in failures.items():
            result.problems.append(_failure(_most_telling(file, said, loader), shown(Path(file))))
    if result.failed:
        return result
    result.problems += [Problem("warning", f"Ansible says: {_one_line(each)}", where=place) for each in dict.fromkeys(warnings)]
    with _quiet():
        try:
            _select(manager, limit, result)
        except AnsibleError as error:
            result.problems.append(
                Problem("error", _one_line(str(error)), "name hosts and groups of the inventory", where=f"--limit {limit}")
            )
    return result


def defaults() -> dict[str, Any]:
    """How ansible.cfg and the environment say to connect where the inventory says nothing: port, user, connection, key_file."""
    with _quiet():
        from ansible import constants

        return {
            "port": constants.DEFAULT_REMOTE_PORT,
            "user": constants.DEFAULT_REMOTE_USER,
            "connection": _connection(constants.DEFAULT_TRANSPORT),
            "key_file": constants.DEFAULT_PRIVATE_KEY_FILE,
        }


def _connection(said: str | None) -> str:
    """``ssh``, ``local`` …, whichever of its names for it Ansible was told."""
    name = (said or "ssh").replace("ansible.builtin.", "")
    return "ssh" if name == "smart" else name


# ---------------------------------------------------------------------------------------------------------------- hosts


def _read(source: str, manager: Any, loader: Any, failures: dict[str, dict[str, Exception]], result: Reading) -> None:
    from ansible.vars.manager import VariableManager

    if "," not in source:
        path = Path(source)
        loader.set_basedir(str(path if path.is_dir() else path.parent))
    plugins = manager._fetch_inventory_plugins  # Ansible has no other way to get at the exceptions: it prints them and goes on
    manager._fetch_inventory_plugins = lambda: [_noting(plugin, failures) for plugin in plugins()]
    manager.parse_sources(cache=True)
    variables = VariableManager(loader=loader, inventory=manager)
    result.groups = tuple(str(name) for name in manager.groups)
    fallback = defaults()
    for host in manager.get_hosts("all"):
        result.hosts.append(_host(host, variables.get_vars(host=host, include_hostvars=False), loader, fallback, result.unresolved))


class _AtLineError(Exception):
    """What the parser of INI files said of a line; Ansible's own exception says it, and only up to 2.18 with the line's number."""

    def __init__(self, line: int, said: str) -> None:
        super().__init__(said)
        self.line = line


def _noting(plugin: Any, failures: dict[str, dict[str, Exception]]) -> Any:
    """The plugin, with the exceptions of its parser in `failures`: file → plugin's name → exception; none for files that one could read."""
    name, parse = str(getattr(plugin, "_load_name", plugin.__class__.__name__)), plugin.parse

    def noted(inventory: Any, loader: Any, path: Any, cache: bool = True) -> None:
        file = str(path)
        try:
            parse(inventory, loader, path, cache=cache)
        except Exception as error:
            failures.setdefault(file, {})[name] = error
            raise
        said = failures.pop(file, {})
        if "script" in said and _is_a_program(file):  # its text may look like hosts, or like nothing but comments
            failures[file] = {"script": said["script"]}

    plugin.parse = noted
    if parse_lines := getattr(plugin, "_parse", None):
        plugin._parse = _noting_lines(plugin, parse_lines)
    return plugin


def _noting_lines(plugin: Any, parse_lines: Callable[..., Any]) -> Callable[..., Any]:
    """The parser of lines, whose exceptions tell the line: 2.19 forgets it as soon as this one returns, before it is `lineno`."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        from ansible.errors import AnsibleError

        try:
            return parse_lines(*args, **kwargs)
        except Exception as error:
            line = getattr(getattr(plugin, "_origin", None), "line_num", None) or getattr(plugin, "lineno", None)
            if not isinstance(line, int):
                raise
            said = str(error)
            if before := re.match(re.escape(str(getattr(plugin, "_filename", ""))) + r":(\d+): ", said):
                line, said = int(before[1]), said[before.end() :]
            if not isinstance(error, AnsibleError) and not said.startswith("Section ["):  # Python's words, not Ansible's
                said = "this line is no section, host or variable"
            raise _AtLineError(line, said) from error

    return noted


def _is_a_program(file: str) -> bool:
    """Whether it is meant to be run; on some file systems every file may be."""
    try:
        with open(file, "rb") as opened:
            return os.access(file, os.X_OK) and opened.read(2) == b"#!"
    except OSError:
        return False


def _host(host: Any, everything: dict[str, Any], loader: Any, fallback: Mapping[str, Any], unresolved: dict[tuple[str, str], str]) -> Host:
    from ansible.template import Templar

    name = str(host.name)
    variables = {str(key): plain(value) for key, value in everything.items() if key not in _NOT_THE_USERS}
    resolved: dict[str, Any] = {}
    for key in (each for each in READ_BY_US if each in everything):
        value = everything[key]
        try:
            if isinstance(value, str) and ("{{" in value or "{%" in value):
                value = Templar(loader=loader, variables=everything).template(value)
            resolved[key] = plain(value)
        except Exception as error:  # noqa: BLE001 - up to 2.18 also what the template's own code raises
            unresolved[name, key] = _one_line(str(error)) or type(error).__name__

    def value_of(*names: str, default: Any = None) -> Any:
        return next((resolved[each] for each in names if resolved.get(each) not in (None, "", ENCRYPTED)), default)

    def text(*names: str, default: Any = None) -> str | None:
        found = value_of(*names, default=default)
        return None if found is None else str(found)

    return Host(
        name=name,
        address=text("ansible_host", "ansible_ssh_host") or name,
        port=whole_number(value_of("ansible_port", "ansible_ssh_port", default=fallback["port"])),
        user=text("ansible_user", "ansible_ssh_user", default=fallback["user"]),
        connection=_connection(text("ansible_connection", default=fallback["connection"])),
        slots=whole_number(value_of("slots")),
        groups=tuple(sorted(str(each.name) for each in host.get_groups() if each.name not in ("all", "ungrouped"))),
        variables=variables | resolved,
        prefix=text("provision_prefix"),
        python=text("provision_python"),
        interface=text("provision_interface"),
        key_file=text("ansible_private_key_file", "ansible_ssh_private_key_file", default=fallback["key_file"]),
    )


# What `get_vars` adds by itself.
_NOT_THE_USERS = frozenset(
    {"ansible_check_mode", "ansible_config_file", "ansible_diff_mode", "ansible_facts", "ansible_forks", "ansible_inventory_sources"}
    | {"ansible_playbook_python", "ansible_run_tags", "ansible_skip_tags", "ansible_verbosity", "ansible_version", "group_names", "groups"}
    | {"hostvars", "inventory_dir", "inventory_file", "inventory_hostname", "inventory_hostname_short", "omit", "playbook_dir", "vars"}
)


def _select(manager: Any, limit: str | None, result: Reading) -> None:
    from ansible.inventory.manager import split_host_pattern

    patterns = split_host_pattern(limit) if limit is not None else []
    named = [(each, each.lstrip("!&")) for each in patterns if not each.startswith("@")]
    result.unmatched = tuple(str(each) for each, bare in named if bare and not manager.get_hosts(bare))
    manager.subset(limit)
    left = {str(host.name) for host in manager.get_hosts("all")}
    result.selected = tuple(host.name for host in result.hosts if host.name in left)


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
    if type(value).__name__ in ("AnsibleVaultEncryptedUnicode", "EncryptedString"):
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


# ---------------------------------------------------------------------------------------------------- what Ansible says


@contextlib.contextmanager
def _quiet(warn: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hand Ansible's warnings to `warn` and keep its display silent.

    Its methods are shadowed on the one display object: its own lists of what was already said would swallow a second reading's.
    """
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        from ansible.utils.display import Display

        display = Display()

        def nothing(*_: Any, **__: Any) -> None:
            pass

        shadows = {
            "warning": lambda msg, *_, **__: warn(str(msg)),
            "error_as_warning": nothing,
            "display": nothing,
            "deprecated": nothing,
        }
        before = {name: vars(display)[name] for name in shadows if name in vars(display)}
        vars(display).update(shadows)
        try:
            yield
        finally:
            for name in shadows:
                vars(display).pop(name, None)
            vars(display).update(before)


def _most_telling(file: str, said: Mapping[str, Exception], loader: Any) -> Exception:
    """Of several parsers' exceptions about one file, that of the parser it was written for."""
    wanted = "script" if "script" in said else "yaml" if file.endswith((".yml", ".yaml", ".json")) else "ini"
    if wanted != "script":
        with contextlib.suppress(Exception):  # then it is no YAML
            data = loader.load_from_file(file)
            wanted = "auto" if "auto" in said and "plugin" in data else "yaml" if isinstance(data, Mapping) else wanted
    return said.get(wanted) or list(said.values())[-1]


def _failure(error: BaseException, place: str) -> Problem:
    """An exception as a problem, with the place that Ansible gives it: an Origin tag (2.19 on) or `ansible_pos` (before)."""
    from ansible.parsing.vault import AnsibleVaultError

    file, line, encrypted, said = None, None, False, str(error)
    seen: BaseException | None = error
    while seen is not None:
        encrypted = encrypted or isinstance(seen, AnsibleVaultError)
        if isinstance(seen, _AtLineError):
            line, said = seen.line, str(seen)
        elif isinstance(seen, RecursionError):
            said = "a value contains itself, or is nested too deeply"
        if line is None:
            found, line = _origin(getattr(seen, "obj", None))
            file = found or file
        seen = seen.__cause__ or seen.__context__
    where = shown(Path(file)) if file else place
    message = _one_line(said).removeprefix("Failed to parse inventory: ")
    if encrypted:
        hint = "name the password's file in ANSIBLE_VAULT_PASSWORD_FILE or in ansible.cfg (vault_password_file)"
        what = "it" if file else "a file of the inventory"
        return Problem("error", f"{what} is encrypted and cannot be opened: {message}", hint, where=where)
    where = f"{where}:{line}" if line else where
    hint = f"correct it, and try: ansible-inventory --list -i {shlex.quote(place)}"
    return Problem("error", f"Ansible cannot read it: {message}", hint, where=where)


def _origin(subject: Any) -> tuple[str | None, int | None]:
    if position := getattr(subject, "ansible_pos", None):
        return str(position[0]), int(position[1])
    try:
        from ansible._internal._datatag._tags import Origin
    except ImportError:
        return None, None
    tag = subject if isinstance(subject, Origin) else Origin.get_tag(subject)
    return getattr(tag, "path", None), getattr(tag, "line_num", None)


# Where Ansible quotes what may hold passwords: a host's line, variables, templates (but for the first, before 2.19).
_QUOTED = (
    (r"(Error parsing host definition) '.*': ", r"\1: "),
    (r"(failed to combine variables[^:]*):.*", r"\1"),
    (r"\.? String: .*", ""),
    (r" occurred on \(.*\): ", ": "),
    (r" while templating '.*'\. Error was", ": "),
    (r"\{[{%].*[}%]\}: ", ""),
)


def _one_line(text: str) -> str:
    """A message without the excerpts of files and the values that Ansible adds: they may hold passwords."""
    text = re.split(r"\n\s*The (?:error appears|offending line)", text)[0]
    for quoted, kept in _QUOTED:
        text = re.sub(quoted, kept, text, flags=re.DOTALL)
    return " ".join(text.split())
