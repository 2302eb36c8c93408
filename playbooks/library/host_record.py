#!/usr/bin/python
"""Ansible module: entries in the host's record for what other tasks will make. Runs on the host; Python 3.7+.

With ``prefix`` it refuses another user's folder and records what will be made in it, which may be replaced and removed as a whole; it
creates the folder, open to all users. ``claimed`` paths are recorded as ours where nothing exists yet. ``packages=before`` records what is
installed, ``after`` the difference as ours: it belongs into an ``always``. After an interrupted installation the next ``before`` or
``closed`` records the difference as unsure, because others may have installed packages since; `provision remove` finds out which are ours.
"""

from __future__ import annotations

import json
import os

from ansible.module_utils import host_record, trust
from ansible.module_utils.basic import AnsibleModule

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
            "prefix": {"type": "path"},  # the folder that the record is in
            "contents": {"type": "list", "elements": "str", "default": []},  # names of what will be made in the prefix
            "claimed": {"type": "list", "elements": "path", "default": []},  # paths that other tasks will make
            "packages": {"choices": ["before", "after", "closed"]},  # before or after an installation; `closed`: none is running
            "asked": {"type": "list", "elements": "str", "default": []},  # with `before`: the requested packages
            "held": {"type": "list", "elements": "str", "default": []},  # packages that the installation has put on hold
            "removed": {"type": "list", "elements": "str", "default": []},  # packages that were there before us and were removed
            # packages that the installation changed to another version, name to the version before
            "replaced": {"type": "dict", "default": {}},
            "driver": {"type": "str"},  # the driver that was installed and is not ours to remove
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
