"""A worker's side of an elastic job: it asks the rendezvous server for its rank, and learns when the others are to change."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any, Sequence

from collective_core import _native
from collective_core.elastic import control_channel
from collective_core.elastic.control_channel import ControlChannel
from collective_core.errors import CollectiveError, PeerLostError
from collective_core.runtime import launchers, network
from collective_core.runtime.torch_variables import MASTER_VARIABLES

#: This worker's number; set by the driver.
NUMBER = "COLLECTIVE_WORKER"

#: Seconds between attempts to reach the server.
RETRY_INTERVAL = 0.2

_channel: ControlChannel | None = None
_answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
_change = threading.Event()
_masters_of_user: set[str] = set()  # variables of torch.distributed that stay as the user has set them


def shall_change() -> bool:
    """Whether somebody waits to join, or has to leave."""
    return _change.is_set()


def join(timeout: float, lost: Sequence[int] = ()) -> None:
    """Waits for a rank in the next generation and writes it into the environment, from where runtime/launchers.py reads it.

    ``timeout``: seconds for reaching the server; the rank itself is waited for as long as the job waits for ranks. ``lost``: ranks of
    the last generation that are to blame for its end. Raises :class:`CollectiveError` when the job is over, and SystemExit where this
    worker is to leave it.
    """
    connected = _connect(timeout)
    try:
        port, master_port = network.free_ports(2)
        connected.send(kind="ready", port=port, master_port=master_port, lost=list(lost))
        answer = _answers.get()
    except OSError:
        answer = None
    if answer is None:
        _answers.put(None)  # for the next one who asks
        raise CollectiveError("the job is over: whoever started it does not answer any more", "closed")
    if answer["kind"] == "leave":
        raise SystemExit(0)
    if launchers.generation == 0:
        _masters_of_user.update(name for name in MASTER_VARIABLES if name in os.environ)
    assigned = {"COLLECTIVE_RANK": answer["rank"], "COLLECTIVE_SIZE": answer["size"], "COLLECTIVE_STORE": answer["store"]}
    found = {name: str(value) for name, value in {**assigned, **answer["among"]}.items() if name not in _masters_of_user}
    os.environ.update(found)
    launchers.generation = int(answer["generation"])


def _connect(timeout: float) -> ControlChannel:
    global _channel
    if _channel is None:
        host, _, port = os.environ[launchers.ELASTIC_SERVER].rpartition(":")
        end = time.monotonic() + timeout
        while _channel is None:
            try:
                _channel = control_channel.connect(
                    (host.strip("[]"), int(port)), int(os.environ[NUMBER]), launchers.read_secret(os.environ), timeout
                )
            except (OSError, EOFError) as error:
                if time.monotonic() > end:
                    raise PeerLostError(f"the elastic job at {host}:{port} cannot be reached: {error}", "closed") from error
                time.sleep(RETRY_INTERVAL)
        threading.Thread(target=_listen, args=(_channel,), daemon=True).start()
    return _channel


def _listen(connected: ControlChannel) -> None:
    while True:
        message = connected.receive()
        if message is not None and message["kind"] == "change":
            _change.set()
        elif message is not None and message["kind"] == "lost":
            _native.give_up(int(message["rank"]))  # of this generation: the next one's ranks come after it on this channel
        else:
            if message is not None and message["kind"] == "rank":
                _change.clear()
                _native.forget_given_up()
            _answers.put(message)
        if message is None:
            return
