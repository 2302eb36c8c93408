"""Waits of launchers where nobody says how long: Horovod's variables, else our own numbers."""

from __future__ import annotations

import os

from collective_core.errors import CollectiveError

#: Seconds for hosts to answer and ranks to meet, and for which an elastic job waits with too few ranks.
START, ELASTIC = 60.0, 600.0


def start() -> float:
    """Raises :class:`CollectiveError` for a variable that is no positive number."""
    return _of("HOROVOD_START_TIMEOUT", START)


def elastic() -> float:
    """Raises :class:`CollectiveError` for a variable that is no positive number."""
    return _of("HOROVOD_ELASTIC_TIMEOUT", ELASTIC)


def _of(name: str, usual: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        seconds = float(text) if text else usual
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise CollectiveError(f"{name}={text!r} is not a positive number of seconds", "invalid")
    return seconds
