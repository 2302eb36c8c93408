"""Signals that are deferred, ignored or turned into an interrupt."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from provision.base import signals


def test_ctrl_c_is_deferred():
    done = []

    def block() -> None:
        with signals.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("finished")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["finished"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_ignored(number):
    before = signal.getsignal(number)
    with signals.ignored():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_is_deferred(number):
    done = []

    def block() -> None:
        with signals.termination_as_interrupt(), signals.deferred():
            os.kill(os.getpid(), number)
            done.append("finished")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["finished"]


def test_an_ignored_signal_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with signals.termination_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_get_no_signals():
    def body() -> None:
        with signals.deferred(), signals.ignored():
            done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [True]
