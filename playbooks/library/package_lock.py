#!/usr/bin/python
"""Ansible module: who holds the package manager's lock right now. Read-only; Python 3.7+, standard library only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: package_lock
short_description: Tell who holds the lock of apt, dpkg, dnf or rpm
description:
  - Reads the kernel's list of locks, so that a task can wait and say for whom.
author: [the provision authors]
options: {}
"""

EXAMPLES = r"""
- name: Wait for other users of the package manager
  package_lock:
  register: lock
  until: lock.holder == ""
"""

RETURN = r"""
holder:
  description: Process name and pid, or an empty string.
  returned: always
  type: str
"""

import os  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402

LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
    "/var/lib/rpm/.rpm.lock",
)


def inode(path):
    """``major:minor:inode`` as /proc/locks writes it, or None."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"


def name(pid):
    try:
        with open(f"/proc/{pid}/comm") as comm:
            return comm.read().strip()
    except OSError:
        return "a process"


def holder():
    wanted = {inode(path) for path in LOCKS} - {None}
    inodes = {entry.rsplit(":", 1)[1] for entry in wanted}
    with open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            # An overlay file system reports another device number than the lock carries: the inode decides then.
            if len(fields) > 5 and "->" not in fields and (fields[5] in wanted or fields[5].rsplit(":", 1)[1] in inodes):
                return f"{name(fields[4])} (pid {fields[4]})"
    return ""


def main():
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, holder=holder())


if __name__ == "__main__":
    main()
