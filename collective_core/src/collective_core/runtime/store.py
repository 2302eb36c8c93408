"""Ranks without MPI meet at rank 0: over TCP with the job's secret, or inside one host through a unix socket of one user.

Both sides prove that they know the secret before anything else is read, and every message is sealed (handshake.py). Only bytes travel.
Strangers are dropped without a word; any number of them only delays, because the oldest gives way to the newest. Inside one host the
system tells each side the other's user, so a secret is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
import time
from typing import Any

from collective_core.errors import CollectiveError
from collective_core.runtime import handshake
from collective_core.runtime.handshake import CALLER, LISTENER, PROOF_TIMEOUT, Seal

GREETING = b"ccstore2"
#: What a rank hears when it is in: one that has proven itself may have been dropped meanwhile, like any of too many callers.
WELCOME = b"!"
#: Callers that have not proven themselves yet; beyond that the oldest is dropped.
MAX_PENDING = 256
#: Bytes of one rank's part of an exchange: far more than a table of interfaces.
MAX_BYTES = 1 << 24
#: In the place of a length: rank 0 says why the job cannot start.
FAILED = (1 << 64) - 1
#: Seconds for which rank 0 waits longer than ranks wait for each other while they connect, and other ranks for rank 0: so that all
#: hear from who waited longest whom it waited for.
GRACE = 3.0
#: Seconds between attempts to reach rank 0, which may not be up yet.
RETRY_INTERVAL = 0.1
#: Ends the errors about ranks that do not come: those of the two ways into a job do not meet.
START_HINT = ". All ranks must call the same: init(), or torch.distributed.init_process_group"

_length = struct.Struct("!Q")


def _user_of(connection: Any) -> int:
    """The user at the other end of a unix socket, as the system knows it."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _listen_locally(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name)
        listener.listen(MAX_PENDING)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen_on_all_interfaces(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=MAX_PENDING, dualstack_ipv6=both)


def _listen(host: str, port: int) -> socket.socket:
    """At this address, if it is one of this machine's; on all interfaces for a name, or for an address that is translated on the way here.

    Names are for those who call: Debian's /etc/hosts leads a machine's own name to 127.0.1.1, where no other host gets through.
    """
    flags = 0 if host == "localhost" else socket.AI_NUMERICHOST
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0][0]
        return socket.create_server((host, port), family=family, backlog=MAX_PENDING)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            return _listen_on_all_interfaces(port)
        raise


class Endpoint:
    """Address of rank 0: (host, port), or the name of an abstract unix socket."""

    def __init__(self, where: tuple[str, int] | str) -> None:
        self.where = where

    def __str__(self) -> str:
        return f"local socket {self.where}" if isinstance(self.where, str) else f"{self.where[0]} port {self.where[1]}"

    @property
    def address(self) -> Any:
        return "\0" + self.where if isinstance(self.where, str) else self.where

    def listen(self) -> socket.socket:
        try:
            return _listen_locally(self.address) if isinstance(self.where, str) else _listen(*self.where)
        except OSError as error:
            raise CollectiveError(f"rank 0 cannot listen at {self}: {error}. COLLECTIVE_PORT chooses another port", "invalid") from error

    def call(self) -> socket.socket:
        if not isinstance(self.where, str):
            return socket.create_connection(self.where, timeout=PROOF_TIMEOUT)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PROOF_TIMEOUT)
        try:
            connection.connect(self.address)
            if _user_of(connection) != os.getuid():
                raise CollectiveError(f"{self} belongs to another user", "invalid")
        except BaseException:
            connection.close()
            raise
        return connection


class Server:
    """Rank 0's side."""

    rank = 0
    hears_of_deaths = True

    def __init__(self, size: int, endpoint: Endpoint, secret: bytes, timeout: float) -> None:
        self.size = size
        self.secret = secret
        self._timeout = timeout
        self._clients: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter, Seal]] = {}
        self._pending: list[asyncio.StreamWriter] = []
        self._is_local = isinstance(endpoint.where, str)
        self._loop = asyncio.new_event_loop()
        self._run(self._accept_clients(endpoint))

    async def _accept_clients(self, endpoint: Endpoint) -> None:
        self._complete = asyncio.Event()
        server = await asyncio.start_server(self._visit, sock=endpoint.listen())
        try:
            await asyncio.wait_for(self._complete.wait(), self._timeout)
        except asyncio.TimeoutError:
            missing = [rank for rank in range(1, self.size) if rank not in self._clients]
            text = f"ranks {missing} did not come to {endpoint} within {self._timeout:g} s (COLLECTIVE_START_TIMEOUT)"
            error = CollectiveError(text + START_HINT, "timeout", missing)
            await self._send_error(error)
            raise error from None
        finally:
            server.close()
            for writer in self._pending:
                writer.transport.abort()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._pending.pop(0).transport.abort()
        self._pending.append(writer)
        client = None
        # Errors are a stranger's, or of somebody who went away: not ours.
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            client = await asyncio.wait_for(self._examine(reader, writer), PROOF_TIMEOUT)
        if writer in self._pending:
            self._pending.remove(writer)
        if client is None or client[0] in self._clients:
            writer.transport.abort()
            return
        writer.transport.set_write_buffer_limits(high=0)  # drained is sent: nobody looks after this loop between exchanges
        self._clients[client[0]] = (reader, writer, client[1])
        writer.write(WELCOME)
        if len(self._clients) == self.size - 1:
            self._complete.set()

    async def _examine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, Seal] | None:
        """The caller's rank, once it has proven itself, and the seal of its messages."""
        if self._is_local and _user_of(writer.get_extra_info("socket")) != os.getuid():
            return None
        greeting, rank = handshake.HEAD.unpack(await reader.readexactly(handshake.HEAD.size))
        if greeting != GREETING or not 0 < rank < self.size:
            return None
        answer = handshake.Answer(self.secret, rank, await reader.readexactly(handshake.CHALLENGE_BYTES))
        writer.write(answer.message)
        seal = answer.seal(await reader.readexactly(handshake.PROOF_BYTES))
        return (rank, seal) if seal else None

    def exchange(self, mine: bytes, spent: float = 0.0) -> list[bytes]:
        """All ranks' bytes, by rank. Raises CollectiveError naming the ranks that went away or did not answer.

        ``spent``: seconds since all ranks were together, by which it waits less.
        """
        parts: list[bytes] = self._run(self._exchange(mine, max(0.0, self._timeout - spent) + GRACE))
        return parts

    def _run(self, coroutine: Any) -> Any:
        """Its result. Ctrl-C ends what is under way in good order, so that who waits here is not left waiting."""
        try:
            return self._loop.run_until_complete(coroutine)
        except (KeyboardInterrupt, SystemExit):
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:  # none, where the handler ran in the last of them
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            raise

    async def _exchange(self, mine: bytes, patience: float) -> list[bytes]:
        parts = {0: mine}

        async def read(rank: int, reader: asyncio.StreamReader, seal: Seal) -> None:
            (length,) = _length.unpack(await reader.readexactly(_length.size))
            if length > MAX_BYTES:
                raise CollectiveError(f"rank {rank} sent a part of {length} bytes (internal error)", "internal", [rank])
            part = await reader.readexactly(length)
            seal.check(CALLER, part, await reader.readexactly(seal.BYTES), rank)
            parts[rank] = part

        reads = {asyncio.ensure_future(read(rank, reader, seal)): rank for rank, (reader, _, seal) in self._clients.items()}
        done, waiting = await asyncio.wait(reads, timeout=patience, return_when=asyncio.FIRST_EXCEPTION) if reads else (set(), set())
        for task in waiting:
            task.cancel()
        failed = {reads[task]: failure for task in done if (failure := task.exception()) is not None}
        if failed or waiting:
            error = self._failure_of(failed, sorted(reads[task] for task in waiting))
            await self._send_error(error)
            raise error
        everyone = b"".join(_length.pack(len(parts[rank])) + parts[rank] for rank in range(self.size))
        for _, writer, seal in self._clients.values():
            writer.write(everyone + seal.of(LISTENER, everyone))
        # A client that has read its answer may have hung up already, which is none of our failures; of one that died the job learns next.
        sent = asyncio.gather(*(writer.drain() for _, writer, _ in self._clients.values()), return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(sent, patience)
        return [parts[rank] for rank in range(self.size)]

    def _failure_of(self, failed: dict[int, BaseException], silent: list[int]) -> CollectiveError:
        for failure in failed.values():
            if not isinstance(failure, (OSError, EOFError)):
                return failure if isinstance(failure, CollectiveError) else CollectiveError(f"{failure} (internal error)", "internal")
        if failed:
            return CollectiveError(f"ranks {sorted(failed)} went away while the job was starting", "peer_lost", sorted(failed))
        text = f"ranks {silent} said nothing for {self._timeout:g} s while the job was starting (COLLECTIVE_START_TIMEOUT)"
        return CollectiveError(text, "timeout", silent)

    async def _send_error(self, error: CollectiveError) -> None:
        """Says to the ranks that are here why the job cannot start: else they would blame rank 0, which goes away over it."""
        text = json.dumps({"error": str(error), "kind": error.kind, "ranks": error.ranks}).encode()

        async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal) -> None:
            writer.write(_length.pack(FAILED) + _length.pack(len(text)) + text + seal.of(LISTENER, text))
            await writer.drain()
            while await reader.read(1 << 16):  # until it has read that: a connection that closes over unread data takes the message along
                pass

        here = [tell(*client) for rank, client in self._clients.items() if rank not in error.ranks]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*here, return_exceptions=True), GRACE)

    def finish(self, patience: float) -> None:  # noqa: ARG002 - what launchers are told
        for _, writer, _ in self._clients.values():
            writer.transport.abort()
        self._loop.run_until_complete(asyncio.sleep(0))  # for these to be gone
        self._loop.close()


class Client:
    """The side of every other rank."""

    hears_of_deaths = True

    def __init__(self, rank: int, size: int, endpoint: Endpoint, secret: bytes, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.secret = secret
        self._endpoint = endpoint
        end = time.monotonic() + timeout
        while True:
            try:
                self._connection, self._seal = self._enter()
                break
            except (OSError, EOFError) as error:
                if time.monotonic() > end:
                    text = f"rank {rank} cannot reach rank 0 at {endpoint} within {timeout:g} s (COLLECTIVE_START_TIMEOUT): {error}"
                    raise CollectiveError(text + START_HINT, "timeout", [0]) from error
                time.sleep(RETRY_INTERVAL)
        self._connection.settimeout(timeout + 2 * GRACE)

    def _enter(self) -> tuple[socket.socket, Seal]:
        connection = self._endpoint.call()
        try:
            seal = handshake.call(connection, GREETING, self.rank, self.secret)
            if seal is None:
                text = f"what listens at {self._endpoint} does not know this job's secret; COLLECTIVE_PORT chooses another port"
                raise CollectiveError(text, "invalid", [0])
            handshake.read(connection, len(WELCOME))
        except BaseException:
            connection.close()
            raise
        return connection, seal

    def exchange(self, mine: bytes, spent: float = 0.0) -> list[bytes]:  # noqa: ARG002 - rank 0's time counts
        """All ranks' bytes, by rank."""
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # rank 0 may have said why it went away
                self._connection.sendall(_length.pack(len(mine)) + mine + self._seal.of(CALLER, mine))
            parts = [self._receive_part() for _ in range(self.size)]
            mark = handshake.read(self._connection, Seal.BYTES)
        except (OSError, EOFError) as error:
            text = f"rank 0 at {self._endpoint} refused this rank or went away while the job was starting: {error}"
            raise CollectiveError(text, "peer_lost", [0]) from error
        self._seal.check(LISTENER, b"".join(_length.pack(len(part)) + part for part in parts), mark, 0)
        return parts

    def _receive_part(self) -> bytes:
        (length,) = _length.unpack(handshake.read(self._connection, _length.size))
        if length == FAILED:
            raise self._failure()
        if length > MAX_BYTES:
            raise CollectiveError(f"rank 0 announced a part of {length} bytes (internal error)", "internal", [0])
        return handshake.read(self._connection, length)

    def _failure(self) -> CollectiveError:
        """Why rank 0 says that the job cannot start."""
        text = self._receive_part()
        self._seal.check(LISTENER, text, handshake.read(self._connection, Seal.BYTES), 0)
        self._connection.close()
        said = json.loads(text)
        return CollectiveError(said["error"], said["kind"], said["ranks"])

    def finish(self, patience: float) -> None:  # noqa: ARG002 - what launchers are told
        self._connection.close()


def enter(rank: int, size: int, endpoint: Endpoint, secret: bytes, timeout: float) -> Server | Client:
    """Meets the other ranks at ``endpoint``."""
    return Server(size, endpoint, secret, timeout) if rank == 0 else Client(rank, size, endpoint, secret, timeout)
