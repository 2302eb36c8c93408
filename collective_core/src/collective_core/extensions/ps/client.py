"""A worker's side: what it asks of servers, all of them at once."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from collective_core import job
from collective_core.common import elastic_states
from collective_core.common.elastic_states import HostsUpdatedInterrupt
from collective_core.errors import CollectiveError, InvalidUseError, PeerLostError
from collective_core.extensions.ps import group, messages
from collective_core.extensions.ps.group import Group
from collective_core.extensions.ps.messages import Array
from collective_core.runtime import membership
from collective_core.runtime.point_to_point import Transfer

#: Seconds between looks at whether a wait is to end.
LOOK_INTERVAL = 1.0
#: Bytes that may be under way to a server without an answer; with more, a push waits until the server has dealt with all of them.
MAX_UNDER_WAY = 64 << 20


class Request(NamedTuple):
    """Request to one server. ``header``: with its ``kind``."""

    header: Mapping[str, Any]
    arrays: Sequence[Array] = ()


class Push(NamedTuple):
    """An update of an array. ``options``: for the optimizer. ``parts``: what each server that holds some of it is sent."""

    name: str
    options: Mapping[str, Any]
    parts: Mapping[int, Sequence[Array]]


class Pull(NamedTuple):
    """``parts``: what each server is told of what is wanted of it, which it answers with one array."""

    name: str
    parts: Mapping[int, Sequence[Array]]


class Client:
    """``ask`` and ``tell`` may be called by several threads, one after the other."""

    def __init__(self, joined: Group) -> None:
        self.group = joined
        self._lock = threading.Lock()
        self._is_closed = False
        self._under_way = dict.fromkeys(range(joined.servers), 0)  # bytes, by server
        # Connects, as no thread can be started any more where the last word is said.
        self.tell({server: Request({"kind": "hello"}) for server in range(joined.servers)})
        atexit.register(_end)  # before the messages' own, which was registered before

    def tell(self, requests: Mapping[int, Request]) -> None:
        """By server. Requests that are not answered."""
        self._check_usable()
        self._send(_packed(requests))
        full = [server for server in requests if self._under_way[server] > MAX_UNDER_WAY]
        if full:
            self.ask({server: Request({"kind": "sync"}) for server in full})

    def ask(self, requests: Mapping[int, Request]) -> dict[int, tuple[dict[str, Any], list[Array]]]:
        """The answer of every server that was asked. Raises what a server answers as an error, and the engine's for one that is lost."""
        with self._lock, _noting_failures():
            self._check_usable()
            packed = _packed(requests)  # before anything is waited for
            waiting = {server: self.group.messages.receive(None, self.group.rank_of(server), group.REPLY) for server in sorted(requests)}
            self._send(packed)
            answers = {server: self._answer(transfer) for server, transfer in waiting.items()}
            self._under_way.update(dict.fromkeys(answers, 0))
            return answers

    def close(self, in_order: bool) -> None:
        """``in_order``: the worker needs the servers no more. Otherwise they learn of its end as the engine does."""
        try:
            if in_order:
                everyone = range(self.group.servers)
                self.ask({server: Request({"kind": "sync"}) for server in everyone})
                self.tell({server: Request({"kind": "done"}) for server in everyone})
        finally:
            self._is_closed = True

    def _check_usable(self) -> None:
        job.refuse_forked()
        if self._is_closed:
            text = "hvd.ps.close() or shutdown() has closed what this array, table or optimizer was made with: make it again"
            raise InvalidUseError(text, "invalid")
        failure = membership.failure()
        if failure is not None:  # an answer to what was asked before may still come
            ranks = failure.ranks if isinstance(failure, CollectiveError) else ()
            raise PeerLostError(f"parameter servers cannot be used after an earlier failure: {failure}", "closed", ranks)

    def _send(self, packed: Mapping[int, Array]) -> None:
        for server, message in packed.items():
            self.group.messages.send(message, self.group.rank_of(server), group.REQUEST)
            self._under_way[server] += message.nbytes

    def create(self, name: str, described: Mapping[str, Any], parts: Mapping[int, Sequence[Array]], has_initial: bool) -> None:
        """Makes an array on servers, where another worker has not yet; ``parts``: initial values, if this worker gives them.

        Raises :class:`CollectiveError` (kind ``mismatch``) where others have made another one by this name.
        """
        header = {"kind": "create", "name": name, "array": described, "initial": has_initial}
        self.ask({server: Request(header, arrays) for server, arrays in parts.items()})

    def exchange(self, pushes: Sequence[Push], pulls: Sequence[Pull]) -> list[dict[int, Array]]:
        """Sends updates, then waits for what is pulled: by server. All in one message to each server."""
        headers: dict[int, dict[str, Any]] = {}
        arrays: dict[int, list[Array]] = {}
        for push in pushes:
            for server, sent in push.parts.items():
                told = {"name": push.name, "count": len(sent), "options": push.options}
                headers.setdefault(server, _step())["push"].append(told)
                arrays.setdefault(server, []).extend(sent)
        for pull in pulls:
            for server, sent in pull.parts.items():
                headers.setdefault(server, _step())["pull"].append({"name": pull.name, "count": len(sent)})
                arrays.setdefault(server, []).extend(sent)
        requests = {server: Request(header, arrays[server]) for server, header in headers.items()}
        self.tell({server: request for server, request in requests.items() if not request.header["pull"]})
        answers = self.ask({server: request for server, request in requests.items() if request.header["pull"]})
        rest = {server: iter(values) for server, (_, values) in answers.items()}
        return [{server: next(rest[server]) for server in pull.parts} for pull in pulls]

    def _answer(self, transfer: Transfer) -> tuple[dict[str, Any], list[Array]]:
        while not transfer.wait(LOOK_INTERVAL):
            pass
        header, arrays = messages.unpack(transfer.memory)
        if header.get("changed"):
            raise HostsUpdatedInterrupt
        if "error" in header:
            raise CollectiveError(header["error"], header["kind"], header["ranks"])
        return header, arrays


@contextlib.contextmanager
def _noting_failures() -> Iterator[None]:
    """A rank that was lost ends the job as it does in an operation of the engine."""
    try:
        yield
    except CollectiveError as error:
        membership.note_failure(error)
        raise


def _packed(requests: Mapping[int, Request]) -> dict[int, Array]:
    return {server: messages.pack(dict(request.header), request.arrays) for server, request in requests.items()}


def _step() -> dict[str, Any]:
    return {"kind": "step", "push": [], "pull": []}


_client: Client | None = None


def client() -> Client:
    """This worker's. The first call is collective over all ranks, of which servers call ``serve()``.

    Raises :class:`CollectiveError` (kind ``invalid``) on a server and in a job without any.
    """
    global _client
    if _client is None:
        if group.is_server():
            raise CollectiveError("this rank is a parameter server: it calls hvd.ps.serve() and nothing else of hvd.ps", "invalid")
        _client = Client(group.join())
    return _client


def _take_leave(in_order: bool) -> None:
    global _client
    if _client is None:
        return
    left, _client = _client, None
    atexit.unregister(_end)
    left.close(in_order and membership.is_healthy())


def _end() -> None:
    group.leave_at_end(in_order=not hasattr(sys, "last_value"))


def _before_change() -> None:
    """The ranks of an elastic job are to change: servers learn of it from the first worker that does."""
    if membership.is_healthy() and _client is not None:
        _client.tell({server: Request({"kind": "leaving"}) for server in range(_client.group.servers)})


group.on_leaving.append(_take_leave)
os.register_at_fork(after_in_child=lambda: atexit.unregister(_end))  # the servers are its parent's
elastic_states.before_rejoin.append(_before_change)
