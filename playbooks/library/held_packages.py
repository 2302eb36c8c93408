#!/usr/bin/python
"""Ansible module: system packages at exact versions, held there. For apt, and for dnf with its versionlock. Python 3.7+, no libraries.

A build that sorts above the chosen one must not replace it (`2.21.5-1+cuda13.1` and a distribution's `2.21.5-1-1` sort above
`2.21.5-1+cuda12.4`), so the exact version is installed, as a downgrade if need be, and held; a hold on another version is released first
and restored where the installation fails. Where the versions are installed and held, no package index is used.

Returns ``held``: what it holds and was not held before; ``replaced``: name to the version before; ``differ``: whether anything is needed.
"""

from __future__ import annotations

import os
import re

from ansible.module_utils.basic import AnsibleModule

LOCK_S = 300  # another user of the package manager gets this long to finish
ERROR_LINES = 8
VERSIONLOCK = "python3-dnf-plugin-versionlock"


class Apt:
    """apt-get, dpkg-query and apt-mark."""

    def __init__(self, module, source_list):
        self.module, self.source_list = module, source_list

    @staticmethod
    def split(package):
        name, _, version = package.partition("=")
        return name, version

    def call(self, *words):
        options = ["-q", "-y", "-o", f"DPkg::Lock::Timeout={LOCK_S}"]
        environment = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        return self.module.run_command(["apt-get", *options, *words], environ_update=environment)

    def installed(self, names):
        form = "${Package} ${db:Status-Want} ${db:Status-Status} ${Version}\n"
        _rc, out, _err = self.module.run_command(["dpkg-query", "--show", "--showformat=" + form, *names])
        rows = [line.split() for line in out.splitlines()]
        return {row[0]: (row[3], row[1] == "hold") for row in rows if len(row) == 4 and row[2] == "installed"}

    def known_as(self, names):
        """dpkg's names, with an architecture where it writes one: ``libnccl2:amd64``."""
        command = ["dpkg-query", "--show", "--showformat=${binary:Package}\n", *names]
        return self.module.run_command(command, check_rc=True)[1].split() if names else []

    def offered(self, name):
        _rc, out, _err = self.module.run_command(["apt-cache", "madison", name])
        return list(dict.fromkeys(line.split("|")[1].strip() for line in out.splitlines() if line.count("|") == 2))

    def refresh(self):
        only = []
        if self.source_list:  # a broken repository of others must not stop us
            only = ["-o", "Dir::Etc::sourcelist=" + self.source_list, "-o", "Dir::Etc::sourceparts=/dev/null"]
            only += ["-o", "APT::Get::List-Cleanup=0"]
        rc, out, err = self.call(*only, "-o", "APT::Update::Error-Mode=any", "update")
        if rc != 0:
            self.module.fail_json(msg="apt-get update failed:\n" + excerpt(out + err))

    def hold(self, names):
        self.module.run_command(["apt-mark", "hold", *names], check_rc=True)

    def release(self, names):
        if names:
            self.module.run_command(["apt-mark", "unhold", *names], check_rc=True)

    def install(self, packages):
        return self.call("--allow-downgrades", "--no-remove", "--no-install-recommends", "install", *packages)


class Dnf:
    """dnf and rpm."""

    def __init__(self, module, _source_list):
        self.module = module

    @staticmethod
    def split(package):
        """``libnccl-devel-2.21.5-1+cuda12.4`` → name, version-release."""
        name, version, release = package.rsplit("-", 2)
        return name, f"{version}-{release}"

    def installed(self, names):
        form = "%{NAME} %{VERSION}-%{RELEASE} %{NAME}-%{EPOCHNUM}:%{VERSION}-%{RELEASE}.*\n"
        _rc, out, _err = self.module.run_command(["rpm", "--query", "--queryformat", form, *names])
        _rc, locked, _err = self.module.run_command(["dnf", "-q", "versionlock", "list"])
        rows = [line.split() for line in out.splitlines() if "is not installed" not in line]
        return {row[0]: (row[1], row[2] in locked.split()) for row in rows if len(row) == 3}

    @staticmethod
    def known_as(names):
        return names

    def offered(self, name):
        _rc, out, _err = self.module.run_command(["dnf", "-q", "list", "--showduplicates", name])
        return list(
            dict.fromkeys(row[1].split(":")[-1] for row in map(str.split, out.splitlines()) if len(row) == 3 and row[0].startswith(name))
        )

    def refresh(self):
        self.module.run_command(["dnf", "-q", "makecache"], check_rc=True)

    def hold(self, names):
        self.module.run_command(["dnf", "-q", "-y", "install", VERSIONLOCK], check_rc=True)
        self.release(names)  # a lock on another version would stay next to the new one
        self.module.run_command(["dnf", "-q", "versionlock", "add", *names], check_rc=True)

    def release(self, names):
        if names:
            self.module.run_command(["dnf", "-q", "versionlock", "delete", *names])

    def install(self, packages):
        return self.module.run_command(["dnf", "-y", "install", *packages])  # an exact older version is a downgrade


def excerpt(text):
    """The package manager's errors, else its last lines; dnf lists conflicting packages in lines with a dash."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(E:|Err:|W: |Error|Problem|- )", line)]
    return "\n".join((errors or lines)[-ERROR_LINES:])


def would_be_removed(text):
    """The installed packages that apt would have to remove, by its output."""
    found = re.search(r"^The following packages will be REMOVED:\n((?: .*\n?)+)", text, re.MULTILINE)
    return [name.rstrip("*") for name in found.group(1).split()] if found else []


def main():
    module = AnsibleModule(
        argument_spec={
            # as the package manager writes them, `name=version` for apt, `name-version-release` for dnf
            "packages": {"type": "list", "elements": "str", "required": True},
            "manager": {"choices": ["apt", "dnf"], "required": True},
            "source_list": {"type": "path"},  # the only apt list to update; all of them without it
            "files": {"type": "list", "elements": "path", "default": []},  # the packages' files; with them no package index is used
        },
        supports_check_mode=True,
    )
    manager = {"apt": Apt, "dnf": Dnf}[module.params["manager"]](module, module.params["source_list"])
    packages = module.params["packages"]
    wanted = dict(map(manager.split, packages))
    found = manager.installed(list(wanted))
    before = {name: version for name, (version, _held) in found.items()}
    same = before == wanted
    differ = not same or not all(held for _version, held in found.values())
    result = {"held": [], "replaced": {}, "differ": differ}
    if not differ:
        module.exit_json(changed=False, **result)
    if module.check_mode:
        module.exit_json(changed=True, **result)
    if not same:
        os.umask(0o022)
        files = module.params["files"]
        if not files and any(version not in manager.offered(name) for name, version in wanted.items()):
            manager.refresh()
        for name, version in () if files else wanted.items():
            offered = manager.offered(name)
            if version not in offered:
                there = ", ".join(offered[:8]) or "none at all"
                module.fail_json(msg=f"no package index of this host offers {name} {version}; it has {there}", **result)
        held = [name for name, (_version, is_held) in found.items() if is_held]
        manager.release(held)
        rc, out, err = manager.install(files or packages)
        if rc != 0:
            if held:
                manager.hold(held)
            msg = f"could not install {', '.join(packages)}:\n" + excerpt(out + "\n" + err)
            going = would_be_removed(out)
            if going:
                msg += f"\n{', '.join(going)} would have to be removed, and provision removes no package of others. Remove it first, "
                msg += "or choose another version with --nccl."
            module.fail_json(msg=msg, rc=rc, **result)
    result["replaced"] = {name: version for name, version in before.items() if version != wanted[name]}
    manager.hold(list(wanted))
    result["held"] = manager.known_as([name for name in wanted if name not in found or not found[name][1]])
    module.exit_json(changed=True, **result)


if __name__ == "__main__":
    main()
