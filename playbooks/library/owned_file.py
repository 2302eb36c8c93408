#!/usr/bin/python
"""Ansible module: a file, or a marked block in a shared file, that is in the host's record. Runs on the host; Python 3.7+."""

from __future__ import annotations

DOCUMENTATION = r"""
module: owned_file
short_description: Write a file or a block and record it
description:
  - The record is written first.
author: [the provision authors]
options:
  record: {description: The host's record., type: path, required: true}
  path: {description: The file., type: path, required: true}
  content: {description: "The text of the file, or of the block.", type: str, required: true}
  marker: {description: "A line with C({mark}) that stands around the block, where the file is shared.", type: str}
  mode: {description: The file's permissions., type: str, default: "0644"}
"""

EXAMPLES = r"""
- name: Configure the linker
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
    """(text before the block, the block without its markers or None, text after it)"""
    begin, end = marker.replace("{mark}", "BEGIN"), marker.replace("{mark}", "END")
    lines = text.splitlines(keepends=True)
    plain = [line.rstrip("\n") for line in lines]
    if begin not in plain or end not in plain:
        return text, None, ""
    first, last = plain.index(begin), plain.index(end)
    return "".join(lines[:first]), "".join(lines[first + 1 : last]), "".join(lines[last + 1 :])


def with_block(text, marker, block):
    """``text`` with the block in its old place, else at the end."""
    before, _found, after = block_of(text, marker)
    if before and not before.endswith("\n"):
        before += "\n"
    return before + marker.replace("{mark}", "BEGIN") + "\n" + block + marker.replace("{mark}", "END") + "\n" + after


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
            "content": {"type": "str", "required": True},
            "marker": {"type": "str"},
            "mode": {"type": "str", "default": "0644"},
        },
        supports_check_mode=True,
    )
    given = module.params
    record, noted = host_record.load(given["record"]), host_record.load(given["record"])
    path, content, marker = given["path"], given["content"], given["marker"]
    text = host_record.read(path)
    wanted = content if marker is None else with_block(text or "", marker, content)
    host_record.note(record, path, content, marker, text is not None)
    # The mode of a file that is shared stays.
    mode = int(given["mode"], 8) if text is None or marker is None else os.stat(path).st_mode & 0o7777
    changed = wanted != text or os.stat(path).st_mode & 0o7777 != mode
    if not module.check_mode:
        if record != noted:
            host_record.save(given["record"], record)
        if changed:
            host_record.write(path, wanted, mode)
    shown = {"before": text or "", "after": wanted, "before_header": path, "after_header": path}
    module.exit_json(changed=changed, diff=shown if changed else {})


if __name__ == "__main__":
    main()
