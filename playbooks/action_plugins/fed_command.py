"""Shell command with standard input, which `raw` lacks and for which `command` copies a module.

    fed_command:
      cmd: what /bin/sh runs
      stdin: what it reads

The result is that of `raw`. The input is on no command line, so it may be a secret.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible has no types
    """Runs the command over the connection as it stands; no Python is assumed on the host, and nothing is copied."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = self._task.args
        done = self._low_level_execute_command(given["cmd"], in_data=given["stdin"].encode(), executable="/bin/sh")
        result.update(done, changed=True, failed=done["rc"] != 0)
        if result["failed"]:
            result["msg"] = f"exit code {done['rc']}: {done['stderr'].strip()}"
        return result
