"""Hosts and inventories as plain, frozen data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from provision.base.errors import UsageError
from provision.base.problems import Problem


@dataclass(frozen=True)
class Host:
    """One host.

    Args:
        name: the name in the inventory, which is its name in every table and report.
        address: what to connect to: ``ansible_host``, else the name.
        port: None: as SSH's own configuration says.
        user: None: as SSH's own configuration says.
        connection: ``ssh`` or ``local``.
        slots: ranks to start on it; None: from its GPUs and cores.
        variables: its variables as Ansible merges them, templates resolved where the toolkit reads them,
            encrypted values as ``ENCRYPTED``.
        prefix: ``provision_prefix``; None: the default.
        python: ``provision_python``; None: the plan chooses.
        interface: ``provision_interface``; None: the plan chooses.
        key_file: the private key Ansible would use; None: SSH's own choice.
        password, sudo_password: what Ansible would give ssh and sudo, decrypted; never written anywhere. None: not in the inventory;
            ``ENCRYPTED``: it cannot be decrypted, or its template not be resolved.
    """

    name: str
    address: str
    port: int | None = None
    user: str | None = None
    connection: str = "ssh"
    slots: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)
    prefix: str | None = None
    python: str | None = None
    interface: str | None = None
    key_file: str | None = None
    password: str | None = field(default=None, repr=False)
    sudo_password: str | None = field(default=None, repr=False)


# In place of a vault-encrypted value in `Host.variables`: only passwords to log in with are ever decrypted.
ENCRYPTED = "<encrypted with ansible-vault>"


@dataclass
class ParsedInventory:
    """What Ansible's parser returns for one inventory, before any check.

    Args:
        hosts: all, in its order.
        groups: all, ``all`` and ``ungrouped`` included.
        selected: names of the hosts that ``--limit`` leaves.
        unmatched: parts of ``--limit`` that match no host.
        unresolved: (host, variable) → why its template cannot be resolved.
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


@dataclass(frozen=True)
class Inventory:
    """All hosts of one HOSTS argument.

    Args:
        argument: HOSTS as the user typed it.
        source: the file or folder; None for ``localhost`` and ``host1,host2``.
        ansible_argument: the value for ``ansible-playbook -i``. None where no such value exists (users, ports, local connections in a
            comma list): write `as_ansible_yaml` into a file and pass that.
        hosts: in the order of the inventory, after ``--limit``.
        everyone: all of them, before ``--limit``.
        problems: warnings; errors never get this far.
    """

    argument: str
    source: Path | None
    ansible_argument: str | None
    hosts: tuple[Host, ...]
    problems: tuple[Problem, ...] = ()
    everyone: tuple[Host, ...] = ()

    def __post_init__(self) -> None:
        if not self.everyone:
            object.__setattr__(self, "everyone", self.hosts)

    def host(self, name: str) -> Host:
        """The host of that name; KeyError when there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    @property
    def left_out(self) -> set[str]:
        """The names of the hosts that ``--limit`` leaves out."""
        return {host.name for host in self.everyone} - {host.name for host in self.hosts}

    @property
    def where(self) -> str:
        """The place for messages: the file as the user would type it, else HOSTS."""
        return shown(self.source) if self.source else self.argument

    def as_ansible_yaml(self) -> str:
        """The hosts as a YAML inventory, for inventories without a file (``localhost``, ``host1,host2``)."""
        hosts = {host.name: _as_variables(host) for host in self.hosts}
        return yaml.dump({"all": {"hosts": hosts}}, Dumper=_UnsafeDumper, sort_keys=False, default_flow_style=False)


def shown(path: Path) -> str:
    """A path as the user would type it: relative to the working folder if it is below that."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class _UnsafeDumper(yaml.SafeDumper):
    """Marks every text that is a value as unsafe, so that Ansible never takes it for a template."""


def _represent(dumper: _UnsafeDumper, mapping: dict[str, object]) -> yaml.Node:
    node = dumper.represent_dict(mapping)
    for _key, value in node.value:
        _mark(value)
    return node


_UnsafeDumper.add_representer(dict, _represent)


def _mark(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
        node.tag = "!unsafe"
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _mark(each)


def _as_variables(host: Host) -> dict[str, Any]:
    variables = {name: value for name, value in host.variables.items() if value != ENCRYPTED}
    connection = {
        "ansible_host": host.address if host.address != host.name else None,
        "ansible_port": host.port,
        "ansible_user": host.user,
        "ansible_connection": host.connection if host.connection != "ssh" else None,
        "slots": host.slots,
    }
    return variables | {name: value for name, value in connection.items() if value is not None}


class InventoryError(UsageError):
    """The inventory cannot be used. It carries every problem; its text prints them all."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = tuple(problems)
        if len(self.problems) == 1:
            only = self.problems[0]
            super().__init__(only.what, where=only.where, hint=only.hint)
        else:
            super().__init__("\n".join(str(problem) for problem in self.problems))

    def parts(self) -> Iterable[tuple[str, str | None]]:
        return [(f"{problem.where}: {problem.what}", problem.hint) for problem in self.problems]
