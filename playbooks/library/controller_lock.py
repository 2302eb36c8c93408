#!/usr/bin/python
"""Ansible module: the host lock, which lets one controller at a time change this host. Python 3.7+, standard library only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: controller_lock
short_description: Let one run at a time change this host
description:
  - Acquires or releases the host lock. Never reports a change, because the lock is not part of the host's state.
author: [the provision authors]
options:
  state: {description: Acquire or release it., choices: [held, released], required: true}
  run: {description: The run's id., type: str, required: true}
  owner: {description: Who runs it and where, for the message to others., type: str, default: another user}
  dead: {description: Ids of runs that have ended., type: list, elements: str, default: []}
  guard: {description: "The command of C(guard.py), which ends here what a run has left at work.", type: str, default: ""}
  path: {description: The lock file., type: path, default: /run/provision.lock}
"""

EXAMPLES = r"""
- name: Acquire the host lock
  controller_lock:
    state: held
    run: 20260101-120000-abcdef
    owner: ann on laptop
"""

RETURN = r"""
"""

from ansible.module_utils import host_lock  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["held", "released"], "required": True},
            "run": {"type": "str", "required": True},
            "owner": {"type": "str", "default": "another user"},
            "dead": {"type": "list", "elements": "str", "default": []},
            "guard": {"type": "str", "default": ""},
            "path": {"type": "path", "default": "/run/provision.lock"},
        },
        supports_check_mode=True,
    )
    state, path, run, owner, dead, guard = map(module.params.get, ("state", "path", "run", "owner", "dead", "guard"))
    try:
        if state == "held":
            host_lock.acquire(path, run, owner, dead, guard, dry_run=module.check_mode)
        elif not module.check_mode:
            host_lock.release(path, run)
    except (OSError, RuntimeError, host_lock.subprocess.CalledProcessError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
