#!/usr/bin/python
"""Ansible module: the folder for everything that is installed is ours, or there is no installation. Python 3.7+, standard library only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: owned_prefix
short_description: Refuse a folder of somebody else's, and note what will be ours in it
description:
  - What is noted may be replaced and removed as a whole, so nothing is noted that somebody else has made.
author: [the provision authors]
options:
  prefix: {description: The folder; our record is in it., type: path, required: true}
  contents: {description: Names of what will be made in it., type: list, elements: str, required: true}
"""

EXAMPLES = r"""
- name: Take the folder
  owned_prefix:
    prefix: /opt/provision
    contents: [venv, src]
"""

RETURN = r"""
"""

import json  # noqa: E402
import os  # noqa: E402

from ansible.module_utils import host_record  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402

WAY_OUT = "Give this host another folder with provision_prefix, or move away what is there."


def holds(path, keys):
    """Whether ``path`` is a JSON document with these keys."""
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and keys <= set(found)


def foreign(names):
    """Of ``names`` in a folder, those that neither a run of ours that died at once nor a new file system leaves there."""
    return [name for name in names if not name.startswith(".provision-") and name != "lost+found"]


def refusal(prefix, contents):
    """Why the folder cannot be taken, or None."""
    try:
        there = sorted(os.listdir(prefix))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return f"{prefix} is not a folder. {WAY_OUT}"
    path, known = os.path.join(prefix, "record.json"), []
    if "record.json" in there:
        if not holds(path, {"schema", "files", "claimed", "packages"}):
            return f"{path} is no record of provision's, or it is damaged. {WAY_OUT}"
        known = host_record.load(path)["contents"]
    if not known and holds(os.path.join(prefix, "manifest.json"), {"schema", "cluster", "host"}):
        return None  # from a version of ours that did not note yet what is in the prefix
    theirs = [name for name in there if name in contents and name not in known] if "record.json" in there else foreign(there)
    return f"{prefix} holds {', '.join(theirs[:5])}, which provision did not make. {WAY_OUT}" if theirs else None


def main():
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path", "required": True},
            "contents": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    prefix, contents = module.params["prefix"], module.params["contents"]
    path = os.path.join(prefix, "record.json")
    why = refusal(prefix, contents)
    if why:
        module.fail_json(msg=why)
    record, noted = host_record.load(path), host_record.load(path)
    host_record.claim(record, prefix)
    record["contents"] = sorted(set(record["contents"]) | set(contents))
    if record != noted and not module.check_mode:
        host_record.save(path, record)
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
