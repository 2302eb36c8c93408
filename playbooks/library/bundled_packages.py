#!/usr/bin/python
"""Ansible module: Debian packages from files that were gathered for this host some time ago. Python 3.7+, standard library only.

The host may have been updated since. What it has in that version or a newer one stays; apt then says whether the rest fits, before
anything is changed: dpkg alone would go back to older versions, and would see what is lacking only when half of it is unpacked.
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: bundled_packages
short_description: Install packages from files, never older ones than are there
author: [the provision authors]
options:
  files: {description: The packages' files., type: list, elements: path, required: true}
"""

EXAMPLES = r"""
- name: Install from the bundle
  bundled_packages:
    files: [/opt/provision/bundle/debs/make_4.3-4.1_amd64.deb]
"""

RETURN = r"""
files: {description: The files that were installed or would be., returned: always, type: list, elements: str}
"""

import re  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402

LOCK_S = 300  # another user of the package manager gets this long to finish
SHOWN_LINES = 8
# The host's own indexes have no say: what is in the files was chosen with them.
ALONE = ["-o", "Dir::Etc::sourcelist=/dev/null", "-o", "Dir::Etc::sourceparts=/dev/null", "-o", f"DPkg::Lock::Timeout={LOCK_S}"]
INSTALL = ["apt-get", "-q", "-y", *ALONE, "--no-remove", "--no-install-recommends", "install"]


def needed(module, files):
    """Those of ``files`` that hold what is not installed, or only in an older version."""
    form = "${db:Status-Status} ${Package}:${Architecture} ${Version}\n"
    rows = [line.split() for line in module.run_command(["dpkg-query", "--show", "--showformat=" + form], check_rc=True)[1].splitlines()]
    there = {row[1]: row[2] for row in rows if row[0] == "installed"}
    found = []
    for file in files:
        form = "--showformat=${Package}:${Architecture} ${Version}"
        name, version = module.run_command(["dpkg-deb", "--show", form, file], check_rc=True)[1].split()
        if name not in there or module.run_command(["dpkg", "--compare-versions", version, "gt", there[name]])[0] == 0:
            found.append(file)
    return found


def main():
    module = AnsibleModule(argument_spec={"files": {"type": "list", "elements": "path", "required": True}}, supports_check_mode=True)
    files = needed(module, module.params["files"])
    if files and not module.check_mode:
        rc, out, err = module.run_command([*INSTALL, *files], environ_update={"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"})
        if rc != 0:
            said = [line for line in (out + "\n" + err).splitlines() if re.match(r"E:|dpkg: error| \S+ : ", line)] or out.splitlines()
            why = "\n".join(said[-SHOWN_LINES:])
            module.fail_json(msg=f"the bundle's packages do not fit what is installed here by now; make it again:\n{why}", rc=rc)
    module.exit_json(changed=bool(files), files=files)


if __name__ == "__main__":
    main()
