"""A rank that runs a function: started by processes.py with the numbers of two inherited pipes, IN and OUT.

Settings (JSON: ``environment``, ``path``, ``argv``) and the call come in; what the call returned or raised goes out (frames.py). When
IN ends, whoever started this process is gone, and so is it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

from collective_core.errors import CollectiveError
from collective_core.launch import frames, function
from collective_core.launch.frames import Frame


def _end_with(starter: int) -> None:
    """Waits for the end of the starter, which sends nothing more; then ends this process and its children."""
    os.read(starter, 1)
    os.killpg(0, signal.SIGKILL)


def _kind(error: BaseException | None) -> str:
    """Of the engine's error that this is or was caused by: a program may have wrapped it in one of its own."""
    while error is not None:
        if isinstance(error, CollectiveError):
            return error.kind
        error = error.__cause__ or error.__context__
    return ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception's own __str__
        return "(its text cannot be read)"


def _outcome(rank: int, call: bytes) -> Frame:
    """What the call returned (``value``), or what it raised (``raised``)."""
    try:
        run, args, kwargs = function.unpack(call)
        return Frame("value", rank, function.pack(run(*args, **kwargs), f"what {getattr(run, '__name__', 'the function')} returned"))
    except BaseException as error:  # noqa: BLE001 - the starter raises it
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return Frame("value", rank, function.pack(None, "nothing"))
        # As the interpreter does with an exception that nobody catches: the engine then does not wait for others (runtime/job.py).
        sys.last_value = error
        # Without this module's own frame.
        where = error.__traceback__.tb_next if error.__traceback__ is not None else None
        told = {
            "type": type(error).__name__,
            "text": _text(error),
            "traceback": "".join(traceback.format_exception(type(error), error, where)),
            "kind": _kind(error),
        }
        if isinstance(error, function.NotSendableError):
            told["traceback"] = ""  # it says all there is to say
        return Frame("raised", rank, json.dumps(told).encode())


def _settle_in(settings: dict[str, Any]) -> None:
    os.environ.update(settings["environment"])
    if "COLLECTIVE_SECRET" in settings["environment"]:
        os.environ.pop("COLLECTIVE_SECRET_FILE", None)  # of another job; it would win
    sys.path[:] = settings["path"] or sys.path
    sys.argv[:] = settings["argv"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # they are pipes, which would show lines at the end


def main() -> None:
    inward, outward = (int(word) for word in sys.argv[1:3])
    for number in (inward, outward):
        os.set_inheritable(number, False)
    starter, results = os.fdopen(inward, "rb", buffering=0), os.fdopen(outward, "wb", buffering=0)
    settings, call = frames.read(starter), frames.read(starter)
    if settings is None or call is None:
        sys.exit(1)
    threading.Thread(target=_end_with, args=(inward,), daemon=True).start()
    _settle_in(json.loads(settings.body))
    outcome = _outcome(call.rank, call.body)
    with contextlib.suppress(Exception):  # the function may have closed it
        sys.stdout.flush()
    frames.write(results, outcome)
    sys.exit(0 if outcome.kind == "value" else 1)
