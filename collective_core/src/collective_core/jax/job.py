"""Functions of the engine that must not overtake what compiled functions still do."""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import Any

import jax

from collective_core import job
from collective_core.common import framework_threads
from collective_core.jax import host_calls
from collective_core.runtime import process_sets
from collective_core.runtime.process_sets import ProcessSet

_registered = False


def init(comm: Any | None = None, process_sets: Any | None = None) -> None:
    """As :func:`collective_core.init`. At the end of the process, compiled functions that were called are waited for first."""
    global _registered
    job.init(comm, process_sets)
    framework_threads.watch_signals()
    if not _registered:
        _registered = True
        atexit.register(_finish)  # after the engine has registered its own end, and so before it


def shutdown() -> None:
    """As :func:`collective_core.shutdown`, when compiled functions that were called are done."""
    _finish()
    job.shutdown()


def add_process_set(process_set: Any) -> ProcessSet:
    """As :func:`collective_core.add_process_set`."""
    host_calls.wait()
    return process_sets.add_process_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """As :func:`collective_core.remove_process_set`."""
    host_calls.wait()
    return process_sets.remove_process_set(process_set)


def _finish() -> None:
    with suppress(jax.errors.JaxRuntimeError):  # which the program has had, or has not asked for
        host_calls.wait()
