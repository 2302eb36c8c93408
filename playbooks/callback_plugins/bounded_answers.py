"""Bounds the memory that a host's answer may take here: Ansible's connections keep all of it. The task fails, and other hosts go on."""

from __future__ import annotations

import os
import signal
from multiprocessing import util
from types import FrameType
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.callback import CallbackBase

_MAX_MB, _CHECK_S = 32, 0.05  # of processor time: a process that receives nothing is not checked


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible has no types
    """Prints nothing: callbacks are what Ansible loads before its first task. Active in each worker process, inside connections alone:
    an exception while a worker hands on its result would leave half of it in the pipe."""

    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "aggregate", "bounded_answers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit: float | None = None
        util.register_after_fork(self, CallbackModule._watch)

    def _watch(self) -> None:
        signal.signal(signal.SIGPROF, self._check)
        signal.setitimer(signal.ITIMER_PROF, _CHECK_S, _CHECK_S)

    def _check(self, _signal: int, frame: FrameType | None) -> None:
        running = []
        while frame is not None:
            running += [frame.f_code.co_name] * ("/connection/" in frame.f_code.co_filename)
            frame = frame.f_back
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        if not running or "put_file" in running:  # which may hold a file of ours
            self._limit = None
        elif self._limit is None:
            self._limit = now + _MAX_MB
        elif now > self._limit:
            raise AnsibleError(f"the host's answer takes more than {_MAX_MB} MB")
