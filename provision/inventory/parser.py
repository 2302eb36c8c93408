"""Ansible's own parser, the one reader of inventory files. Its messages become problems instead of going to the terminal.

Works with ansible-core 2.17 to 2.21. Ansible is imported only when an inventory is read: the import alone costs a quarter of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from provision.base.errors import UsageError
from provision.base.problems import Problem
from provision.inventory.checks import VARIABLES_READ, whole_number
from provision.inventory.model import ENCRYPTED, Host, ParsedInventory, shown

#: Exceptions of one file's parsers: name of the parser, such as ``yaml``, → its exception.
_Errors = dict[str, Exception]
_NAMED = re.compile(r"[!&]?~?[^!&~].*")  # a word of ``--limit`` that names something
_IMPLIED = ("all", "ungrouped")  # groups that every inventory has


def parse(source: str, *, limit: str | None = None) -> ParsedInventory:
    """Parse an inventory file, folder, or list with a comma in it.

    Args:
        source: as for ``ansible -i``.
        limit: as for ``ansible --limit``.
    """
    result = ParsedInventory()
    place = source if "," in source else shown(Path(source))
    with _quiet() as warnings:
        from ansible import constants
        from ansible.errors import AnsibleError
        from ansible.inventory.manager import InventoryManager
        from ansible.parsing.dataloader import DataLoader

        if constants.TRANSFORM_INVALID_GROUP_CHARS == "never":  # as `ignore`, but with a warning about every group called `gpu-nodes`
            constants.TRANSFORM_INVALID_GROUP_CHARS = "ignore"
        loader = DataLoader()
        errors_of: dict[str, _Errors] = {}
        try:
            _load_vault_passwords(loader)
            manager = InventoryManager(loader=loader, sources=[source], parse=False)
            plugins = manager._fetch_inventory_plugins  # the only way to Ansible's exceptions: it prints them and goes on
            manager._fetch_inventory_plugins = lambda: [_recording(plugin, errors_of) for plugin in plugins()]
            manager.parse_sources(cache=True)
            _read_hosts(source, manager, loader, result)
            if not errors_of:
                known = len(warnings)
                _apply_limit(manager, limit, result)
                del warnings[known:]  # a pattern that matches nothing is reported by our checks
        except (AnsibleError, RecursionError, ValueError) as error:
            result.problems.append(_unreadable(error, place))
        for file, errors in errors_of.items():
            result.problems.append(_unreadable(_relevant(file, errors, loader), shown(Path(file))))
    if not result.failed:
        result.problems += [
            Problem("warning", f"Ansible says: {_one_line(each)}", where=place, id="ansible-warning") for each in dict.fromkeys(warnings)
        ]
    return result


def read_settings() -> None:
    """Have Ansible read ansible.cfg and its environment variables, as its first import does. Raises UsageError where it cannot."""
    from ansible.errors import AnsibleError

    try:
        importlib.import_module("ansible.constants")
    except AnsibleError as error:
        raise UsageError(f"Ansible's settings: {_one_line(str(error))}", hint="correct ansible.cfg, or the variable ANSIBLE_…") from error


def connection_defaults() -> Host:
    """A host with what ansible.cfg and the environment set for those without their own: user, port, key_file, ssh's arguments …"""
    from ansible import constants

    port, user, transport = constants.DEFAULT_REMOTE_PORT, constants.DEFAULT_REMOTE_USER, _connection(constants.DEFAULT_TRANSPORT)
    return Host("", "", port, user, transport, variables=_ssh_arguments(), key_file=constants.DEFAULT_PRIVATE_KEY_FILE)


def _ssh_arguments() -> dict[str, str]:
    """Variables with what ansible.cfg and the environment add to ssh's arguments, such as a jump host."""
    from ansible import constants
    from ansible.plugins.loader import connection_loader

    if not constants.CONFIG_FILE and not any(name.startswith("ANSIBLE_SSH_") for name in os.environ):
        return {}  # loading the plugin takes 0.2 s
    connection_loader.get("ssh", class_only=True)  # which makes its options known
    found = {}
    for option in ("ssh_args", "ssh_common_args", "ssh_extra_args", "ssh_executable"):
        value, origin = constants.config.get_config_value_and_origin(option, plugin_type="connection", plugin_name="ssh")
        if origin != "default" and value:
            found[f"ansible_{option}"] = str(value)
    return found


def _connection(name: str | None) -> str:
    """A connection plugin's short name: ``ssh``, ``local`` …"""
    short = (name or "ssh").removeprefix("ansible.builtin.")
    return "ssh" if short == "smart" else short


def _recording(plugin: Any, errors_of: dict[str, _Errors]) -> Any:
    """The plugin, which also records its exceptions, by file; those of a file that another plugin can parse are dropped."""
    name, original = str(getattr(plugin, "_load_name", type(plugin).__name__)), plugin.parse

    def recorded(inventory: object, loader: object, path: object, cache: bool = True) -> None:
        file = str(path)
        try:
            original(inventory, loader, path, cache=cache)
        except Exception as error:
            errors_of.setdefault(file, {})[name] = error
            raise
        if not ("script" in errors_of.get(file, {}) and _has_shebang(file)):  # its text could look like hosts
            errors_of.pop(file, None)

    plugin.parse = recorded
    if parse_lines := getattr(plugin, "_parse", None):  # of INI files

        def numbered(*arguments: Any) -> None:
            try:
                parse_lines(*arguments)
            except Exception as error:  # whose line Ansible forgets from 2.19 on
                error.inventory_line = plugin._origin.line_num if hasattr(plugin, "_origin") else plugin.lineno  # type: ignore[attr-defined]
                raise

        plugin._parse = numbered
    return plugin


def _has_shebang(file: str) -> bool:
    with open(file, "rb") as opened:
        return opened.read(2) == b"#!"


def _relevant(file: str, errors: _Errors, loader: Any) -> Exception:
    """Of several parsers' exceptions about one file, that of the parser that the file was written for."""
    wanted = "script" if "script" in errors and _has_shebang(file) else "yaml" if file.endswith((".yml", ".yaml", ".json")) else "ini"
    if wanted != "script":
        with contextlib.suppress(Exception):  # then it is not YAML
            data = loader.load_from_file(file)
            wanted = "auto" if "plugin" in data and "auto" in errors else "yaml" if isinstance(data, Mapping) else wanted
    return errors.get(wanted) or list(errors.values())[-1]


def _read_hosts(source: str, manager: Any, loader: Any, result: ParsedInventory) -> None:
    from ansible.vars.manager import VariableManager

    if "," not in source:
        path = Path(source)
        loader.set_basedir(str(path if path.is_dir() else path.parent))
    variables = VariableManager(loader=loader, inventory=manager)
    result.groups = tuple(str(name) for name in manager.groups)
    fallback = connection_defaults()
    for host in manager.get_hosts("all"):
        result.hosts.append(_host(host, variables.get_vars(host=host, include_hostvars=False), loader, fallback, result.unresolved))


def _host(host: Any, everything: dict[str, Any], loader: Any, fallback: Host, unresolved: dict[tuple[str, str], str]) -> Host:
    from ansible.template import Templar

    name = str(host.name)
    variables = {str(key): plain(value) for key, value in everything.items() if key not in _ADDED_BY_ANSIBLE}
    resolved: dict[str, object] = {}
    for key in (each for each in VARIABLES_READ if each in everything):
        value = everything[key]
        try:
            if isinstance(value, str) and ("{{" in value or "{%" in value):
                value = Templar(loader=loader, variables=everything).template(value)
            resolved[key] = plain(value)
        except Exception as error:  # noqa: BLE001 - up to 2.18 also what the template's own code raises
            unresolved[name, key] = _one_line(str(error)) or type(error).__name__

    def value_of(*names: str, default: object = None) -> object:
        return next((resolved[each] for each in names if resolved.get(each) not in (None, "", ENCRYPTED)), default)

    def text(*names: str, default: object = None) -> str | None:
        found = value_of(*names, default=default)
        return None if found is None else str(found)

    def password(*names: str) -> str | None:
        given = [everything[each] for each in names if plain(everything.get(each)) not in (None, "")]
        try:
            return str(Templar(loader=loader, variables=everything).template(given[-1])) if given else None
        except Exception:  # noqa: BLE001 - as above, and of what cannot be decrypted
            return ENCRYPTED

    return Host(
        name=name,
        address=text("ansible_host", "ansible_ssh_host") or name,
        port=whole_number(value_of("ansible_port", "ansible_ssh_port", default=fallback.port)),
        user=text("ansible_user", "ansible_ssh_user", default=fallback.user),
        connection=_connection(text("ansible_connection", default=fallback.connection)),
        slots=whole_number(value_of("slots")),
        variables={**fallback.variables, **variables, **resolved},
        prefix=text("provision_prefix"),
        python=text("provision_python"),
        interface=text("provision_interface"),
        key_file=text("ansible_private_key_file", "ansible_ssh_private_key_file", default=fallback.key_file),
        password=password("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
        sudo_password=password("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
    )


_ADDED_BY_ANSIBLE = frozenset(
    {"ansible_check_mode", "ansible_config_file", "ansible_diff_mode", "ansible_facts", "ansible_forks", "ansible_inventory_sources"}
    | {"ansible_playbook_python", "ansible_run_tags", "ansible_skip_tags", "ansible_verbosity", "ansible_version", "group_names", "groups"}
    | {"hostvars", "inventory_dir", "inventory_file", "inventory_hostname", "inventory_hostname_short", "omit", "playbook_dir", "vars"}
)


def plain(value: object) -> object:
    """Ansible's tagged values as ordinary ones; encrypted ones stay encrypted."""
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


def _apply_limit(manager: Any, limit: str | None, result: ParsedInventory) -> None:
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import split_host_pattern

    matching = manager._match_list  # for Ansible `a*` stands for all hosts: it is also a pattern of groups, and one is called `all`
    manager._match_list = lambda items, pattern: [each for each in matching(items, pattern) if each == pattern or each not in _IMPLIED]
    try:
        manager.subset(limit)  # which reads files, for `@FILE`
        words, typed = split_host_pattern(manager._subset or []), split_host_pattern(limit or "")
        # An empty list stands for all hosts in Ansible, which also leaves out what it cannot read.
        read, written = (re.sub(r"[\s:,]", "", each) for each in ("".join(split_host_pattern(typed)), limit or ""))
        if limit is not None and not (words and read == written and all(map(_NAMED.fullmatch, words))):
            raise AnsibleError("invalid pattern: expected names, groups or patterns of hosts")
        patterns = [str(each) for each in typed if not each.startswith("@")]
        result.unmatched = tuple(each for each in patterns if not manager.get_hosts(each.lstrip("!&"), ignore_limits=True))
        selected = {str(host.name) for host in manager.get_hosts("all")}
        result.selected = tuple(host.name for host in result.hosts if host.name in selected)
    except AnsibleError as error:
        hint = "name hosts and groups of the inventory; for all hosts leave --limit out"
        result.problems.append(Problem("error", _one_line(str(error)), hint, where=f"--limit {limit!r}", id="limit-invalid"))


def _load_vault_passwords(loader: Any) -> None:
    """Load the passwords whose files ansible.cfg or the environment names; without a prompt."""
    from ansible import constants
    from ansible.parsing import vault

    identities = [constants.DEFAULT_VAULT_PASSWORD_FILE or "", *(constants.DEFAULT_VAULT_IDENTITY_LIST or ())]
    secrets = []
    for identity in identities:
        name, _, file = str(identity).rpartition("@")
        if file and not file.startswith("prompt"):
            secret = vault.get_file_vault_secret(filename=file, vault_id=name or "default", loader=loader)
            secret.load()
            secrets.append((name or "default", secret))
    loader.set_vault_secrets(secrets)
    context = getattr(vault, "VaultSecretsContext", None)  # from 2.19 on: for single values
    if context is not None and context.current(optional=True) is None:
        context.initialize(context(secrets))


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """Keep Ansible's display silent; its warnings are in the list that is yielded.

    The display's method is replaced because it prints each warning once per process only.
    """
    warnings: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from ansible.utils.display import Display

        display = Display()
        display.warning = lambda msg, *_, **__: warnings.append(str(msg))
        try:
            yield warnings
        finally:
            del display.warning


def _unreadable(error: BaseException, place: str) -> Problem:
    """An exception of Ansible's as a problem, at the file and line that it or one of its causes names."""
    from ansible.parsing.vault import AnsibleVaultError

    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    origins = [_origin(getattr(each, "obj", None)) for each in causes]
    file, line = max(origins, key=lambda origin: (origin[1] is not None, origin[0] is not None))
    line = next((each.inventory_line for each in causes if hasattr(each, "inventory_line")), line)
    where = shown(Path(file)) if file else place
    message = _one_line(str(error)).removeprefix("Failed to parse inventory: ")
    if any(isinstance(each, RecursionError) for each in causes):
        message = "a value contains itself or is nested too deeply"
    if any(isinstance(each, AnsibleVaultError) for each in causes):
        hint = "name the password's file in ANSIBLE_VAULT_PASSWORD_FILE or in ansible.cfg (vault_password_file)"
        what = "it" if file else "a file of the inventory"
        return Problem("error", f"{what} is encrypted and cannot be opened: {message}", hint, where=where, id="inventory-encrypted")
    hint = f"correct it, and try: ansible-inventory --list -i {shlex.quote(place)}"
    return Problem(
        "error", f"Ansible cannot read it: {message}", hint, where=f"{where}:{line}" if line else where, id="inventory-unreadable"
    )


def _origin(subject: Any) -> tuple[str | None, int | None]:
    """The file and line that Ansible notes on values and errors: an Origin tag from 2.19 on, `ansible_pos` before."""
    if position := getattr(subject, "ansible_pos", None):
        return str(position[0]), int(position[1])
    try:
        from ansible._internal._datatag._tags import Origin
    except ImportError:
        return None, None
    tag = subject if isinstance(subject, Origin) else Origin.get_tag(subject)
    return getattr(tag, "path", None), getattr(tag, "line_num", None)


# Parts of Ansible's messages to remove: the place, which the problem has, and quotations, which can contain passwords: a host's line,
# variables and templates (all but the host's line only before 2.19).
_QUOTED = (
    (r"^/\S+:\d+: ", ""),
    (r"(Error parsing host definition) '.*': ", r"\1: "),
    (r"(failed to combine variables[^:]*):.*", r"\1"),
    (r"\.? String: .*", ""),
    (r" occurred on \(.*\): ", ": "),
    (r" while templating '.*'\. Error was", ": "),
    (r"\{[{%].*[}%]\}: ", ""),
)


def _one_line(text: str) -> str:
    """A message without the excerpts of files and the values that Ansible adds: they can contain passwords."""
    text = re.split(r"\n\s*The (?:error appears|offending line)", text)[0]
    for quoted, kept in _QUOTED:
        text = re.sub(quoted, kept, text, flags=re.DOTALL)
    return " ".join(text.split())
