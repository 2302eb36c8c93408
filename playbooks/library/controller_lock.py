#!/usr/bin/python
"""Ansible module: the host lock, which lets one controller at a time change this host. Python 3.7+, standard library only."""

from __future__ import annotations

from ansible.module_utils import host_lock
from ansible.module_utils.basic import AnsibleModule


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["held", "released"], "required": True},
            "run": {"type": "str", "required": True},
            "owner": {"type": "str", "default": "another user"},  # who runs it and where
            "dead": {"type": "list", "elements": "str", "default": []},  # ids of runs that have ended
            "guard": {"type": "str", "default": ""},  # the command of `guard.py`, which ends here what a run has left at work
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
