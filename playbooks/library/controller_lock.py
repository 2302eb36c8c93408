#!/usr/bin/python
"""Ansible module: the host lock, which lets one controller at a time change this host. Python 3.7+, standard library only.

The lock is a file under /run, which a reboot deletes, or in the home of a user without root. A controller names its own dead runs, whose
lock it may take over once what they have left at work has ended.
"""

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

import json  # noqa: E402
import os  # noqa: E402
import shlex  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def holder(path):
    """{"run", "owner", "since"} of the lock, or None when it is free."""
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:
        return {"run": "", "owner": "a run that left no name", "since": "an unknown time"}  # its controller died while writing it


def acquire(module, path, run):
    """Acquire the lock, also that of a dead run; fail where another run holds it."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    mine = json.dumps({"run": run, "owner": module.params["owner"], "since": now})
    for _attempt in range(2):
        found = holder(path)
        if found is not None and found["run"] == run:
            return
        if found is not None and found["run"] not in module.params["dead"]:
            module.fail_json(
                msg=f"locked: {found['owner']} has been working on this host since {found['since']} (run {found['run']}). "
                f"Wait until that run has ended; if it is gone for good, remove {path} here."
            )
        if module.check_mode:
            return
        if found is not None:
            module.run_command([sys.executable, *shlex.split(module.params["guard"])[1:], found["run"]], check_rc=True)
            os.unlink(path)
        # A link fails when another controller was faster, and the lock is never seen half written.
        draft = f"{path}.{run}"
        with open(draft, "w") as file:
            file.write(mine)
        try:
            os.link(draft, path)
            return
        except FileExistsError:
            continue
        finally:
            os.unlink(draft)
    module.fail_json(msg=f"other runs acquire {path} all the time; run the command again")


def release(module, path, run):
    found = holder(path)
    if found is not None and found["run"] == run and not module.check_mode:
        os.unlink(path)


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
    path, run = module.params["path"], module.params["run"]
    if module.params["state"] == "held":
        acquire(module, path, run)
    else:
        release(module, path, run)
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
