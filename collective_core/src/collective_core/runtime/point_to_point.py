"""Messages between two ranks of a group: send and recv of torch.distributed, and what parameter servers are told and answer.

Every ordered pair of ranks that needs it has a connection of its own, which the sender opens with its first message. Both sides prove that
they know the group's secret (runtime/handshake.py). One thread per group moves all messages, from its first use on. A message is its tag,
its length, and its bytes, which are read into the tensor that waits for them. While nobody waits for a message it stays with its sender,
unless somebody waits for one behind it, with another tag: then it is kept here. A message that times out after it has begun takes its
connection with it, for good, as with Gloo: what is left of it would be taken for the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import json
import math
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from typing import Any, Callable, Sequence

import numpy as np

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import handshake, membership
from collective_core.runtime.handshake import HEAD

GREETING = b"ccp2pmsg"
#: In the place of a source: whoever sends first.
ANYONE = -1
#: Connections whose callers have not proven themselves yet; beyond that the oldest gives way.
MAX_PENDING = 64
#: Seconds between looks for a failure of the group.
LOOK_INTERVAL = 0.5
#: Seconds for which the end of a group, or of the process, waits for messages that are still to go.
LAST_WORDS = 5.0

_message = struct.Struct("!qQ")


Bytes = Any  # an array of uint8


class Transfer:
    """A message on its way: out of ``memory`` to rank ``other``, or from there into it; None: into as much as it takes.

    ``timeout``: seconds; where it is infinite, nobody is told that it is waited for.
    """

    def __init__(self, group: PointToPoint, memory: Bytes | None, other: int, tag: int, timeout: float) -> None:
        self.other, self.tag = other, tag
        self.length = -1
        if memory is not None:
            self.take(memory)
        self.moved = 0
        self.is_told = timeout == math.inf  # that it is waited for
        self._group = group
        self._timeout = timeout
        self._over, self._lock = threading.Event(), threading.Lock()
        self._when_over: Callable[[], None] = lambda: None
        self._error: CollectiveError | None = None
        self.began = time.monotonic()
        self._end = self.began + timeout

    def take(self, memory: Bytes) -> None:
        """Where its bytes are, or go."""
        self.memory, self.length, self.bytes = memory, memory.size, memoryview(memory)

    def fits(self, length: int) -> bool:
        """Whether a message of so many bytes can go there."""
        if self.length < 0:
            self.take(np.empty(length, np.uint8))
        return self.length == length

    def end(self, error: CollectiveError | None = None) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
        self._when_over()

    def call_when_over(self, call: Callable[[], None]) -> None:
        """From the thread that moves messages, or at once."""
        with self._lock:
            if not self._over.is_set():
                self._when_over = call
                return
        call()

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; says whether it is over, and raises its error."""
        if not self._over.wait(seconds):
            if time.monotonic() < self._end:
                return False
            self.give_up(self._timeout)
        if self._error is not None:
            raise self._error
        return True

    def give_up(self, seconds: float) -> None:
        """Ends it, in vain unless it ends just now. Then nothing of its memory is sent or written any more. ``seconds``: that it had."""
        self._timeout = seconds
        self._group.forget(self)
        while not self._over.wait(LOOK_INTERVAL) and self._group.is_moving():
            pass
        self.end_late()

    def end_late(self) -> None:
        """Called where it cannot move any more."""
        who = "any rank" if self.other == ANYONE else self._group.describe(self.other)
        self.end(CollectiveError(f"a message (tag {self.tag}) from or to {who} was not taken within {self._timeout:g} s", "timeout"))


class _Sender:
    """The messages to one rank."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None  # none yet
        self.waiting: deque[Transfer] = deque()
        self.head = b""  # what is left of the first one's


class _Receiver:
    """The messages from one rank."""

    def __init__(self, source: int, connection: socket.socket) -> None:
        self.source, self.connection = source, connection
        self.head = bytearray()
        self.tag, self.length = 0, -1  # of the message that is being read, when its head is complete
        self.target: Transfer | None = None  # whoever takes it
        self.kept: bytearray | None = None  # or where it is kept
        self.is_wanted = True  # not one of another length than whoever waited for it
        self.moved = 0
        self.is_parked = False


class PointToPoint:
    """Messenger. ``peers``: ranks of the group. ``timeout``: seconds, of a message. ``stall_warning``: COLLECTIVE_STALL_WARNING."""

    def __init__(
        self, launcher: Any, peers: Sequence[_native.PeerInfo], process_set: int, timeout: float, stall_warning: float = 0.0
    ) -> None:
        self.timeout = timeout
        self._stall_warning = stall_warning
        self._me, self._peers, self._set = launcher.rank, peers, process_set
        self._listener, mine = _listen(peers[launcher.rank].address, MAX_PENDING + len(peers))
        mine["nonce"] = secrets.token_hex(32) if launcher.rank == 0 else ""
        told = [json.loads(text) for text in launcher.exchange(json.dumps(mine).encode())]
        self._addresses = [(each["address"], each["port"]) if each["address"] else "\0" + each["name"] for each in told]
        self._secret = hmac.new(launcher.secret, b"messages" + bytes.fromhex(told[0]["nonce"]), hashlib.sha256).digest()
        self._lock = threading.Lock()
        self._new: deque[tuple[str, Any]] = deque()
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[int, _Receiver] = {}
        self._lost: dict[int, CollectiveError] = {}  # of senders whose connection has ended
        self._refused: set[int] = set()  # senders whose connection was closed for a message that timed out
        self._closed: dict[int, CollectiveError] = {}  # as those, by the rank to which it was
        #: Ranks that have ended, as it seems, without a connection of theirs: when to believe it, as the connection may be on its way.
        self._gone: dict[int, tuple[float, CollectiveError]] = {}
        self._posted: list[Transfer] = []
        self._unexpected: list[tuple[int, int, bytearray]] = []  # source, tag, bytes
        self._pending: deque[socket.socket] = deque()
        self._thread: threading.Thread | None = None
        self._wake_send, self._wake_receive = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._is_over = False
        self._broken: CollectiveError | None = None  # why no message moves any more
        self._last = math.inf  # when to end

    # --- what the program's threads call

    def send(self, memory: Bytes, destination: int, tag: int) -> Transfer:
        return self._begin("send", Transfer(self, memory, destination, tag, self.timeout))

    def receive(self, memory: Bytes | None, source: int, tag: int, timeout: float | None = None) -> Transfer:
        """``source``: ANYONE, or a rank; then ``other`` of what is returned is it. ``timeout``: the group's where it is None.

        ``memory``: None takes a message of any length, which is then the ``memory`` of what is returned.
        """
        return self._begin("receive", Transfer(self, memory, source, tag, self.timeout if timeout is None else timeout))

    def _begin(self, what: str, transfer: Transfer) -> Transfer:
        with self._lock:
            if self._is_over:
                raise CollectiveError("the group was destroyed", "closed")
            if self._broken is not None:
                raise self._broken
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="collective_core messages", daemon=True)
                self._thread.start()
                atexit.register(self.end)  # before the engine's own, which was registered before
            self._post(what, transfer)
        return transfer

    def forget(self, transfer: Transfer) -> None:
        """Nobody waits for it any more."""
        self._post("forget", transfer)

    def is_moving(self) -> bool:
        """Whether the thread that moves messages runs."""
        return self._thread is not None and self._thread.is_alive()

    def describe(self, rank: int) -> str:
        peer = self._peers[rank]
        return f"rank {rank} (host {peer.host_name}, pid {peer.pid})"

    def end(self) -> None:
        """Closes everything when what was sent has gone, or after a while; messages that are then under way end with an error."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        atexit.unregister(self.end)
        if self._thread is not None:
            self._post("end", time.monotonic() + (LAST_WORDS if membership.is_healthy() else 0.0))
            self._thread.join()
        self._listener.close()
        self._wake_send.close()
        self._wake_receive.close()

    def _post(self, what: str, about: Any) -> None:
        self._new.append((what, about))
        with contextlib.suppress(OSError):  # it has ended
            self._wake_send.send(b"!")

    # --- the thread

    def _run(self) -> None:
        try:
            self._move_messages()
        except Exception as failure:  # noqa: BLE001 - whoever waits for a message would wait for ever
            with self._lock:
                self._broken = CollectiveError(f"messages of rank {self._me} ended: {type(failure).__name__}: {failure}", "internal")
            self._fail_all(self._broken)
            while self._new:
                _, about = self._new.popleft()
                if isinstance(about, Transfer):
                    about.end(self._broken)

    def _move_messages(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_receive, selectors.EVENT_READ, self._hear)
        looked = time.monotonic()
        while time.monotonic() < self._last and not (self._last < math.inf and self._all_sent()):
            for key, _ in self._selector.select(min(LOOK_INTERVAL, max(0.0, self._last - time.monotonic()))):
                key.data()
            if time.monotonic() - looked >= LOOK_INTERVAL:
                looked = time.monotonic()
                with contextlib.suppress(KeyError):  # it is there, unless it could accept nobody
                    self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
                self._look_at_group()
        self._fail_all(CollectiveError("the group was destroyed", "closed"))
        for connection in [each.connection for each in self._senders.values()] + [each.connection for each in self._receivers.values()]:
            if connection is not None:
                connection.close()
        self._selector.close()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receive.recv(4096)
        while self._new:
            what, about = self._new[0]
            getattr(self, f"_on_{what}")(about)
            self._new.popleft()  # not before: what failed is among those that _run tells

    def _sender_to(self, rank: int) -> _Sender:
        sender = self._senders.get(rank)
        if sender is None:
            sender = self._senders[rank] = _Sender()
            threading.Thread(target=self._call, args=(rank,), daemon=True).start()
        return sender

    def _on_send(self, transfer: Transfer) -> None:
        if transfer.other in self._closed:
            transfer.end(self._closed[transfer.other])
            return
        sender = self._sender_to(transfer.other)
        sender.waiting.append(transfer)
        if sender.connection is not None and len(sender.waiting) == 1:
            self._begin_message(transfer.other, sender)

    def _on_receive(self, transfer: Transfer) -> None:
        for number, (source, tag, data) in enumerate(self._unexpected):
            if tag == transfer.tag and transfer.other in (source, ANYONE):
                del self._unexpected[number]
                self._deliver_kept(transfer, source, data)
                return
        if transfer.other in self._lost:
            transfer.end(self._lost[transfer.other])
            return
        self._posted.append(transfer)
        if transfer.other != ANYONE and transfer.other not in self._receivers and transfer.other not in self._closed:
            self._sender_to(transfer.other)  # which ends with that rank, also where it never sends anything
        for receiver in list(self._receivers.values()):
            if receiver.is_parked and transfer.other in (receiver.source, ANYONE):
                self._choose_target(receiver)

    def _on_forget(self, transfer: Transfer) -> None:
        transfer.end_late()
        if transfer in self._posted:
            self._posted.remove(transfer)
        for receiver in [each for each in self._receivers.values() if each.target is transfer]:
            self._refused.add(receiver.source)
            self._lose(receiver, "a message timed out when it had begun, so its connection was closed")
        for rank, sender in [(rank, each) for rank, each in self._senders.items() if transfer in each.waiting]:
            is_first = sender.connection is not None and transfer is sender.waiting[0]
            if is_first and (transfer.moved or len(sender.head) < _message.size):
                self._on_not_called((rank, "a message timed out when it had begun, so its connection was closed", False))
                self._closed[rank] = self._lost_peer(rank, "cannot be reached: a message to it timed out when it had begun")
                continue
            sender.waiting.remove(transfer)
            if is_first and sender.waiting:
                self._begin_message(rank, sender)

    def _on_end(self, last: float) -> None:
        self._last = last

    def _all_sent(self) -> bool:
        return not any(sender.waiting for sender in self._senders.values())

    def _on_called(self, about: tuple[int, socket.socket]) -> None:
        rank, connection = about
        sender = self._senders.get(rank)
        if sender is None:  # given up meanwhile
            connection.close()
            return
        connection.setblocking(False)
        sender.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._listen_to(rank, sender))
        if sender.waiting:
            self._begin_message(rank, sender)

    def _on_not_called(self, about: tuple[int, str, bool]) -> None:
        rank, reason, is_gone = about
        sender = self._senders.pop(rank, None)
        if sender is None:
            return
        if sender.connection is not None:
            self._unregister(sender.connection)
            sender.connection.close()
            sender.connection = None
        error = self._lost_peer(rank, f"cannot be reached: {reason}")
        for transfer in sender.waiting:
            transfer.end(error)
        sender.waiting.clear()
        if is_gone and rank not in self._receivers:  # otherwise its own connection says when it has ended
            self._gone[rank] = (time.monotonic() + LOOK_INTERVAL, error)

    def _on_accepted(self, about: tuple[int, socket.socket]) -> None:
        source, connection = about
        if source in self._receivers or source in self._refused:
            connection.close()
            return
        self._lost.pop(source, None)
        self._gone.pop(source, None)
        connection.setblocking(False)
        receiver = self._receivers[source] = _Receiver(source, connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(receiver))

    # --- sending

    def _call(self, rank: int) -> None:
        """In a thread of its own: the receiver may be long in coming."""
        address = self._addresses[rank]
        try:
            connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else _family_of(address[0]))
            try:
                connection.settimeout(self.timeout)
                self._connect(connection, address)
                if not isinstance(address, str):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if handshake.call(connection, GREETING, self._me, self._secret) is None:
                    raise OSError("what listens there does not know the group's secret")
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError) as error:
            self._post("not_called", (rank, str(error), not isinstance(error, socket.timeout)))
        else:
            self._post("called", (rank, connection))

    def _connect(self, connection: socket.socket, address: Any) -> None:
        end = time.monotonic() + self.timeout
        while True:
            try:
                return connection.connect(address)
            except BlockingIOError:  # so many call it at the same time
                if time.monotonic() > end or self._is_over:
                    raise
                time.sleep(LOOK_INTERVAL / 10)

    def _listen_to(self, rank: int, sender: _Sender) -> None:
        """Messages go one way on a connection: if it can be read, or written again, its other side has ended."""
        if sender.connection is None:
            return
        try:
            said = sender.connection.recv(1)
        except BlockingIOError:
            self._write(rank, sender)
            return
        except OSError as error:
            self._on_not_called((rank, str(error), True))
            return
        self._on_not_called((rank, "it has left the group or ended" if not said else "it answers (internal error)", True))

    def _begin_message(self, rank: int, sender: _Sender) -> None:
        first = sender.waiting[0]
        sender.head = _message.pack(first.tag, first.length)
        self._write(rank, sender)

    def _write(self, rank: int, sender: _Sender) -> None:
        connection = sender.connection
        assert connection is not None  # noqa: S101
        try:
            while sender.waiting:
                first = sender.waiting[0]
                sent = connection.sendmsg([sender.head, first.bytes[first.moved :]])
                of_head = min(sent, len(sender.head))
                sender.head = sender.head[of_head:]
                first.moved += sent - of_head
                if sender.head or first.moved < first.length:
                    if self._new:  # perhaps that this very message has timed out
                        break
                    continue
                sender.waiting.popleft()
                first.end()
                if sender.waiting:
                    sender.head = _message.pack(sender.waiting[0].tag, sender.waiting[0].length)
        except BlockingIOError:
            pass
        except OSError as error:
            self._on_not_called((rank, str(error), True))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if sender.waiting else 0)
        self._selector.modify(connection, events, lambda: self._listen_to(rank, sender))

    # --- receiving

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # too many open files, or who called has gone: at the next look again
            self._unregister(self._listener)
            return
        self._pending.append(connection)
        if len(self._pending) > MAX_PENDING + len(self._peers):
            with contextlib.suppress(OSError):
                self._pending.popleft().shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._examine, args=(connection,), daemon=True).start()

    def _examine(self, connection: socket.socket) -> None:
        """In a thread of its own: whoever calls may be slow, or a stranger, who is shown the door."""
        connection.settimeout(handshake.PROOF_TIMEOUT)
        try:
            greeting, number = HEAD.unpack(handshake.read(connection, HEAD.size))
            if greeting == GREETING and number < len(self._peers) and number not in self._refused:
                answer = handshake.Answer(self._secret, number, handshake.read(connection, handshake.CHALLENGE_BYTES))
                connection.sendall(answer.message)
                if answer.seal(handshake.read(connection, handshake.PROOF_BYTES)) is not None:
                    self._post("accepted", (number, connection))
                    return
        except (OSError, EOFError):
            pass
        finally:
            with contextlib.suppress(ValueError):
                self._pending.remove(connection)
        connection.close()

    def _read(self, receiver: _Receiver) -> None:
        if self._receivers.get(receiver.source) is not receiver:  # it was closed meanwhile
            return None
        try:
            while not receiver.is_parked:
                if receiver.length < 0:
                    part = receiver.connection.recv(_message.size - len(receiver.head))
                    if not part:
                        return self._lose(receiver, "it has left the group or ended")
                    receiver.head += part
                    if len(receiver.head) == _message.size:
                        receiver.tag, receiver.length = _message.unpack(receiver.head)
                        receiver.moved = 0
                        self._choose_target(receiver)
                elif receiver.moved < receiver.length:
                    target = receiver.target.bytes if receiver.target is not None else memoryview(receiver.kept or b"")
                    count = receiver.connection.recv_into(target[receiver.moved :])
                    if not count:
                        return self._lose(receiver, "its connection ended in the middle of a message")
                    receiver.moved += count
                if 0 <= receiver.length == receiver.moved and not receiver.is_parked:
                    self._finish_message(receiver)
                if self._new:  # perhaps that this very message has timed out
                    return None
        except BlockingIOError:
            return None
        except OSError as error:
            return self._lose(receiver, str(error))

    def _choose_target(self, receiver: _Receiver) -> None:
        """Who takes the message whose head has come; parks it where nobody waits for anything of its sender."""
        of_sender = [each for each in self._posted if each.other in (receiver.source, ANYONE)]
        target = next((each for each in of_sender if each.tag == receiver.tag), None)
        if target is not None:
            self._posted.remove(target)
            target.other = receiver.source
            if not target.fits(receiver.length):
                target.end(self._wrong_length(receiver.source, receiver.length, target))
                target, receiver.is_wanted = None, False
        elif not of_sender:
            if not receiver.is_parked:
                receiver.is_parked = True
                self._unregister(receiver.connection)
            return
        receiver.target = target
        if target is None:
            receiver.kept = bytearray(receiver.length)
        if receiver.is_parked:
            receiver.is_parked = False
            self._selector.register(receiver.connection, selectors.EVENT_READ, lambda: self._read(receiver))
            if receiver.length == 0:
                self._finish_message(receiver)

    def _finish_message(self, receiver: _Receiver) -> None:
        if receiver.target is not None:
            receiver.target.end()
        elif receiver.kept is not None and receiver.is_wanted:
            matching = (each for each in self._posted if each.tag == receiver.tag and each.other in (receiver.source, ANYONE))
            if (late := next(matching, None)) is not None:  # it was asked for while it was coming
                self._posted.remove(late)
                self._deliver_kept(late, receiver.source, receiver.kept)
            else:
                self._unexpected.append((receiver.source, receiver.tag, receiver.kept))
        receiver.head, receiver.length, receiver.target, receiver.kept = bytearray(), -1, None, None
        receiver.is_wanted = True

    def _deliver_kept(self, transfer: Transfer, source: int, data: bytearray) -> None:
        transfer.other = source
        if not transfer.fits(len(data)):
            transfer.end(self._wrong_length(source, len(data), transfer))
            return
        transfer.bytes[:] = data
        transfer.end()

    def _wrong_length(self, source: int, length: int, transfer: Transfer) -> CollectiveError:
        text = f"{self.describe(source)} sent {length} bytes with tag {transfer.tag} to rank {self._me}, which receives {transfer.length}"
        return CollectiveError(text, "mismatch", (self._peers[source].rank,))

    # --- failures

    def _lose(self, receiver: _Receiver, reason: str) -> None:
        if not receiver.is_parked:
            self._unregister(receiver.connection)
        receiver.connection.close()
        del self._receivers[receiver.source]
        self._learn_of_failures()
        error = self._lost_peer(receiver.source, f"sends no more: {reason}")
        if receiver.target is not None:
            receiver.target.end(error)
        self._fail_receives(receiver.source, error)

    def _lost_peer(self, rank: int, what: str) -> CollectiveError:
        return CollectiveError(f"{self.describe(rank)} {what}", "peer_lost", (self._peers[rank].rank,))

    def _fail_receives(self, source: int, error: CollectiveError) -> None:
        self._lost[source] = error
        for transfer in [each for each in self._posted if each.other == source]:
            self._posted.remove(transfer)
            transfer.end(error)

    def _look_at_group(self) -> None:
        if not self._posted and self._all_sent():
            return
        self._learn_of_failures()
        for rank, (when, error) in list(self._gone.items()):
            if time.monotonic() >= when:
                del self._gone[rank]
                self._fail_receives(rank, error)
        for transfer in self._posted:
            if 0 < self._stall_warning < time.monotonic() - transfer.began and not transfer.is_told:
                transfer.is_told = True
                whom = "any rank" if transfer.other == ANYONE else self.describe(transfer.other)
                text = f"has waited {self._stall_warning:g} s for a message (tag {transfer.tag}) from {whom}"
                print(f"collective_core: {self.describe(self._me)} {text}", file=sys.stderr, flush=True)

    def _learn_of_failures(self) -> None:
        """Of the engine, which knows whether a rank has died."""
        try:
            _native.check_peers(self._set)
        except CollectiveError as error:
            membership.note_failure(error)
            self._fail_all(error)

    def _fail_all(self, error: CollectiveError) -> None:
        waiting = [each for sender in self._senders.values() for each in sender.waiting]
        for transfer in [*self._posted, *waiting, *(each.target for each in self._receivers.values() if each.target)]:
            transfer.end(error)
        self._posted.clear()
        for receiver in [each for each in self._receivers.values() if each.target]:  # whose memory belongs to the program again
            self._unregister(receiver.connection)
            receiver.connection.close()
            del self._receivers[receiver.source]
        for sender in self._senders.values():
            sender.waiting.clear()
            if sender.connection is not None:  # on which a message may have begun
                self._unregister(sender.connection)
                sender.connection.close()
                sender.connection = None
        self._senders.clear()

    def _unregister(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)


def _listen(address: str, backlog: int) -> tuple[socket.socket, dict[str, Any]]:
    """A listener at this address of the host, or inside it where the address is empty, and how it is told."""
    if address:
        listener = socket.create_server((address, 0), family=_family_of(address), backlog=backlog)
        return listener, {"address": address, "port": listener.getsockname()[1], "name": ""}
    listener = socket.socket(socket.AF_UNIX)
    name = f"collective_core-{secrets.token_hex(16)}"
    listener.bind("\0" + name)
    listener.listen(backlog)
    return listener, {"address": "", "port": 0, "name": name}


def _family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
