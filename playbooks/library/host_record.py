#!/usr/bin/python
"""Ansible module: entries in the host's record for what other tasks will make. Runs on the host; Python 3.7+."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_record
short_description: Record folders, files and system packages in the host's record
description:
  - With C(prefix), refuses another user's folder and records what will be made in it; that may be replaced and removed as a whole.
    Creates the folder, and opens it to all users.
  - With C(claimed), records these paths as ours where nothing exists yet.
  - C(packages=before) records what is installed; C(packages=after) records the difference as ours, and belongs into an C(always).
  - After an interrupted installation the next C(before) or C(closed) records the difference as unsure, because others may have
    installed packages since; C(provision remove) finds out which are ours.
author: [the provision authors]
options:
  record: {description: The record., type: path, required: true}
  prefix: {description: The folder that the record is in., type: path}
  contents: {description: Names of what will be made in the prefix., type: list, elements: str, default: []}
  claimed: {description: Paths that other tasks will make., type: list, elements: path, default: []}
  packages: {description: "Before or after an installation; C(closed): none is running.", choices: [before, after, closed]}
  asked: {description: "With C(before): the requested packages.", type: list, elements: str, default: []}
  held: {description: Packages that the installation has put on hold., type: list, elements: str, default: []}
  removed: {description: Packages that were there before us and were removed., type: list, elements: str, default: []}
  replaced: {description: "Packages that the installation changed to another version, name to the version before.", type: dict, default: {}}
  driver: {description: The driver that was installed and is not ours to remove., type: str}
"""

EXAMPLES = r"""
- name: Record present packages
  host_record:
    record: /opt/provision/record.json
    packages: before
    asked: [g++]
"""

RETURN = r"""
"""

import json  # noqa: E402
import os  # noqa: E402

from ansible.module_utils import host_record, trust  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402

OPEN = 0o755
HINT = "Give this host another folder with provision_prefix, or move away what is there."


def holds(path, keys):
    """Whether ``path`` is a JSON document with these keys."""
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and keys <= set(found)


def foreign(names):
    """``names`` in a folder without those that an interrupted run of ours or a new file system leaves."""
    return [name for name in names if not name.startswith(".provision-") and name != "lost+found"]


def refusal(prefix, contents):
    """Why the folder cannot be the prefix, or None."""
    why = trust.distrust(prefix, os.path.join(prefix, "record.json"), os.path.join(prefix, "manifest.json"))
    if why:
        return f"other users could change what is installed in {prefix}: {why}. {HINT}"
    try:
        there = sorted(os.listdir(prefix))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return f"{prefix} is not a folder. {HINT}"
    path, known = os.path.join(prefix, "record.json"), []
    if "record.json" in there:
        if not holds(path, {"schema", "files", "claimed", "packages"}):
            return f"{path} is not a record of provision, or it is damaged. {HINT}"
        known, wrong = host_record.load(path)["contents"], trust.invalid_name(host_record.load(path))
        if wrong is not None:
            return f"{path} names {wrong!r}, which is not ours to remove. {HINT}"
    theirs = [name for name in there if name in contents and name not in known] if "record.json" in there else foreign(there)
    return f"{prefix} holds {', '.join(theirs[:5])}, which provision did not make. {HINT}" if theirs else None


def is_open(prefix):
    return os.path.isdir(prefix) and os.stat(prefix).st_mode & 0o7777 == OPEN


def installed(module):
    if module.get_bin_path("dpkg-query"):
        command = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${binary:Package}\n"]
        pairs = [line.partition(" ") for line in module.run_command(command, check_rc=True)[1].splitlines()]
        return sorted(name for state, _, name in pairs if state not in ("not-installed", "config-files"))
    _rc, out, _err = module.run_command(["rpm", "--query", "--all", "--queryformat=%{NAME}\n"], check_rc=True)
    return sorted(set(out.split()))


def packages_entry(packages, state, now, asked):
    """The record's entry for packages in ``state``, with the packages ``now`` installed."""
    added, unsure = set(packages["added"]), set(packages["unsure"])
    new = set() if packages["before"] is None else set(now) - set(packages["before"]) - added
    if state == "after":
        added |= new
    else:
        unsure |= new
    return {
        "added": sorted(added & set(now)),
        "before": now if state == "before" else None,
        "asked": sorted(set(packages["asked"]) | set(asked)),
        "unsure": sorted((unsure - added) & set(now)),
    }


def note_packages(record, given, now):
    known = {**host_record.EMPTY["packages"], **record["packages"]}
    record["packages"] = packages_entry(known, given["packages"], now, given["asked"])
    record["held"] = sorted((set(record["held"]) | set(given["held"])) & set(now))
    record["removed"] = sorted(set(record["removed"]) | set(given["removed"]))
    ours = {name.split(":")[0] for name in record["packages"]["added"]}
    for name, version in given["replaced"].items():
        if name not in ours:
            record["replaced"].setdefault(name, version)


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "prefix": {"type": "path"},
            "contents": {"type": "list", "elements": "str", "default": []},
            "claimed": {"type": "list", "elements": "path", "default": []},
            "packages": {"choices": ["before", "after", "closed"]},
            "asked": {"type": "list", "elements": "str", "default": []},
            "held": {"type": "list", "elements": "str", "default": []},
            "removed": {"type": "list", "elements": "str", "default": []},
            "replaced": {"type": "dict", "default": {}},
            "driver": {"type": "str"},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)  # the host's users must be able to read the prefix
    given = module.params
    why = refusal(given["prefix"], given["contents"]) if given["prefix"] else None
    if why:
        module.fail_json(msg=why)
    record, noted = host_record.load(given["record"]), host_record.load(given["record"])
    for path in [*([given["prefix"]] if given["prefix"] else []), *given["claimed"]]:
        host_record.claim(record, path)
    opened = bool(given["prefix"]) and not is_open(given["prefix"])
    if given["prefix"] and not module.check_mode:
        try:
            os.makedirs(given["prefix"], mode=OPEN, exist_ok=True)
            why = refusal(given["prefix"], given["contents"])  # another user may have been faster
            if not why and opened:
                os.chmod(given["prefix"], OPEN)  # also one that was there before: the login user runs programs from it
        except OSError as error:
            why = f"{given['prefix']} cannot be opened to all users: {error.strerror}"
        if why:
            module.fail_json(msg=why)
    record["contents"] = sorted(set(record["contents"]) | set(given["contents"]))
    if given["packages"]:
        note_packages(record, given, installed(module))
    if given["driver"]:
        record["driver"] = given["driver"]
    if record != noted and not module.check_mode:
        host_record.save(given["record"], record)
    module.exit_json(changed=opened)


if __name__ == "__main__":
    main()
