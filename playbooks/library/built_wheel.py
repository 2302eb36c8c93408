#!/usr/bin/python
"""Ansible module: builds a wheel from a source archive, with an environment's tools. Python 3.7+, standard library only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: built_wheel
short_description: Build a wheel from a source archive
description:
  - The tools that build it are in the environment, at the plan's versions; no index is asked.
  - Beside the wheel lies its checksum, in a file of its name with C(.sha256) behind it, for whoever fetches it.
author: [the provision authors]
options:
  venv: {description: The environment whose pip and tools build., type: path, required: true}
  archive: {description: The sources., type: path, required: true}
  archive_sha256: {description: Their checksum; it is verified before anything of them is used., type: str, required: true}
  wheel: {description: The wheel to make; its name must be the one that the build gives., type: path, required: true}
"""

EXAMPLES = r"""
- name: Build the engine
  built_wheel:
    venv: /opt/provision/venv
    archive: /opt/provision/src/collective_core.tar.gz
    archive_sha256: "..."
    wheel: /opt/provision/src/collective_core-0.1.0-py3-none-linux_x86_64.whl
"""

RETURN = r"""
sha256: {description: The wheel's checksum., returned: always, type: str}
"""

import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402

from ansible.module_utils import pip_calls  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def main():
    module = AnsibleModule(
        argument_spec={
            "venv": {"type": "path", "required": True},
            "archive": {"type": "path", "required": True},
            "archive_sha256": {"type": "str", "required": True},
            "wheel": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    wheel = module.params["wheel"]
    if module.check_mode:
        module.exit_json(changed=True, sha256="")
    os.umask(0o022)
    url = pip_calls.verified_url(module, module.params["archive"], module.params["archive_sha256"])
    scratch = tempfile.mkdtemp(prefix="provision-", dir=os.path.dirname(wheel))
    try:
        words = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", os.path.join(scratch, "out"), url]
        pip_calls.run(module, module.params["venv"], words, scratch, os.path.basename(wheel))
        made = os.listdir(os.path.join(scratch, "out"))
        if made != [os.path.basename(wheel)]:
            module.fail_json(msg=f"the build made {', '.join(made)}, not {os.path.basename(wheel)}")
        os.replace(os.path.join(scratch, "out", made[0]), wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sha256 = pip_calls.digest(wheel)
    with open(wheel + ".sha256", "w") as file:
        file.write(sha256 + "\n")
    module.exit_json(changed=True, sha256=sha256)


if __name__ == "__main__":
    main()
