"""The variables we read: which they are, and what each must look like. Pure."""

from __future__ import annotations

import re
from typing import Any

# Ours. All others are Ansible's or the user's own.
OURS = ("slots", "provision_prefix", "provision_sudo", "provision_python", "provision_interface")

# How a host may be called, an IPv6 address among them.
HOST_NAME = re.compile(r"\[?[\w:][\w.:%-]*\]?")

# Folders that belong to the system: a prefix is removed as a whole, so it must be a folder of its own.
SYSTEM_FOLDERS = frozenset(
    {"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin", "/srv"}
    | {"/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/local/lib", "/var", "/var/lib", "/var/tmp"}  # noqa: S108
)

_SAFE_PATH = r"/[A-Za-z0-9._/+@-]*"
_ADDRESS = (r"[\w:\[][\w.:%\[\]-]*", "a host name or an address")  # never an option of ssh
_LOGIN = (r"[^\s-]\S*", "a login name")
_PORT = (1, 65535)

_NUMBERS: dict[str, tuple[int, int | None]] = {"slots": (1, None), "ansible_port": _PORT, "ansible_ssh_port": _PORT}
_TEXTS = {
    "ansible_host": _ADDRESS,
    "ansible_ssh_host": _ADDRESS,
    "ansible_user": _LOGIN,
    "ansible_ssh_user": _LOGIN,
    "provision_sudo": (r"(?i:yes|no|true|false)", "yes or no"),
    "provision_python": (rf"python3(\.\d+)?|{_SAFE_PATH}", "an absolute path or a name like python3.11"),
    # 15 bytes: IFNAMSIZ of the kernel, less its ending zero
    "provision_interface": (r"(?!lo$)[A-Za-z0-9_.:@-]{1,15}", "the name of a network interface that reaches other hosts, such as eth0"),
}

# What is worked out where it is a template; all other variables stay as they are.
READ_BY_US = (
    *_NUMBERS,
    *_TEXTS,
    "provision_prefix",
    "ansible_connection",
    "ansible_private_key_file",
    "ansible_ssh_private_key_file",
    "ansible_ssh_args",
    "ansible_ssh_common_args",
    "ansible_ssh_extra_args",
)


def whole_number(value: Any) -> int | None:
    """The value as a whole number; digits in quotes count, true and 2.5 do not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    return None


def wrong(name: str, value: Any) -> str | None:
    """What is wrong with a variable's value, as the rest of a sentence that begins with its name; None: nothing."""
    if name == "provision_prefix":
        return wrong_prefix(value)
    if name in _NUMBERS and not (value is None and name != "slots"):
        least, most = _NUMBERS[name]
        number = whole_number(value)
        if number is None or number < least or (most and number > most):
            return f"must be a whole number from {least}{f' to {most}' if most else ''}, not {_say(value)}"
    if name in _TEXTS:
        pattern, what = _TEXTS[name]
        plain = isinstance(value, str) or (isinstance(value, bool) if name == "provision_sudo" else type(value) is int)
        if not plain or not re.fullmatch(pattern, str(value)):
            return f"must be {what}, not {_say(value)}"
    return None


def wrong_prefix(value: Any) -> str | None:
    """What is wrong with a prefix, in the same way."""
    if not isinstance(value, str) or not value.startswith("/"):
        return f"must be an absolute path, such as /opt/provision, not {_say(value)}"
    if not re.fullmatch(_SAFE_PATH, value) or ".." in value.split("/"):
        return f"{_say(value)} has characters that compilers and loaders stumble over; use letters, digits and . _ + @ -"
    if (re.sub(r"/+", "/", value).rstrip("/") or "/") in SYSTEM_FOLDERS:
        return f"{_say(value)} is a folder of the system; give it one of its own, such as /opt/provision"
    return None


def _say(value: Any) -> str:
    if value is None or value == "":
        return "empty"
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"
