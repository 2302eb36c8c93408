#!/usr/bin/python
"""Ansible module: the repository of NVIDIA's packages, with its key, in the host's record. Python 3.7+.

Ansible's own modules can neither read a key inside a package nor remove a list only where it is unchanged. The key is valid for its
repository alone (signed-by) and is read from

- the vendor's keyring package (``vendor``), which is not installed: the list in it has another address than a mirror;
- a package that is a repository (``local``, `nccl-local-repo-*.deb`). It unpacks to /var/nccl-local-repo-…, with a list and a key; the key
  must be copied to where the list expects it. Old packages have a list without signed-by, for `apt-key`, which no longer exists: the list
  is changed to name a keyring of ours. Without ``package`` the module only returns whether one is ``needed``.

``vendor`` does nothing where a list that is not ours names the same address: apt refuses two with different keys.

``absent`` removes files that are ours and unchanged, a key only where no list names it any more. Files that are missing, were changed or
belong to a package by now are marked as unwanted: the survey does not report them, and `provision remove` still names what stays.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile

from ansible.module_utils import host_record
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.checksums import verify

LISTS = ("/etc/apt/sources.list.d/", "/etc/yum.repos.d/")
KEYS = ("/usr/share/keyrings/", "/etc/pki/rpm-gpg/")


def content(path):
    """A file's bytes, or None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def lists():
    """Every file that may name a repository."""
    return ["/etc/apt/sources.list", *sorted(path for folder in LISTS for path in glob.glob(folder + "*") if os.path.isfile(path))]


def record_and_write(path, record, files, ours):
    """Record those of the files ``{path: bytes}`` that are ours, then write all of them."""
    for target in ours:
        host_record.note(record, target, files[target], None, exists=False)
    host_record.save(path, record)
    for target, data in files.items():
        with open(target + ".provision-new", "wb") as file:
            file.write(data)
        os.replace(target + ".provision-new", target)


# --- a vendor's -----------------------------------------------------------------------------------------------------------------------


def names(path, url):
    """Whether the list ``path`` names the address."""
    lines = (content(path) or b"").decode(errors="replace").splitlines()
    return any(url.rstrip("/") in line for line in lines if not line.lstrip().startswith("#"))


def key_of(module, package, keyring):
    """The bytes of the key in the keyring package."""
    scratch = tempfile.mkdtemp(prefix="provision-")
    try:
        module.run_command(["dpkg-deb", "--extract", package, scratch], check_rc=True)
        return content(os.path.join(scratch, keyring.lstrip("/"))) or module.fail_json(msg=f"{package} does not hold {keyring}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def not_ours(record, path):
    """Whether ``path`` exists and is not provision's."""
    return os.path.exists(path) and path not in record["files"] and path not in record["claimed"]


def vendor(module, record, given):
    own = f"{LISTS[0]}{given['name']}.list"
    other = next((path for path in lists() if path != own and names(path, given["url"])), None)
    if other:
        return {"changed": False, "list": other}
    wanted = {own: (given["entry"].rstrip("\n") + "\n").encode()}
    if not module.check_mode or os.path.exists(given["package"]):  # in a dry run nothing was copied yet
        verify(module, given["package"], given["package_sha256"])
        wanted[given["keyring"]] = key_of(module, given["package"], given["keyring"])
    # A keyring that is there may be an old one: NVIDIA has changed its key before.
    if os.path.exists(given["keyring"]) and all(content(path) == data for path, data in wanted.items()):
        return {"changed": False, "list": own}
    if not module.check_mode:
        theirs = [path for path in wanted if not_ours(record, path)]
        for path in theirs:
            if content(path) != wanted[path]:
                module.fail_json(msg=f"{path} is not provision's and has another content: remove it, or the package that it belongs to")
        missing = {path: data for path, data in wanted.items() if path not in theirs}
        record_and_write(given["record"], record, missing, missing if given["recorded"] else {})
    return {"changed": True, "list": own}


# --- a local repository package ----------------------------------------------------------------------------------------------------------


def missing_in(module, name):
    """(list, {path: bytes} of missing files) so that apt trusts the repository of the installed package."""
    paths = module.run_command(["dpkg", "--listfiles", name], check_rc=True)[1].splitlines()
    found = [path for path in paths if re.fullmatch(r"/etc/apt/sources\.list\.d/[^/]+\.list", path)]
    folders = [path for path in paths if re.fullmatch(r"/var/[^/]*repo[^/]*", path)]
    if len(found) != 1 or len(folders) != 1:
        module.fail_json(
            msg=f"invalid local repository {name}: it holds {len(found)} list(s) for apt and {len(folders)} folder(s) of packages"
        )
    keys = sorted(glob.glob(folders[0] + "/*keyring.gpg")) or sorted(glob.glob(folders[0] + "/*.pub"))
    if not keys:
        module.fail_json(msg=f"{folders[0]} holds no key")
    text, missing = content(found[0]).decode(), {}
    signed_by = re.search(r"signed-by=([^\s\]]+)", text)
    if signed_by:
        keyring = signed_by.group(1)
    else:
        keyring = f"{KEYS[0]}{name}{'.asc' if keys[0].endswith('.pub') else '.gpg'}"
        missing[found[0]] = re.sub(r"^deb\s+(\[[^\]]*\]\s+)?", f"deb [signed-by={keyring}] ", text, flags=re.MULTILINE).encode()
    if content(keyring) != content(keys[0]):
        missing[keyring] = content(keys[0])
    return found[0], missing


def local(module, record, given):
    name, version = given["file_name"].split("_")[:2]
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", name]
    there = module.run_command(query)[1] == f"installed {version}"
    path, missing = missing_in(module, name) if there else ("", {})
    needed = not there or bool(missing)
    if given["package"] is None or module.check_mode or not needed:
        return {"changed": needed and given["package"] is not None, "needed": needed, "list": path}
    if not there:
        verify(module, given["package"], given["package_sha256"])
        rc, out, err = module.run_command(["dpkg", "--install", given["package"]], environ_update={"DEBIAN_FRONTEND": "noninteractive"})
        if rc != 0:
            module.fail_json(msg="could not install {}: {}".format(given["package"], (err or out).strip()), rc=rc)
        path, missing = missing_in(module, name)
    # A list that is there is the package's, and goes with it.
    record_and_write(given["record"], record, missing, [target for target in missing if not not_ours(record, target)])
    os.unlink(given["package"])  # it may be hundreds of megabytes, and its content is unpacked next to it now
    return {"changed": True, "needed": True, "list": path}


# --- absent ------------------------------------------------------------------------------------------------------------------------------


def sort_out(record, keep, owned):
    """(files to remove, files to mark as unwanted) of what the record has of repositories.

    Args:
        owned: whether a file belongs to a package.
    """
    gone, left = [], []
    unwanted = [
        entry for path, entry in record["files"].items() if path.startswith(LISTS + KEYS) and path not in keep and not entry.get("unwanted")
    ]
    for entry in sorted(unwanted, key=lambda one: one["path"].startswith(KEYS)):  # lists first: they name the keys
        path, data = entry["path"], content(entry["path"])
        if data is None or owned(path) or not entry["made"] or host_record.digest(data) not in entry["sha256"]:
            left.append(path)
        elif path.startswith(LISTS) or not any(path.encode() in (content(one) or b"") for one in lists() if one not in gone):
            gone.append(path)
    return gone, left


def absent(module, record, given):
    def owned(path):
        query = ["dpkg-query", "--search", path] if module.get_bin_path("dpkg-query") else ["rpm", "--query", "--file", path]
        return module.run_command(query)[0] == 0

    gone, left = sort_out(record, given["keep"], owned)
    if not module.check_mode and gone + left:
        for path in gone:
            os.unlink(path)
            del record["files"][path]
        for path in left:
            record["files"][path]["unwanted"] = True
        host_record.save(given["record"], record)
    return {"changed": bool(gone), "removed": gone}


def main():
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "state": {"choices": ["vendor", "local", "absent"], "required": True},
            # `vendor`: whether it is ours to remove; not where what is installed from it stays
            "recorded": {"type": "bool", "default": True},
            "package": {"type": "path"},  # the .deb that holds the key; one of a local repository is removed once it is installed
            "package_sha256": {"type": "str"},  # its checksum; verified before anything of it is used
            "file_name": {"type": "str"},  # `local`: the package's file name, `NAME_VERSION_ARCH.deb`
            "name": {"type": "str"},  # `vendor`: of the list file without its ending
            "url": {"type": "str"},  # `vendor`: the repository's base address
            "entry": {"type": "str"},  # `vendor`: the list's line
            "keyring": {"type": "path"},  # `vendor`: where the key goes; the entry names it as `signed-by`
            "keep": {"type": "list", "elements": "path", "default": []},  # `absent`: lists and keys that stay
        },
        required_if=[("state", "vendor", ["name", "url", "entry", "keyring", "package"]), ("state", "local", ["file_name"])],
        required_together=[("package", "package_sha256")],
        supports_check_mode=True,
    )
    os.umask(0o022)
    act = {"vendor": vendor, "local": local, "absent": absent}[module.params["state"]]
    module.exit_json(**act(module, host_record.load(module.params["record"]), module.params))


if __name__ == "__main__":
    main()
