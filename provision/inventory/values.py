"""What the variables we read must look like. Each test takes a value and says what is wrong with it, or None. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from provision.inventory.names import SYSTEM_FOLDERS

HIGHEST_PORT = 65535
_SAFE_PATH = re.compile(r"^[A-Za-z0-9._/+@-]+$")
_ADDRESS = re.compile(r"[\w:\[][\w.:%\[\]-]*")  # never an option of ssh
_LOGIN = re.compile(r"[^\s-]\S*")
_PYTHON_NAME = re.compile(r"^python3(\.\d+)?$")
_INTERFACE = re.compile(r"^[A-Za-z0-9_.:@-]{1,15}$")  # 15 bytes: IFNAMSIZ of the kernel, less its ending zero


def whole_number(value: Any) -> int | None:
    """The value as a whole number; digits in quotes count, true and 2.5 do not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    return None


def slots(value: Any) -> str | None:
    count = whole_number(value)
    return None if count is not None and count >= 1 else f"slots must be a whole number from 1, not {_say(value)}"


def port(value: Any) -> str | None:
    if value is None:
        return None
    count = whole_number(value)
    return (
        None
        if count is not None and 1 <= count <= HIGHEST_PORT
        else f"the port must be a number from 1 to {HIGHEST_PORT}, not {_say(value)}"
    )


def prefix(value: Any) -> str | None:
    if not isinstance(value, str) or not value.startswith("/"):
        return f"provision_prefix must be an absolute path, such as /opt/provision, not {_say(value)}"
    if not _SAFE_PATH.match(value) or ".." in value.split("/"):
        return f"provision_prefix {_say(value)} has characters that compilers and loaders stumble over; use letters, digits and . _ + @ -"
    if re.sub(r"/+", "/", value).rstrip("/") in SYSTEM_FOLDERS or not value.strip("/"):
        return f"provision_prefix {_say(value)} is a folder of the system; give it one of its own, such as /opt/provision"
    return None


def sudo(value: Any) -> str | None:
    return None if str(value).lower() in ("yes", "no", "true", "false") else f"provision_sudo must be yes or no, not {_say(value)}"


def python(value: Any) -> str | None:
    if isinstance(value, str) and (_PYTHON_NAME.match(value) or (value.startswith("/") and _SAFE_PATH.match(value))):
        return None
    return f"provision_python must be an absolute path or a name like python3.11, not {_say(value)}"


def interface(value: Any) -> str | None:
    if not isinstance(value, str) or not _INTERFACE.match(value):
        return f"provision_interface must be the name of a network interface, such as eth0, not {_say(value)}"
    if value == "lo":
        return "provision_interface is `lo`, which reaches no other host"
    return None


def text(value: Any) -> str | None:
    return (
        None
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip()
        else f"must be a text, not {_say(value)}"
    )


def address(value: Any) -> str | None:
    return text(value) or (None if _ADDRESS.fullmatch(str(value).strip()) else f"must be a host name or an address, not {_say(value)}")


def login(value: Any) -> str | None:
    return text(value) or (None if _LOGIN.fullmatch(str(value).strip()) else f"must be a login name, not {_say(value)}")


# Variable → its test.
TESTS: Mapping[str, Callable[[Any], str | None]] = {
    "slots": slots,
    "ansible_port": port,
    "ansible_ssh_port": port,
    "ansible_host": lambda value: (said := address(value)) and f"ansible_host {said}",
    "ansible_ssh_host": lambda value: (said := address(value)) and f"ansible_ssh_host {said}",
    "ansible_user": lambda value: (said := login(value)) and f"ansible_user {said}",
    "ansible_ssh_user": lambda value: (said := login(value)) and f"ansible_ssh_user {said}",
    "provision_prefix": prefix,
    "provision_sudo": sudo,
    "provision_python": python,
    "provision_interface": interface,
}


def _say(value: Any) -> str:
    if value is None:
        return "empty"
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"
