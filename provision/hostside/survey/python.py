"""Python interpreters, and wheels of PyTorch in local folders of pip."""

import configparser
import os
import re
import sys

from .machine import section


@section("python")
def python(machine):
    others = []
    for found in machine.glob("/usr/bin/python3.*") + machine.glob("/usr/local/bin/python3.*"):
        version = re.search(r"/python(3\.\d+)$", found)
        if version:
            others.append({"path": found, "version": version.group(1)})
    return {
        "executable": sys.executable,
        "version": sys.version.split()[0],
        "environment": _environment(),
        "others": others,
    }


def _environment():
    """conda or venv, if this Python belongs to such an environment."""
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        return "conda"
    return "venv" if sys.prefix != sys.base_prefix else None


def find_links(machine):
    """pip's setting for the login user: system file, user files, then the environment; later ones win."""
    home = machine.home
    files = [os.path.join(folder, "pip", "pip.conf") for folder in machine.env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files += ["/etc/pip.conf", home + "/.pip/pip.conf", machine.env.get("XDG_CONFIG_HOME", home + "/.config") + "/pip/pip.conf"]
    files += filter(None, [machine.env.get("PIP_CONFIG_FILE")])
    found = ""
    for name in files:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(machine.read(name) or "")
        except configparser.Error:
            continue
        for part, option in ((part, option) for part in ("global", "install") for option in ("find_links", "find-links")):
            found = parser.get(part, option, fallback=found)
    return machine.env.get("PIP_FIND_LINKS", found).split()


@section("pip")
def pip(machine):
    links = [link for link in find_links(machine) if not re.match(r"https?://", link)]
    folders = [link[len("file://") :] if link.startswith("file://") else link for link in links]
    wheels = []
    for folder in folders:
        wheels += [name for name in machine.listdir(folder) if re.match(r"torch-.*\.whl$", name)]
    return {"torch_wheels": sorted(set(wheels))}
