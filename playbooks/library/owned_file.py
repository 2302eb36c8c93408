#!/usr/bin/python
"""Ansible module: a file, or a marked block in somebody else's file, that `provision remove` removes again. Python 3.7+."""

from __future__ import annotations

DOCUMENTATION = r"""
module: owned_file
short_description: Write a file or a block and note it in the host's record
description:
  - Notes first, writes then.
  - C(state=absent) removes a whole file that the record has, as it was written; one that somebody changed since stays, and is not missed.
author: [the provision authors]
options:
  record: {description: The record that notes it., type: path, required: true}
  path: {description: The file., type: path, required: true}
  content: {description: Its text, or the block's., type: str}
  marker: {description: "A line with C({mark}) that stands around the block, where the file is shared.", type: str}
  mode: {description: The file's permissions., type: str, default: "0644"}
  state: {description: There or not., choices: [present, absent], default: present}
"""

EXAMPLES = r"""
- name: Name our library folders to the linker
  owned_file:
    record: /opt/provision/record.json
    path: /etc/ld.so.conf.d/00-provision.conf
    content: "/opt/provision/venv/lib\n"
"""

RETURN = r"""
"""

import os  # noqa: E402

from ansible.module_utils import host_record  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def block_of(text, marker):
    """(what stands before the block, the block without its markers or None, what follows)"""
    begin, end = marker.replace("{mark}", "BEGIN"), marker.replace("{mark}", "END")
    lines = text.splitlines(keepends=True)
    plain = [line.rstrip("\n") for line in lines]
    if begin not in plain or end not in plain:
        return text, None, ""
    first, last = plain.index(begin), plain.index(end)
    return "".join(lines[:first]), "".join(lines[first + 1 : last]), "".join(lines[last + 1 :])


def with_block(text, marker, block):
    """``text`` with the block put where it was, else at the end."""
    before, _found, after = block_of(text, marker)
    if before and not before.endswith("\n"):
        before += "\n"
    return before + marker.replace("{mark}", "BEGIN") + "\n" + block + marker.replace("{mark}", "END") + "\n" + after


def remove(path, record):
    """Do without a file: (whether it is to go, the record as it is then)."""
    entry, text = record["files"].get(path), host_record.read(path)
    if entry is None:
        return False, record
    if text is not None and entry["made"] and host_record.digest(text) in entry["sha256"]:
        return True, {**record, "files": {name: each for name, each in record["files"].items() if name != path}}
    return False, {**record, "files": {**record["files"], path: {**entry, "unwanted": True}}}


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
            "content": {"type": "str"},
            "marker": {"type": "str"},
            "mode": {"type": "str", "default": "0644"},
            "state": {"choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    given = module.params
    record = host_record.load(given["record"])
    noted = host_record.load(given["record"])
    text, wanted, going = None, None, False
    if given["state"] == "absent":
        going, record = remove(given["path"], record)
    else:
        text = host_record.read(given["path"])
        content = given["content"] or ""
        wanted = content if given["marker"] is None else with_block(text or "", given["marker"], content)
        host_record.note(record, given["path"], content, given["marker"], text is not None)
    mode = int(given["mode"], 8)
    other_mode = text is not None and given["marker"] is None and os.stat(given["path"]).st_mode & 0o7777 != mode
    changed = going or wanted != text or other_mode
    if not module.check_mode:
        if going:
            os.unlink(given["path"])
        if record != noted:
            host_record.save(given["record"], record)
        if changed and not going:
            host_record.write(
                given["path"], wanted, mode if text is None or given["marker"] is None else os.stat(given["path"]).st_mode & 0o7777
            )
    shown = {"before": text or "", "after": wanted or "", "before_header": given["path"], "after_header": given["path"]}
    module.exit_json(changed=changed, diff=shown if changed else {})


if __name__ == "__main__":
    main()
