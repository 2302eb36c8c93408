#!/usr/bin/python
"""Ansible module: an apt repository of a vendor's, with the key that signs it. Python 3.7+, standard library only.

The key comes out of the vendor's keyring package, whose checksum is known, and counts for this repository alone (signed-by). The package
itself is not installed: a mirror of the repository has another address than the list that the package brings.
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: vendor_repository
short_description: Tell apt of a vendor's repository
description:
  - Does nothing where a list of somebody else's names the same address already; apt refuses two with different keys.
author: [the provision authors]
options:
  record: {description: The host's record; what is ours is noted there., type: path, required: true}
  name: {description: Of the list file without its ending., type: str, required: true}
  url: {description: The repository's base address., type: str, required: true}
  entry: {description: The list's line., type: str, required: true}
  keyring: {description: "Where the key goes; the entry names it as C(signed-by).", type: path, required: true}
  keyring_package: {description: The vendor's .deb that holds the key., type: path, required: true}
  keyring_package_sha256: {description: Its checksum; verified before anything of it is used., type: str, required: true}
"""

EXAMPLES = r"""
- name: Tell apt of NVIDIA's repository
  vendor_repository:
    record: /opt/provision/record.json
    name: cuda-debian12-x86_64
    url: https://packages.example.org/debian12
    entry: deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] https://packages.example.org/debian12/ /
    keyring: /usr/share/keyrings/cuda-archive-keyring.gpg
    keyring_package: /opt/provision/repositories/cuda-keyring.deb
    keyring_package_sha256: "..."
"""

RETURN = r"""
list: {description: The file in which the repository stands., returned: always, type: str}
"""

import glob  # noqa: E402
import hashlib  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402

from ansible.module_utils import host_record  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402

LISTS = "/etc/apt/sources.list.d"


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def content(path):
    with open(path, "rb") as file:
        return file.read()


def named_elsewhere(url, own):
    """Another list that names the address, or None."""
    for path in ["/etc/apt/sources.list", *sorted(glob.glob(LISTS + "/*.list") + glob.glob(LISTS + "/*.sources"))]:
        lines = [line for line in read(path).splitlines() if not line.lstrip().startswith("#")]
        if path != own and any(url.rstrip("/") in line for line in lines):
            return path
    return None


def key_of(module, package, expected, keyring):
    """The bytes of the key in the keyring package."""
    try:
        with open(package, "rb") as file:
            actual = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        module.fail_json(msg=f"cannot read {package}: {error}")
    if actual != expected:
        module.fail_json(msg=f"{package} has checksum {actual}, not {expected}; nothing of it was used")
    scratch = tempfile.mkdtemp(prefix="provision-")
    try:
        module.run_command(["dpkg-deb", "--extract", package, scratch], check_rc=True)
        return content(os.path.join(scratch, keyring.lstrip("/")))
    except FileNotFoundError:
        return module.fail_json(msg=f"{package} does not hold {keyring}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def not_ours(record, path):
    """Whether somebody else has put ``path`` there."""
    return os.path.exists(path) and path not in record["files"] and path not in record["claimed"]


def replace(path, data):
    with open(path + ".provision-new", "wb") as file:
        file.write(data)
    os.replace(path + ".provision-new", path)


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "entry": {"type": "str", "required": True},
            "keyring": {"type": "path", "required": True},
            "keyring_package": {"type": "path", "required": True},
            "keyring_package_sha256": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    own = f"{LISTS}/{given['name']}.list"
    elsewhere = named_elsewhere(given["url"], own)
    if elsewhere:
        module.exit_json(changed=False, list=elsewhere)
    text = given["entry"].rstrip("\n") + "\n"
    key = None  # in a dry run nothing was brought yet
    if not module.check_mode or os.path.exists(given["keyring_package"]):
        key = key_of(module, given["keyring_package"], given["keyring_package_sha256"], given["keyring"])
    # A keyring that is there may be an old one: NVIDIA has changed its key before.
    if read(own) == text and os.path.exists(given["keyring"]) and key in (None, content(given["keyring"])):
        module.exit_json(changed=False, list=own)
    if not module.check_mode:
        os.umask(0o022)
        record = host_record.load(given["record"])
        wanted = {given["keyring"]: key, own: text.encode()}
        theirs = [path for path in wanted if not_ours(record, path)]
        for path in theirs:
            if content(path) != wanted[path]:
                module.fail_json(msg=f"{path} is not provision's and holds something else than it should: remove it, or what brought it")
        missing = {path: data for path, data in wanted.items() if path not in theirs}
        for path, data in missing.items():
            host_record.note(record, path, data, None, exists=False)
        host_record.save(given["record"], record)
        for path, data in missing.items():
            replace(path, data)
    module.exit_json(changed=True, list=own)


if __name__ == "__main__":
    main()
