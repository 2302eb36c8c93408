"""The control channel between a worker and the rendezvous server: JSON messages over TCP, after a handshake with the job's secret.

The handshake and the seal of every message are those of the ranks' own rendezvous (runtime/handshake.py).
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from typing import Any

from collective_core.errors import CollectiveError
from collective_core.runtime import handshake
from collective_core.runtime.handshake import CALLER, HEAD, LISTENER, Seal

GREETING = b"ccelast1"
#: Bytes of one message.
MAX_BYTES = 1 << 20
#: Seconds after which the system asks a silent other side whether it is still there, between questions, and questions without answer.
KEEPALIVE = (5, 2, 3)

_length = struct.Struct("!I")


class ControlChannel:
    """One end of the channel, once both are proven. Messages may be sent from several threads and are read by one."""

    def __init__(self, connection: socket.socket, seal: Seal, me: bytes, worker: int) -> None:
        self.worker = worker
        self._connection = connection
        self._seal, self._me = seal, me
        self._sending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in zip((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), KEEPALIVE):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def addresses(self) -> tuple[str, str]:
        """(at which this side was reached or went out, of the other side)"""
        return self._connection.getsockname()[0], self._connection.getpeername()[0]

    def send(self, **message: Any) -> None:
        """Raises OSError when the other side is gone."""
        body = json.dumps(message).encode()
        with self._sending:
            self._connection.sendall(_length.pack(len(body)) + body + self._seal.of(self._me, body))

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other side is gone, or what came was not its."""
        other = CALLER if self._me == LISTENER else LISTENER
        try:
            (length,) = _length.unpack(handshake.read(self._connection, _length.size))
            if length > MAX_BYTES:
                return None
            body = handshake.read(self._connection, length)
            self._seal.check(other, body, handshake.read(self._connection, Seal.BYTES), self.worker)
            message: dict[str, Any] = json.loads(body)
        except (OSError, EOFError, ValueError, CollectiveError):
            return None
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def connect(address: tuple[str, int], worker: int, secret: bytes, timeout: float) -> ControlChannel:
    """A worker's end. Raises OSError or EOFError when there is nobody, CollectiveError when it is somebody else."""
    connection = socket.create_connection(address, timeout=timeout)
    try:
        seal = handshake.call(connection, GREETING, worker, secret)
        if seal is None:
            raise CollectiveError(f"what listens at {address[0]} port {address[1]} does not know this job's secret", "invalid")
    except BaseException:
        connection.close()
        raise
    return ControlChannel(connection, seal, CALLER, worker)


def accept(connection: socket.socket, secret: bytes) -> ControlChannel | None:
    """The server's end, for whoever has called; None for a stranger, whose connection is closed."""
    connection.settimeout(handshake.PROOF_TIMEOUT)
    try:
        greeting, worker = HEAD.unpack(handshake.read(connection, HEAD.size))
        if greeting == GREETING:
            own = handshake.Answer(secret, worker, handshake.read(connection, handshake.CHALLENGE_BYTES))
            connection.sendall(own.message)
            seal = own.seal(handshake.read(connection, handshake.PROOF_BYTES))
            if seal is not None:
                return ControlChannel(connection, seal, LISTENER, worker)
    except (OSError, EOFError):
        pass
    connection.close()
    return None
