#!/usr/bin/python
"""Ansible module: a folder with exactly the content of one archive. Runs on the host; Python 3.7+, standard library only.

The folder notes its archive and its files, so that a missing file or another archive is found without the archive.
Without ``archive`` the module only returns why the folder must be unpacked (again), as ``needed``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.checksums import verify

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
            "folder": {"type": "path", "required": True},  # the folder; it is replaced as a whole
            "key": {"type": "str", "required": True},  # names the content; another one is unpacked again
            "archive": {"type": "path"},  # the tar archive; it is removed once it is unpacked
            "archive_sha256": {"type": "str"},  # its checksum; verified before anything of it is used
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
