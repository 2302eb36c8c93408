#!/usr/bin/python
"""Ansible module: files, or marked blocks in shared files, that are in the host's record. Runs on the host; Python 3.7+.

The record is written first.
"""

from __future__ import annotations

import json
import os
import shutil

from ansible.module_utils import host_record
from ansible.module_utils.basic import AnsibleModule


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


def planned(path, content, marker, mode):
    """(the file's text or None, its text as it must be, its mode as it must be)."""
    text = host_record.read(path)
    if marker is None:
        return text, content, int(mode, 8)
    # The mode of a file that is shared stays.
    return text, with_block(text or "", marker, content), int(mode, 8) if text is None else mode_of(path)


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def mode_of(path):
    return os.stat(path).st_mode & 0o7777


def main():
    file = {
        "path": {"type": "path", "required": True},
        "content": {"type": "raw", "required": True},  # the text of the file, or of the block; a document, which is written as JSON
        "marker": {"type": "str"},  # a line with `{mark}` that stands around the block, where the file is shared
        "mode": {"type": "str", "default": "0644"},
    }
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path"},  # the host's record; none for files in a folder that is removed as a whole
            "files": {"type": "list", "elements": "dict", "options": file, "default": []},
            "absent": {"type": "list", "elements": "path", "default": []},  # files and folders to remove, in such a folder
        },
        supports_check_mode=True,
    )
    place, files = module.params["record"], module.params["files"]
    gone = [path for path in module.params["absent"] if os.path.lexists(path)]
    for path in gone if not module.check_mode else []:
        remove(path)
    for each in files:
        if not isinstance(each["content"], str):
            each["content"] = json.dumps(each["content"], indent=4, sort_keys=True) + "\n"
    plans = [(each, *planned(**each)) for each in files]
    if place and not module.check_mode:
        record, noted = host_record.load(place), host_record.load(place)
        for each, text, _wanted, _mode in plans:
            host_record.note(record, each["path"], each["content"], each["marker"], text is not None)
        if record != noted:
            host_record.save(place, record)
    diffs = []
    for each, text, wanted, mode in plans:
        path = each["path"]
        if wanted == text and mode_of(path) == mode:
            continue
        diffs.append({"before": text or "", "after": wanted, "before_header": path, "after_header": path})
        if not module.check_mode:
            host_record.write(path, wanted, mode)
    module.exit_json(changed=bool(gone or diffs), diff=diffs)


if __name__ == "__main__":
    main()
