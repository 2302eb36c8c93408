"""pip's settings as uv takes them, and the lock files that uv writes: what the controller and the hosts share about uv.

uv reads no settings of pip, and that is where users have their index, proxy and certificates. Standard library and Python 3.7 only:
`install.installer.render` gives it to the module `uv_packages`, which runs on hosts.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Like pip, and unlike uv alone, the best version of all indexes is taken. What is taken is compared with the lock.
_ALWAYS: dict[str, Any] = {"index-strategy": "unsafe-best-match", "system-certs": True, "python-downloads": "never"}
#: Settings of pip that are environment variables of uv.
_VARIABLES = {"cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT", "timeout": "UV_HTTP_TIMEOUT", "proxy": "ALL_PROXY"}
_ALIASES = {"default-timeout": "timeout"}


class Setup(NamedTuple):
    """How uv is set up: the settings of uv.toml, environment variables, and constraints files. They may hold passwords."""

    settings: Mapping[str, Any]
    variables: Mapping[str, str] = {}
    constraints: Sequence[str] = ()


def canonical(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip_settings(environ: Mapping[str, str], prefix: str | None = None, root: str = "") -> dict[str, str]:
    """What pip is set up for, in pip's order: system, user, the environment ``prefix``, PIP_CONFIG_FILE, then variables; later ones win.

    ``root``: where the file system begins (another folder in tests).
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    files = [os.path.join(root + folder, "pip", "pip.conf") for folder in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files += [root + "/etc/pip.conf", home + "/.pip/pip.conf", environ.get("XDG_CONFIG_HOME", home + "/.config") + "/pip/pip.conf"]
    files += [os.path.join(prefix, "pip.conf")] if prefix else []
    own = environ.get("PIP_CONFIG_FILE")
    files = [] if own == os.devnull else [*files, own] if own else files
    parsers = []
    for name in files:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(name, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself reports it
        parsers.append(parser)
    settings: dict[str, str] = {}
    for section in ("global", "install"):
        for parser in parsers:
            if parser.has_section(section):
                settings.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    settings.update({key[4:].lower().replace("_", "-"): value for key, value in environ.items() if key.startswith("PIP_") and value})
    return {_ALIASES.get(key, key): value for key, value in settings.items()}


def offline(folder: str) -> Setup:
    """Wheels are taken from ``folder``, and no index is asked."""
    return Setup({**_ALWAYS, "no-index": True, "find-links": [folder]})


def online(
    pip: Mapping[str, str], index_url: str | None = None, extra_index_url: str | None = None, find_links: str | None = None
) -> Setup:
    """What finds what pip would find, with the options of this run.

    ``index_url`` replaces pip's index; the others are asked in addition.
    """
    index = index_url or pip.get("index-url")
    settings = dict(_ALWAYS)
    settings.update({"index-url": index} if index else {})
    settings["extra-index-url"] = ([extra_index_url] if extra_index_url else []) + pip.get("extra-index-url", "").split()
    settings["find-links"] = ([find_links] if find_links else []) + _absolute(pip.get("find-links", ""))
    settings["no-index"] = pip.get("no-index", "").lower() in ("1", "true", "yes", "on") and not index_url
    settings["allow-insecure-host"] = pip.get("trusted-host", "").split()
    variables = {_VARIABLES[key]: value for key, value in pip.items() if key in _VARIABLES and value}
    return Setup(settings, variables, _absolute(pip.get("constraint", "")))


def _absolute(places: str) -> list[str]:
    """Paths and addresses of pip's settings. Paths are made absolute, because uv runs in another folder."""
    return [place if "://" in place else os.path.abspath(os.path.expanduser(place)) for place in places.split()]


def write_settings(path: str, settings: Mapping[str, object]) -> None:
    """Write uv.toml for this user alone: addresses of indexes may hold passwords."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def parse_pylock(text: str) -> list[tuple[str, str, dict[str, str]]]:
    """[(name, version, {checksum: address})] of a pylock.toml that uv wrote; the Pythons of hosts have no TOML parser."""
    found = []
    for package in text.split("[[packages]]\n")[1:]:
        fields = dict(re.findall(r'^(name|version) = "([^"]+)"$', package, re.M))
        wheels = re.findall(r'\{[^{}]*?(?:url|path) = "([^"]+)"[^{}]*hashes = \{[^{}]*sha256 = "([0-9a-f]{64})"', package)
        found.append((canonical(fields["name"]), fields["version"], {sha256: address for address, sha256 in wheels}))
    return found
