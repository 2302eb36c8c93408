#!/usr/bin/python
"""Ansible module: brackets an installation of system packages, so that the host's record knows which of them came with us. Python 3.7+."""

from __future__ import annotations

DOCUMENTATION = r"""
module: owned_packages
short_description: Note which system packages an installation brings
description:
  - C(state=before) writes down what is installed; C(state=after) takes the difference as ours, and belongs into an C(always).
  - Of an installation that was cut off in between, the next C(before) or C(closed) notes the difference as unsure, for others may have
    installed packages since; C(provision remove) decides which of it are ours.
author: [the provision authors]
options:
  record: {description: The record that notes it., type: path, required: true}
  state: {description: "Before or after the installation; C(closed): none is under way.", choices: [before, after, closed], required: true}
  asked: {description: "With C(before): the packages that the installation asks for.", type: list, elements: str, default: []}
  held: {description: Packages that the installation has put on hold., type: list, elements: str, default: []}
  taken_off: {description: Packages that were there before us and were taken off., type: list, elements: str, default: []}
  replaced: {description: "Packages that the installation brought to another version, name to the version before.", type: dict, default: {}}
"""

EXAMPLES = r"""
- name: Remember what was there
  owned_packages:
    record: /opt/provision/record.json
    state: before
    asked: [g++]
"""

RETURN = r"""
"""

from ansible.module_utils import host_record  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def installed(module):
    if module.get_bin_path("dpkg-query"):
        command = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${binary:Package}\n"]
        pairs = [line.partition(" ") for line in module.run_command(command, check_rc=True)[1].splitlines()]
        return sorted(name for state, _, name in pairs if state not in ("not-installed", "config-files"))
    _rc, out, _err = module.run_command(["rpm", "--query", "--all", "--queryformat=%{NAME}\n"], check_rc=True)
    return sorted(set(out.split()))


def bracketed(packages, state, now, asked):
    """What the record says of packages once ``state`` is reached with the packages ``now`` installed."""
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


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "state": {"choices": ["before", "after", "closed"], "required": True},
            "asked": {"type": "list", "elements": "str", "default": []},
            "held": {"type": "list", "elements": "str", "default": []},
            "taken_off": {"type": "list", "elements": "str", "default": []},
            "replaced": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    given = module.params
    record = host_record.load(given["record"])
    noted = host_record.load(given["record"])
    now = installed(module)
    record["packages"] = bracketed({**host_record.EMPTY["packages"], **record["packages"]}, given["state"], now, given["asked"])
    record["held"] = sorted((set(record["held"]) | set(given["held"])) & set(now))
    record["taken_off"] = sorted(set(record["taken_off"]) | set(given["taken_off"]))
    ours = {name.split(":")[0] for name in record["packages"]["added"]}
    for name, version in given["replaced"].items():
        if name not in ours:
            record["replaced"].setdefault(name, version)
    if record != noted and not module.check_mode:
        host_record.save(given["record"], record)
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
