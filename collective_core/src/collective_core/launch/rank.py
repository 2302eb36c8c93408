"""A rank that runs a function: ``python -m collective_core.launch.rank IN OUT``, started by processes.py.

IN and OUT are the numbers of two inherited pipes. A job comes in (frames.py); what the call returned or raised goes out. When IN
ends, whoever started this process is gone, and so is it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback

from collective_core.launch import frames, function
from collective_core.launch.frames import Frame


def _end_with(starter: int) -> None:
    """Waits for the end of the starter, which sends nothing more; then ends this process and its children."""
    os.read(starter, 1)
    os.killpg(0, signal.SIGKILL)


def _outcome(rank: int, call: bytes) -> Frame:
    """What the call returned (``value``), or what it raised (``raised``)."""
    try:
        run, args, kwargs = function.unpack(call)
        return Frame("value", rank, function.pack(run(*args, **kwargs), f"what {getattr(run, '__name__', 'the function')} returned"))
    except BaseException as error:  # noqa: BLE001 - the starter raises it
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return Frame("value", rank, function.pack(None, "nothing"))
        # As the interpreter does with an exception that nobody catches: then the engine does not wait for the others (context.py).
        sys.last_value = error
        # Without this module's own frame.
        where = error.__traceback__.tb_next if error.__traceback__ is not None else None
        told = {
            "type": type(error).__name__,
            "text": str(error),
            "traceback": "".join(traceback.format_exception(type(error), error, where)),
            "kind": getattr(error, "kind", ""),
        }
        if isinstance(error, function.NotSendableError):
            told["traceback"] = ""  # it says all there is to say
        return Frame("raised", rank, json.dumps(told).encode())


def main() -> None:
    inward, outward = (int(word) for word in sys.argv[1:3])
    for number in (inward, outward):
        os.set_inheritable(number, False)
    starter, results = os.fdopen(inward, "rb", buffering=0), os.fdopen(outward, "wb")
    settings, call = frames.read(starter), frames.read(starter)
    if settings is None or call is None:
        sys.exit(1)
    threading.Thread(target=_end_with, args=(inward,), daemon=True).start()
    wanted = json.loads(settings.body)
    os.environ.update(wanted["environment"])
    sys.path[:] = wanted["path"] or sys.path
    outcome = _outcome(call.rank, call.body)
    sys.stdout.flush()
    frames.write(results, outcome)
    sys.exit(0 if outcome.kind == "value" else 1)


if __name__ == "__main__":
    main()
