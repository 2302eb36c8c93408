"""A line between a worker and the assembly: JSON messages over TCP, after both have proven that they know the job's secret.

The proof and the seal of every message are those of the ranks' own meeting (store.py).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from typing import Any

from collective_core.errors import CollectiveError
from collective_core.runtime import store

GREETING = b"ccelast1"
#: Bytes of one message.
MOST_BYTES = 1 << 20
#: Seconds after which the system asks a silent other side whether it is still there, between questions, and questions without answer.
KEEPALIVE = (5, 2, 3)

_head = struct.Struct("!8sI")  # greeting, number of the worker
_length = struct.Struct("!I")


class Line:
    """One end, once both are proven. Messages may be sent from several threads and are read by one."""

    def __init__(self, connection: socket.socket, seal: store._Seal, me: bytes, worker: int) -> None:
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
        other = b"guest" if self._me == b"host" else b"host"
        try:
            (length,) = _length.unpack(store._read(self._connection, _length.size))
            if length > MOST_BYTES:
                return None
            body = store._read(self._connection, length)
            self._seal.check(other, body, store._read(self._connection, self._seal.BYTES), self.worker)
            message: dict[str, Any] = json.loads(body)
        except (OSError, EOFError, ValueError, CollectiveError):
            return None
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def call(place: tuple[str, int], worker: int, secret: bytes, timeout: float) -> Line:
    """A worker's end. Raises OSError or EOFError when there is nobody, CollectiveError when it is somebody else."""
    connection = socket.create_connection(place, timeout=timeout)
    try:
        mine = secrets.token_bytes(store.CHALLENGE_BYTES)
        connection.sendall(_head.pack(GREETING, worker) + mine)
        theirs = store._read(connection, store.CHALLENGE_BYTES)
        proof = store._read(connection, store._Seal.BYTES)
        if not hmac.compare_digest(proof, store._proof(secret, b"host", worker, mine, theirs)):
            raise CollectiveError(f"what listens at {place[0]} port {place[1]} does not know this job's secret", "invalid")
        connection.sendall(store._proof(secret, b"guest", worker, mine, theirs))
    except BaseException:
        connection.close()
        raise
    return Line(connection, store._Seal(secret, worker, mine, theirs), b"guest", worker)


def answer(connection: socket.socket, secret: bytes) -> Line | None:
    """The assembly's end, for whoever has called; None for a stranger, whose connection is closed."""
    connection.settimeout(store.PROOF_TIMEOUT)
    try:
        greeting, worker = _head.unpack(store._read(connection, _head.size))
        if greeting == GREETING:
            theirs = store._read(connection, store.CHALLENGE_BYTES)
            mine = secrets.token_bytes(store.CHALLENGE_BYTES)
            connection.sendall(mine + store._proof(secret, b"host", worker, theirs, mine))
            proof = store._read(connection, store._Seal.BYTES)
            if hmac.compare_digest(proof, store._proof(secret, b"guest", worker, theirs, mine)):
                return Line(connection, store._Seal(secret, worker, theirs, mine), b"host", worker)
    except (OSError, EOFError):
        pass
    connection.close()
    return None
