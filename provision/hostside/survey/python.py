"""Python interpreters and pip's settings."""

import configparser
import importlib.util
import os
import re
import sys
import sysconfig

from .machine import section, without_credentials

PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


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
        "has_pip": bool(importlib.util.find_spec("pip")),
        "has_headers": os.path.exists(os.path.join(sysconfig.get_path("include") or "", "Python.h")),
        "externally_managed": os.path.exists(os.path.join(sysconfig.get_path("stdlib") or "", "EXTERNALLY-MANAGED")),
        "others": others,
    }


def _environment():
    """conda or venv, if this Python belongs to such an environment."""
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        return "conda"
    return "venv" if sys.prefix != sys.base_prefix else None


def pip_settings(machine):
    """(pip's settings for the login user, the files that they come from): system file, user files, then the environment; later ones win."""
    home = machine.home
    files = [os.path.join(folder, "pip", "pip.conf") for folder in machine.env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files += ["/etc/pip.conf", home + "/.pip/pip.conf", machine.env.get("XDG_CONFIG_HOME", home + "/.config") + "/pip/pip.conf"]
    if machine.env.get("PIP_CONFIG_FILE"):
        files.append(machine.env["PIP_CONFIG_FILE"])
    settings, sources = {}, []
    for name in files:
        text = machine.read(name)
        if text is None:
            continue
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        sources.append(name)
        for part in ("global", "install"):
            if parser.has_section(part):
                settings.update({key.replace("_", "-"): value for key, value in parser.items(part)})
    for key, value in machine.env.items():
        if key.startswith("PIP_"):
            settings[key[4:].lower().replace("_", "-")] = value
    return settings, sources


@section("pip")
def pip(machine):
    settings, sources = pip_settings(machine)
    find_links = settings.get("find-links", "").split()
    folders = [link[len("file://") :] if link.startswith("file://") else link for link in find_links if not re.match(r"https?://", link)]
    wheels = []
    for folder in folders:
        wheels += [name for name in machine.listdir(folder) if re.match(r"torch-.*\.whl$", name)]
    return {
        "index_url": without_credentials(settings["index-url"]) if settings.get("index-url") else None,
        "extra_index_urls": [without_credentials(url) for url in settings.get("extra-index-url", "").split()],
        "find_links": [without_credentials(link) for link in find_links],
        "no_index": settings.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        "torch_wheels": sorted(set(wheels)),
        "certificates": settings.get("cert"),
        "config_files": sources,
        "proxies": sorted(name for name in machine.env if name.lower() in PROXY_VARIABLES and machine.env[name]),
    }
