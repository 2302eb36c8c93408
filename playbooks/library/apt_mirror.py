#!/usr/bin/python
"""Ansible module: apt lists and settings for a mirror of the distribution's archive, for our calls alone. Python 3.7+, no libraries.

The host's lists stay as they are: changed copies of them, and the indexes that apt downloads, are in a folder of ours. apt uses them where
APT_CONFIG names the configuration in that folder.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import time

from ansible.module_utils import aptsources
from ansible.module_utils.basic import AnsibleModule

LISTS = "/etc/apt"
OS_RELEASE = "/etc/os-release"
FRESH_S = 3600
NAMES = ("sources.list", "sources.list.d/*.list", "sources.list.d/*.sources")
SHORT_TIMEOUTS = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
SHOWN_LINES = 4


def distribution_of(text):
    """(id, codename) out of os-release."""
    values = dict(re.findall(r'^(ID|VERSION_CODENAME)="?([^"\n]*)"?$', text, re.MULTILINE))
    return values.get("ID", ""), values.get("VERSION_CODENAME", "")


def moved_lists(folder, mirror, distribution, codename):
    """{name below ``folder``: text}: the lists with the mirror; None where no list would use it."""
    found, used = {}, False
    for path in sorted(path for name in NAMES for path in glob.glob(os.path.join(folder, name))):
        with open(path, encoding="utf-8", errors="replace") as file:
            binary = re.sub(r"(?m)^\s*deb-src\b.*$", "", file.read())  # not needed, and aptsources does not change them
        text = aptsources.moved(binary, mirror, distribution, codename)
        entries = aptsources.parse(text)
        used = used or any(entry.uri in (mirror.archive, mirror.security) for entry in entries)
        found[os.path.relpath(path, folder)] = text
    return found if used else None


def configuration(folder):
    """apt.conf, without cache files: those would replace the caches of the host's own lists."""
    options = {
        "Dir::Etc::sourcelist": folder + "/sources.list",
        "Dir::Etc::sourceparts": folder + "/sources.list.d",
        "Dir::State::lists": folder + "/lists",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
    }
    return "".join(f'{name} "{value}";\n' for name, value in options.items())


def write(path, text, mode=0o600):  # a list may hold the mirror's password
    with open(path, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)


def write_lists(folder, lists):
    shutil.rmtree(folder + "/sources.list.d", ignore_errors=True)
    for part in ("sources.list.d", "lists/partial"):
        os.makedirs(os.path.join(folder, part), exist_ok=True)
    for name, text in {"sources.list": "", **lists}.items():
        write(os.path.join(folder, name), text)
    write(folder + "/apt.conf", configuration(folder), 0o644)


def is_fresh(mark, lists):
    try:
        with open(mark, encoding="utf-8") as file:
            return file.read() == digest(lists) and 0 <= time.time() - os.path.getmtime(mark) < FRESH_S
    except OSError:
        return False


def digest(lists):
    return hashlib.sha256(json.dumps(lists, sort_keys=True).encode()).hexdigest()


def main():
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},  # the folder; `apt.conf` in it is for APT_CONFIG
            "url": {"type": "str", "required": True},  # the mirror's address without a login
            "login": {"type": "str", "default": "", "no_log": True},  # `user:password` for it, encoded as in an address; empty for none
        },
    )
    folder, url, login = (module.params[name] for name in ("folder", "url", "login"))
    url = re.sub(r"^file:/+", "file:/", url)  # as apt writes it
    os.umask(0o022)
    with open(OS_RELEASE, encoding="utf-8") as file:
        distribution, codename = distribution_of(file.read())
    address = url.replace("://", f"://{login}@", 1) if login else url
    lists = moved_lists(LISTS, aptsources.mirror_at(address, distribution), distribution, codename)
    if lists is None:
        wrong = f"no list in {LISTS} names the archive of {distribution} {codename}, which the mirror {url} could replace"
        module.fail_json(msg=wrong + ": name the archive there, or leave --apt-mirror out")
    mark = folder + "/fetched"
    if is_fresh(mark, lists):
        module.exit_json(changed=False)
    write_lists(folder, lists)
    environment = {"APT_CONFIG": folder + "/apt.conf", "LC_ALL": "C"}
    rc, out, err = module.run_command(["apt-get", "-q", *SHORT_TIMEOUTS, "update"], environ_update=environment)
    plain = aptsources.mirror_at(url, distribution)
    wrong = aptsources.complaints(out + "\n" + err, [plain.archive, plain.security])
    if wrong:
        shutil.rmtree(folder, ignore_errors=True)
        lines = "\n".join(wrong[:SHOWN_LINES])
        module.fail_json(msg=f"the mirror {url} (--apt-mirror) cannot be used for {distribution} {codename}:\n{lines}", rc=rc)
    write(mark, digest(lists))
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
