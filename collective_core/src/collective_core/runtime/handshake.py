"""The handshake of two processes of a job: both prove that they know its secret before anything else is read.

The caller sends a greeting, its number and a challenge; the listener its own challenge and a proof (HMAC-SHA256 over both challenges); the
caller its proof. The challenges are fresh, so a recorded proof is worth nothing, and the secret never travels. From then on every message
is sealed with a key of these challenges.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

from collective_core.errors import CollectiveError

CHALLENGE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
#: Seconds in which a caller must have proven itself.
PROOF_TIMEOUT = 5.0
#: What a caller begins with: greeting, its number.
HEAD = struct.Struct("!8sI")
#: The sides, as proofs and seals name them.
LISTENER, CALLER = b"host", b"guest"


def _proof(secret: bytes, side: bytes, number: int, of_caller: bytes, of_listener: bytes) -> bytes:
    return hmac.new(secret, side + struct.pack("!I", number) + of_caller + of_listener, hashlib.sha256).digest()


class Seal:
    """Marks the messages of one connection: who cannot make the proofs can neither change, repeat nor swap them."""

    BYTES = PROOF_BYTES

    def __init__(self, secret: bytes, number: int, of_caller: bytes, of_listener: bytes) -> None:
        self._key = _proof(secret, b"seal", number, of_caller, of_listener)
        self._sent = {LISTENER: 0, CALLER: 0}

    def of(self, side: bytes, body: bytes) -> bytes:
        """The mark of the next message that ``side`` sends."""
        self._sent[side] += 1
        return hmac.new(self._key, side + struct.pack("!Q", self._sent[side]) + body, hashlib.sha256).digest()

    def check(self, side: bytes, body: bytes, mark: bytes, rank: int) -> None:
        """Raises :class:`CollectiveError` unless ``side``, which is ``rank``, sent this as its next message."""
        if not hmac.compare_digest(self.of(side, body), mark):
            raise CollectiveError(f"what rank {rank} sent was changed on its way while the job was starting", "invalid", [rank])


def call(connection: socket.socket, greeting: bytes, number: int, secret: bytes) -> Seal | None:
    """The caller's side; None if the listener does not know the secret. Raises OSError or EOFError as the connection does."""
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    connection.sendall(HEAD.pack(greeting, number) + mine)
    theirs = read(connection, CHALLENGE_BYTES)
    if not hmac.compare_digest(read(connection, PROOF_BYTES), _proof(secret, LISTENER, number, mine, theirs)):
        return None
    connection.sendall(_proof(secret, CALLER, number, mine, theirs))
    return Seal(secret, number, mine, theirs)


class Answer:
    """The listener's side, for a caller whose head and challenge have been read: send ``message``, then look at the caller's proof."""

    def __init__(self, secret: bytes, number: int, challenge: bytes) -> None:
        mine = secrets.token_bytes(CHALLENGE_BYTES)
        self.message = mine + _proof(secret, LISTENER, number, challenge, mine)
        self._expected = _proof(secret, CALLER, number, challenge, mine)
        self._seal = Seal(secret, number, challenge, mine)

    def seal(self, proof: bytes) -> Seal | None:
        """The seal of the connection; None if the caller does not know the secret."""
        return self._seal if hmac.compare_digest(proof, self._expected) else None


def read(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises EOFError where the connection ends before."""
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the connection was closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
