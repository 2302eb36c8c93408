#!/usr/bin/python
"""Ansible module: takes off what an earlier plan has told the package manager of repositories. Python 3.7+, standard library only.

What is ours and as we wrote it goes, a key only where no list names it any more. What is gone already, was changed since, or belongs to a
package by now is marked as unwanted: the survey does not miss it, and `provision remove` still names what stays.
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: unwanted_repositories
short_description: Take off lists and keys of repositories that the plan does not name
author: [the provision authors]
options:
  record: {description: The host's record; only what stands there goes., type: path, required: true}
  wanted: {description: Lists and keys that stay., type: list, elements: path, default: []}
"""

EXAMPLES = r"""
- name: Take off repositories that nothing comes from any more
  unwanted_repositories:
    record: /opt/provision/record.json
    wanted: [/etc/apt/sources.list.d/cuda-debian12-x86_64.list, /usr/share/keyrings/cuda-archive-keyring.gpg]
"""

RETURN = r"""
removed: {description: The files that went or would go., returned: always, type: list, elements: str}
"""

import glob  # noqa: E402
import os  # noqa: E402

from ansible.module_utils import host_record  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402

LISTS = ("/etc/apt/sources.list.d/", "/etc/yum.repos.d/")
KEYS = ("/usr/share/keyrings/", "/etc/pki/rpm-gpg/")


def content(path):
    """A file's bytes, or None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def named(key, gone):
    """Whether a list that stays names a key."""
    lists = [path for folder in LISTS for path in glob.glob(folder + "*")] + ["/etc/apt/sources.list"]
    return any(key.encode() in (content(path) or b"") for path in lists if path not in gone and os.path.isfile(path))


def sort_out(record, wanted, owned):
    """(files to take off, files to mark as unwanted) of what the record has of repositories.

    Args:
        owned: whether a file belongs to a package.
    """
    gone, left = [], []
    unwanted = [
        entry
        for path, entry in record["files"].items()
        if path.startswith(LISTS + KEYS) and path not in wanted and not entry.get("unwanted")
    ]
    for entry in sorted(unwanted, key=lambda one: one["path"].startswith(KEYS)):  # lists first: they name the keys
        path, data = entry["path"], content(entry["path"])
        if data is None or owned(path) or not entry["made"] or host_record.digest(data) not in entry["sha256"]:
            left.append(path)
        elif path.startswith(LISTS) or not named(path, gone):
            gone.append(path)
    return gone, left


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "wanted": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    record = host_record.load(given["record"])

    def owned(path):
        query = ["dpkg-query", "--search", path] if module.get_bin_path("dpkg-query") else ["rpm", "--query", "--file", path]
        return module.run_command(query)[0] == 0

    gone, left = sort_out(record, given["wanted"], owned)
    if not module.check_mode and gone + left:
        for path in gone:
            os.unlink(path)
            del record["files"][path]
        for path in left:
            record["files"][path]["unwanted"] = True
        host_record.save(given["record"], record)
    module.exit_json(changed=bool(gone), removed=gone)


if __name__ == "__main__":
    main()
