"""Reports the events of an Ansible that runs on the host itself (hostside/on_host.py), one a line, in the form of ansible-runner."""

from __future__ import annotations

import hashlib
import json
import os
import time
from functools import partialmethod
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase

_LONGEST, _MAX_RESULT = 20_000, 500_000  # letters of a text that a task has printed, and of all that it says
_LEFT_OUT = ("stdout_lines", "stderr_lines", "ansible_facts")


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible has no types
    """Active where it is Ansible's way to print."""

    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "stdout", "on_host"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began = 0.0
        with open(os.environ["PROVISION_FOLDER"] + "/supplies.json", encoding="utf-8") as file:
            supplies = json.load(file)
        needle, search = ActionBase._find_needle, DataLoader.path_dwim_relative_stack

        def find_needle(action: Any, folder: str, name: str) -> str:
            there = str(action._task.args.get("dest", ""))
            return fetched(name, *supplies[name], there) if name in supplies else needle(action, folder, name)

        def find_file(loader: Any, paths: Any, folder: str, name: str, **more: Any) -> Any:
            return fetched(name, *supplies[name]) if name in supplies else search(loader, paths, folder, name, **more)

        # What a task reads on the controller comes when it is needed.
        ActionBase._find_needle, DataLoader.path_dwim_relative_stack = find_needle, find_file

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._began = time.monotonic()
        self._say("runner_on_start", host, task)

    def _end(self, event: str, result: Any, ignore_errors: bool = False) -> None:
        found = cut(json.loads(self._dump_results(result._result)))
        if len(json.dumps(found)) > _MAX_RESULT:
            found = {key: found[key] for key in ("changed", "failed", "msg", "rc") if key in found}
        took = {"duration": time.monotonic() - self._began, "ignore_errors": bool(ignore_errors)}
        self._say(event, result._host, result._task, res=found, **took)

    v2_runner_on_ok = partialmethod(_end, "runner_on_ok")
    v2_runner_on_skipped = partialmethod(_end, "runner_on_skipped")
    v2_runner_on_failed = partialmethod(_end, "runner_on_failed")
    v2_runner_on_unreachable = partialmethod(_end, "runner_on_unreachable")
    v2_runner_retry = partialmethod(_end, "runner_retry")

    def _say(self, event: str, host: Any, task: Any, **more: Any) -> None:
        role = task._role.get_name() if task._role else ""
        data = {"host": host.get_name(), "task": task.get_name(), "role": role, "task_path": task.get_path(), "task_action": task.action}
        os.write(int(os.environ["PROVISION_EVENTS"]), json.dumps({"event": event, "event_data": {**data, **more}}).encode() + b"\n")


def cut(result: Any) -> Any:
    """A result with the ends of its texts, and of those in it."""
    if not isinstance(result, dict):
        return result
    short = {key: value[-_LONGEST:] if isinstance(value, str) else value for key, value in result.items() if key not in _LEFT_OUT}
    return {**short, "results": [cut(each) for each in short["results"]]} if isinstance(short.get("results"), list) else short


def fetched(name: str, number: int, sha256: str, there: str = "") -> str:
    """A file of the controller's, here: what would be replaced by it, where that has the same bytes."""
    place = os.path.join(os.environ["PROVISION_FOLDER"], str(number), os.path.basename(name))
    try:
        with open(os.path.join(there, os.path.basename(name)) if there.endswith("/") else there, "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() == sha256:
                return file.name
    except OSError:
        pass  # it is not there, or not for us to read
    if not os.path.exists(place):
        os.write(int(os.environ["PROVISION_WANTS"]), b"%d\n" % number)
    while not os.path.exists(place):
        os.stat(os.environ["PROVISION_FOLDER"])  # it is gone with the connection
        time.sleep(0.1)
    return place
