"""The rendezvous server, of which the workers of an elastic job ask their ranks: it listens, keeps the membership, and answers.

A worker says ``ready`` with the ports at which it would meet the others as rank 0, the engine's and torch.distributed's, and the ranks
that it has lost. It is answered with ``rank`` (and size, where the ranks meet) once there is a generation, or with ``leave``. Whoever
works is told ``change`` when the generation should end at its next commit, and ``lost`` when one of its ranks is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from typing import Any, Callable

from collective_core.elastic import control_channel
from collective_core.elastic.control_channel import ControlChannel
from collective_core.elastic.generations import ElasticMembership, RankAssignment
from collective_core.runtime import horovod_variables, torch_variables

#: Callers that have not proven themselves yet; beyond that the oldest is dropped.
MAX_PENDING = 256
#: Calls that may wait to be taken. Beyond that the system lets a caller try again a second later, a worker of ours among strangers, too.
MAX_CALLS = 4096


class RendezvousServer:
    """``membership``: the driver tells it who is started, and gone, under :meth:`holding`. ``only_here``: nobody calls from another host.

    ``wake`` is called, from any thread, when :meth:`settle` has something to do.
    """

    def __init__(self, membership: ElasticMembership, secret: str, wake: Callable[[], None], only_here: bool = False) -> None:
        self._membership, self._secret, self._wake = membership, secret, wake
        self._lock = threading.Lock()
        self._channels: dict[int, ControlChannel] = {}
        self._ports: dict[int, tuple[int, int]] = {}
        self._told_to_change = 0  # the generation
        self._token = secrets.token_hex(8)
        self._pending: list[socket.socket] = []
        self._closed = False
        both = socket.has_dualstack_ipv6() and not only_here
        address = ("127.0.0.1" if only_here else "", 0)
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=MAX_CALLS, dualstack_ipv6=both)
        threading.Thread(target=self._welcome, daemon=True).start()

    @property
    def port(self) -> int:
        """At which it listens."""
        return int(self._listener.getsockname()[1])

    def holding(self) -> threading.Lock:
        """For ``with``: the membership is changed by nobody else meanwhile."""
        return self._lock

    def settle(self) -> tuple[list[RankAssignment], list[int]]:
        """Does what it is time for; returns the ranks of a new generation, if there is one, and workers that are overdue."""
        with self._lock:
            now = time.monotonic()
            for worker in self._membership.dismissed():
                self._say(worker, kind="leave")
            assigned = self._membership.form(now)
            store, master = self._meeting_of([each.worker for each in assigned])
            hosts = [self._membership.workers[each.worker] for each in assigned]
            for each in assigned:
                among = {
                    **horovod_variables.rank_variables(each.rank, hosts),
                    **torch_variables.rank_variables(each.rank, hosts, master),
                }
                told = {"rank": each.rank, "size": each.size, "store": store, "among": among}
                self._say(each.worker, kind="rank", **told, generation=self._membership.generation)
            if self._membership.should_change(now) and self._told_to_change != self._membership.generation:
                self._told_to_change = self._membership.generation
                for worker in self._membership.working:
                    self._say(worker, kind="change")
            return assigned, self._membership.overdue(now)

    def note_loss(self, worker: int, rank: int) -> None:
        """Has the others give up what they do with a worker that is gone: of a paused host they do not learn it. Under :meth:`holding`."""
        for each in self._membership.working:
            if each != worker:
                self._say(each, kind="lost", rank=rank)

    def close(self) -> None:
        """Ends all channels: whoever still waits for a rank learns that there is none."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for callers
        self._listener.close()
        with self._lock:
            for each in self._channels.values():
                each.close()
            for pending in self._pending:
                _drop(pending)

    def _say(self, worker: int, **message: Any) -> None:
        # A worker that is gone is noticed by its process's end.
        with contextlib.suppress(OSError, KeyError):
            self._channels[worker].send(**message)

    def _meeting_of(self, workers: list[int]) -> tuple[str, tuple[str, int]]:
        """Where the ranks of a generation meet, for the engine and for torch.distributed.

        At rank 0, at the address at which this server sees it; in one host by name, and on loopback.
        """
        if not workers:
            return "", ("", 0)
        hosts, first = self._membership.workers, workers[0]
        port, master_port = self._ports.get(first, (0, 0))
        if len({hosts.get(worker) for worker in workers}) == 1:
            return f"local:{self._token}.{self._membership.generation}", ("127.0.0.1", master_port)
        address = _plain(self._channels[first].addresses[1])
        if address in ("127.0.0.1", "::1"):
            # It is on this machine: the others reach it at the address at which they reach us.
            own = [_plain(self._channels[worker].addresses[0]) for worker in workers if worker in self._channels]
            address = next((each for each in own if each not in ("127.0.0.1", "::1")), address)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}", (address, master_port)

    def _welcome(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # too many files, or a caller that has hung up again
                continue
            with self._lock:
                if len(self._pending) >= MAX_PENDING:
                    _drop(self._pending.pop(0))
                self._pending.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        proven = control_channel.accept(connection, self._secret.encode())
        with self._lock:
            if connection in self._pending:
                self._pending.remove(connection)
            if proven is None or proven.worker in self._channels or proven.worker not in self._membership.workers:
                _drop(connection)
                return
            self._channels[proven.worker] = proven
        while True:
            said = proven.receive()
            if said is None:
                break
            with self._lock:
                self._ports[proven.worker] = int(said["port"]), int(said["master_port"])
                self._membership.come(proven.worker, time.monotonic(), tuple(said["lost"]))
            self._wake()
        with self._lock:
            self._channels.pop(proven.worker, None)
            self._membership.lose(proven.worker, time.monotonic())
        proven.close()
        self._wake()


def _drop(connection: socket.socket) -> None:
    """Closes it also for the thread that waits for its next word."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _plain(address: str) -> str:
    """An IPv4 address as such, also where a socket of IPv6 shows it."""
    return address[len("::ffff:") :] if address.startswith("::ffff:") else address
