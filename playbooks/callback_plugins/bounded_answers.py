"""Bounds what a host may answer to a task, on this machine: Ansible's connections keep all of it in memory. Active in each worker process.

Environment variable ``PROVISION_MAX_ANSWER``: bytes. The larger answer fails its task, and the other hosts go on.
"""

from __future__ import annotations

import os
import signal
from multiprocessing import util
from types import FrameType
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase

_MAX = int(os.environ["PROVISION_MAX_ANSWER"])
_COPIES = 3  # of an answer that a connection may hold for a moment
_CHECK_S = 0.05  # of processor time: what receives nothing is not checked


def _refuse() -> None:
    raise AnsibleError(f"the host answered with more than {_MAX >> 20} MB")


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible has no types
    """Prints nothing; the base class of callbacks is what Ansible loads before its first task."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "bounded_answers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: int | None = None  # pages in memory when the connection's work began
        util.register_after_fork(self, CallbackModule._watch)
        execute = ActionBase._low_level_execute_command

        def bounded(*args: Any, **kwargs: Any) -> Any:
            result = execute(*args, **kwargs)
            if len(result["stdout"]) + len(result["stderr"]) > _MAX:
                _refuse()
            return result

        ActionBase._low_level_execute_command = bounded

    def _watch(self) -> None:
        signal.signal(signal.SIGPROF, self._check)
        signal.setitimer(signal.ITIMER_PROF, _CHECK_S, _CHECK_S)

    def _check(self, _signal: int, frame: FrameType | None) -> None:
        """Only inside a connection: an exception while a worker hands on its result would leave half of it in the pipe."""
        is_inside = False
        while frame is not None:
            if f"{os.sep}connection{os.sep}" in frame.f_code.co_filename:
                is_inside = frame.f_code.co_name != "put_file"  # which may hold a file of ours
            frame = frame.f_back
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        if not is_inside:
            self._before = None
        elif self._before is None:
            self._before = pages
        elif (pages - self._before) * os.sysconf("SC_PAGE_SIZE") > _COPIES * _MAX:
            _refuse()
