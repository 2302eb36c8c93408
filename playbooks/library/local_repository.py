#!/usr/bin/python
"""Ansible module: a repository that a package brings along as files (`nccl-local-repo-*.deb`). Python 3.7+, standard library only.

Such a package unpacks to /var/nccl-local-repo-…, with a list for apt and a key next to the packages; the key must be put where the list
says (signed-by), which the package leaves to people. Old ones have a list without signed-by and expect `apt-key`, which is gone: there the
list is given a keyring of its own.
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: local_repository
short_description: Install a local repository package and put its key in place
description:
  - Without C(package) it only tells whether the package is installed and complete.
author: [the provision authors]
options:
  record: {description: The host's record; what is ours is noted there. Needed with C(package)., type: path}
  file_name: {description: "The package's file name, C(NAME_VERSION_ARCH.deb).", type: str, required: true}
  package: {description: Where the file is., type: path}
  package_sha256: {description: Its checksum; verified before anything of it is used., type: str}
"""

EXAMPLES = r"""
- name: Install the local repository
  local_repository:
    record: /opt/provision/record.json
    file_name: nccl-local-repo-debian12-2.21.5-cuda12.4_1.0-1_amd64.deb
    package: /opt/provision/repositories/nccl-local-repo-debian12-2.21.5-cuda12.4_1.0-1_amd64.deb
    package_sha256: "..."
"""

RETURN = r"""
needed: {description: Whether there is something to do., returned: always, type: bool}
list: {description: The package's list for apt; empty before it is installed., returned: always, type: str}
"""

import glob  # noqa: E402
import hashlib  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402

from ansible.module_utils import host_record  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402

KEYRINGS = "/usr/share/keyrings"


def is_installed(module, name, version):
    form = "${db:Status-Status} ${Version}"
    _rc, out, _err = module.run_command(["dpkg-query", "--show", "--showformat=" + form, name])
    return out == f"installed {version}"


def contents(module, name):
    """(the list for apt, the folder of the repository) of the installed package."""
    _rc, out, _err = module.run_command(["dpkg", "--listfiles", name], check_rc=True)
    paths = out.splitlines()
    lists = [path for path in paths if re.fullmatch(r"/etc/apt/sources\.list\.d/[^/]+\.list", path)]
    folders = [path for path in paths if re.fullmatch(r"/var/[^/]*repo[^/]*", path)]
    if len(lists) != 1 or len(folders) != 1:
        module.fail_json(
            msg=f"{name} is no local repository: it holds {len(lists)} list(s) for apt and {len(folders)} folder(s) of packages"
        )
    return lists[0], folders[0]


def read(path, mode="r"):
    with open(path, mode) as file:
        return file.read()


def key_in(module, folder):
    """The repository's key: a keyring, or an armoured one."""
    found = sorted(glob.glob(folder + "/*keyring.gpg")) or sorted(glob.glob(folder + "/*.pub"))
    if not found:
        module.fail_json(msg=f"{folder} holds no key")
    return found[0]


def todo(module, name):
    """(list, {path: content} of what is missing) so that apt believes the repository."""
    path, folder = contents(module, name)
    text = read(path)
    signed_by = re.search(r"signed-by=([^\s\]]+)", text)
    missing = {}
    key = key_in(module, folder)
    if signed_by:
        keyring = signed_by.group(1)
    else:
        keyring = f"{KEYRINGS}/{name}{'.asc' if key.endswith('.pub') else '.gpg'}"
        missing[path] = re.sub(r"^deb\s+(\[[^\]]*\]\s+)?", f"deb [signed-by={keyring}] ", text, flags=re.MULTILINE).encode()
    if not os.path.exists(keyring) or read(keyring, "rb") != read(key, "rb"):
        missing[keyring] = read(key, "rb")
    return path, missing


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path"},
            "file_name": {"type": "str", "required": True},
            "package": {"type": "path"},
            "package_sha256": {"type": "str"},
        },
        required_together=[("package", "package_sha256", "record")],
        supports_check_mode=True,
    )
    given = module.params
    name, version = given["file_name"].split("_")[:2]
    there = is_installed(module, name, version)
    path, missing = todo(module, name) if there else ("", {})
    needed = not there or bool(missing)
    if given["package"] is None or module.check_mode or not needed:
        module.exit_json(changed=needed and given["package"] is not None, needed=needed, list=path)
    os.umask(0o022)
    if not there:
        actual = hashlib.sha256(read(given["package"], "rb")).hexdigest()
        if actual != given["package_sha256"]:
            module.fail_json(msg=f"{given['package']} has checksum {actual}, not {given['package_sha256']}; nothing of it was used")
        rc, out, err = module.run_command(["dpkg", "--install", given["package"]], environ_update={"DEBIAN_FRONTEND": "noninteractive"})
        if rc != 0:
            module.fail_json(msg="could not install {}: {}".format(given["package"], (err or out).strip()), rc=rc)
        path, missing = todo(module, name)
    record = host_record.load(given["record"])
    for target, content in missing.items():
        if not os.path.exists(target) or target in record["files"]:  # the list is the package's and goes with it
            host_record.note(record, target, content, None, exists=False)
    host_record.save(given["record"], record)
    for target, content in missing.items():
        with open(target + ".provision-new", "wb") as file:
            file.write(content)
        os.replace(target + ".provision-new", target)
    module.exit_json(changed=True, needed=True, list=path)


if __name__ == "__main__":
    main()
