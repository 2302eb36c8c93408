"""What kind of thing each fact is, below the sections: what the plan reads must not surprise it. Null stands for what is not known."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from provision.facts.defaults import DEFAULTS

_VERSION = re.compile(r"[0-9][\w.+~:-]*")
_LOGIN = re.compile(r"[^\W-][\w.@$\\+-]*")  # it stands in other hosts' ssh configuration
_HOSTNAME = re.compile(r"\w[\w.:-]*")


def is_version(value: Any) -> bool:
    """Whether it is what package managers call a version: ``1:2.9.0-1+deb12``; nothing that could be anything else where it is rendered."""
    return isinstance(value, str) and bool(_VERSION.fullmatch(value))


def wrong_kinds(at: str, facts: Mapping[str, Any], apart: tuple[str, ...]) -> Iterator[str]:
    """Complaints about facts of a host that are something else than their default, or than what is said of them below.

    Args:
        at: how the host is called in the complaint: ``hosts.a``.
        apart: sections whose own kind is checked elsewhere.
    """
    wrong = list(_unlike(at, {key: value for key, value in facts.items() if key not in apart}, DEFAULTS))
    yield from wrong
    if not wrong:  # else the same would be said twice
        for path, (what, good) in _KINDS.items():
            for place, value in _found(at, facts, path.split(".")):
                if not good(value):
                    yield f"`{place}` must be {what}"


def _unlike(at: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    for key, default in defaults.items():
        value = values.get(key)
        if default is None or value is None:
            continue
        if not isinstance(value, type(default)) or isinstance(value, bool) != isinstance(default, bool):
            yield f"`{at}.{key}` must be " + _NAMES[type(default)]
        elif isinstance(default, Mapping):
            yield from _unlike(f"{at}.{key}", value, default)


def _found(at: str, value: Any, path: list[str]) -> Iterator[tuple[str, Any]]:
    """(where, what) of everything at a path; ``*`` is every entry of a list or object. Null under a name is as if not there."""
    if not path:
        yield at, value
    elif path[0] != "*":
        if isinstance(value, Mapping) and value.get(path[0]) is not None:
            yield from _found(f"{at}.{path[0]}", value[path[0]], path[1:])
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _found(f"{at}[{index}]", each, path[1:])
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _found(f"{at}.{name}", each, path[1:])


def _is_address(value: Any) -> bool:
    try:
        ipaddress.ip_interface(value)
    except ValueError:
        return False
    return isinstance(value, str)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


_NAMES = {dict: "an object", list: "a list", bool: "true or false", str: "a text in quotes", int: "a whole number"}
_TEXT = (_NAMES[str], _is(str))
_OBJECT = (_NAMES[dict], _is(dict))
_VERSIONED = ('a version in quotes, such as "3.11.2"', is_version)
_ADDRESS = ('an address, such as "10.0.0.1/24"', _is_address)
_PORT = ("a port, a number from 1 to 65535", lambda value: _is(int)(value) and 0 < value < 65536)

_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "hostname": ("a host name", lambda value: isinstance(value, str) and bool(_HOSTNAME.fullmatch(value))),
    "user.name": ("a login name", lambda value: isinstance(value, str) and bool(_LOGIN.fullmatch(value))),
    "user.home": _TEXT,
    "user.can_become": (_NAMES[bool], lambda value: isinstance(value, bool)),
    "os.id_like": (_NAMES[list], _is(list)),
    "os.id_like.*": _TEXT,
    "os.family": _TEXT,
    "os.codename": _TEXT,
    "os.libc": _VERSIONED,
    "gpus.*.name": _TEXT,
    "cuda.toolkits.*": _OBJECT,
    "cuda.toolkits.*.path": _TEXT,
    "cuda.toolkits.*.version": _VERSIONED,
    "cuda.toolkits.*.nvcc": (_NAMES[bool], lambda value: isinstance(value, bool)),
    "cuda.toolkits.*.headers": (_NAMES[bool], lambda value: isinstance(value, bool)),
    "cuda.toolkits.*.found": _TEXT,
    "python.version": _VERSIONED,
    "python.executable": _TEXT,
    "python.others.*": _OBJECT,
    "python.others.*.version": _VERSIONED,
    "python.others.*.path": _TEXT,
    "python.asked_for": _OBJECT,
    "python.asked_for.version": _VERSIONED,
    "python.asked_for.path": _TEXT,
    "pip.torch_wheels.*": _TEXT,
    "packages.*": _VERSIONED,
    "network.interfaces.*": ("an object with `name` and `addresses`", lambda value: isinstance(value, dict) and "name" in value),
    "network.interfaces.*.name": _TEXT,
    "network.interfaces.*.addresses": (_NAMES[list], _is(list)),
    "network.interfaces.*.addresses.*": _ADDRESS,
    "network.default_route_interface": _TEXT,
    "network.ssh_connection": _OBJECT,
    "network.ssh_connection.interface": _TEXT,
    "network.ssh_connection.server_address": _TEXT,
    "network.ssh_connection.server_port": _PORT,
    "ssh.ports.*": _PORT,
    "ssh.host_keys.*": _TEXT,
    "missing": (_NAMES[list], _is(list)),
    "missing.*": _TEXT,
    "errors": _OBJECT,
}
