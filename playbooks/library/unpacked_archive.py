#!/usr/bin/python
"""Ansible module: a folder with exactly the content of one archive. Runs on the host; Python 3.7+, standard library only.

The folder notes its archive and its files, so that a missing file or another archive is found without the archive.
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: unpacked_archive
short_description: Unpack an archive where its folder is not complete
description:
  - Without C(archive) it only returns whether the folder must be unpacked (again).
author: [the provision authors]
options:
  folder: {description: The folder; it is replaced as a whole., type: path, required: true}
  key: {description: Names the content; another one is unpacked again., type: str, required: true}
  archive: {description: The tar archive; it is removed once it is unpacked., type: path}
  archive_sha256: {description: Its checksum; verified before anything of it is used., type: str}
"""

EXAMPLES = r"""
- name: Unpack Open MPI
  unpacked_archive:
    folder: /opt/provision/openmpi
    key: openmpi-4.1.8-debian12-x86_64-0123456789ab
    archive: /opt/provision/src/openmpi.tar.gz
    archive_sha256: "..."
"""

RETURN = r"""
needed:
  description: Why the folder had to be unpacked or must be, or an empty string.
  returned: always
  type: str
"""

import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tarfile  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.checksums import verify  # noqa: E402

NOTE = ".provision-archive.json"  # {"key": …, "files": [relative paths]}


def needed(folder, key):
    """Why the folder is not complete, or an empty string."""
    try:
        with open(os.path.join(folder, NOTE)) as file:
            note = json.load(file)
    except (OSError, ValueError):
        return "it is not there"
    if note["key"] != key:
        return "it holds {}".format(note["key"])
    missing = next((name for name in note["files"] if not os.path.lexists(os.path.join(folder, name))), None)
    return f"it lacks {missing}" if missing else ""


def unpack(archive, folder, key):
    """Unpack next to the old folder and then rename, so that an interrupted run leaves a complete folder or none."""
    new, old = folder + ".provision-new", folder + ".provision-old"
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with tarfile.open(archive) as tar:
        if sys.version_info >= (3, 12):
            tar.extractall(new, filter="tar")
        else:
            tar.extractall(new)  # noqa: S202  its checksum was verified
        files = sorted(member.name for member in tar.getmembers() if not member.isdir())
    with open(os.path.join(new, NOTE), "w") as file:
        json.dump({"key": key, "files": files}, file)
    if os.path.lexists(folder):
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def main():
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "key": {"type": "str", "required": True},
            "archive": {"type": "path"},
            "archive_sha256": {"type": "str"},
        },
        required_together=[("archive", "archive_sha256")],
        supports_check_mode=True,
    )
    folder, key, archive = module.params["folder"], module.params["key"], module.params["archive"]
    os.umask(0o022)
    why = needed(folder, key)
    if archive is None:
        module.exit_json(changed=False, needed=why)
    if why and not module.check_mode:
        verify(module, archive, module.params["archive_sha256"])
        unpack(archive, folder, key)
        os.unlink(archive)
    module.exit_json(changed=bool(why), needed=why)


if __name__ == "__main__":
    main()
