"""The host lock, which lets one controller at a time change this host. Python 3.6+, standard library only.

The lock is a file under /run, which a reboot deletes, or in the home of a user without root. A controller names its own dead runs, whose
lock it may take over once what they have left at work has ended. It travels with guard.py, remove.py and the Ansible module.
"""

import json
import os
import shlex
import subprocess
import sys
import time


def holder(path):
    """{"run", "owner", "since"} of the lock, or None when it is free."""
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:
        return {"run": "", "owner": "a run that left no name", "since": "an unknown time"}  # its controller died while writing it


def acquire(path, run, owner, dead, guard, dry_run=False):
    """Acquire the lock, also that of a ``dead`` run, once ``guard``, the command of guard.py, has ended what it has left at work. Raises
    RuntimeError where another run holds it."""
    mine = json.dumps({"run": run, "owner": owner, "since": time.strftime("%Y-%m-%d %H:%M:%S %Z")})
    for _attempt in range(2):
        found = holder(path)
        if found is not None and found["run"] == run:
            return
        if found is not None and found["run"] not in dead:
            raise RuntimeError(
                "locked: %s has been working on this host since %s (run %s). Wait until that run has ended; if it is gone for good, remove "
                "%s here." % (found["owner"], found["since"], found["run"], path)
            )
        if dry_run:
            return
        if found is not None:
            subprocess.check_output([sys.executable] + shlex.split(guard)[1:] + [found["run"]], stdin=subprocess.DEVNULL)
            os.unlink(path)
        # A link fails when another controller was faster, and the lock is never seen half written.
        draft = "%s.%s" % (path, run)
        with open(draft, "w") as file:
            file.write(mine)
        try:
            os.link(draft, path)
            return
        except FileExistsError:
            continue
        finally:
            os.unlink(draft)
    raise RuntimeError("other runs acquire %s all the time; run the command again" % path)


def release(path, run):
    """Release the lock, where that run holds it."""
    found = holder(path)
    if found is not None and found["run"] == run:
        os.unlink(path)
