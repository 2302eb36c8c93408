"""A server's side: takes updates, and answers when a worker may read (clocks.py)."""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import time
from collections import deque
from functools import partial
from typing import Any, Callable, NamedTuple, Protocol

import numpy as np

from collective_core.common.elastic_states import HostsUpdatedInterrupt
from collective_core.errors import CollectiveError
from collective_core.extensions.ps import group, messages
from collective_core.extensions.ps.clocks import Clocks
from collective_core.extensions.ps.group import Group
from collective_core.extensions.ps.messages import Array
from collective_core.runtime import membership
from collective_core.runtime.point_to_point import LAST_WORDS, Transfer

#: Seconds between looks at whether somebody has waited for too long.
LOOK_INTERVAL = 1.0


class Contribution(NamedTuple):
    """One worker's part of an update: what is given to the optimizer besides, and the gradient's arrays."""

    options: dict[str, Any]
    arrays: list[Array]


class Store(Protocol):
    """The arrays that a server holds. ``updates``: how often any has been updated, where those of one request count as one."""

    index: int
    updates: int

    def create(self, name: str, described: dict[str, Any], initial: list[Array]) -> None:
        """Makes an array, or gives one that there is other options."""

    def described(self, name: str) -> dict[str, Any]:
        """As it was made."""

    def has(self, name: str) -> bool:
        """Whether it was made."""

    def update(self, name: str, contributions: list[Contribution]) -> None:
        """Applies the mean of the gradients."""

    def read(self, name: str, arrays: list[Array]) -> Array:
        """The values, of a table those of the rows that ``arrays`` names."""

    def pack(self) -> Array:
        """All of it as a message, of a multiple of eight bytes."""


class _Waiting(NamedTuple):
    """A request that cannot be answered yet."""

    worker: int
    since: float
    header: dict[str, Any]
    arrays: list[Array]


class Server:
    """``after_update``: called when the store has been updated, before anybody is answered.

    ``unpack``: of what a store's ``pack`` has given; with it, each server has a copy of its store on the next one, which makes the same
    updates, and answers when the copy has made all that the answer knows of.
    """

    def __init__(
        self, joined: Group, store: Store, after_update: Callable[[], None], unpack: Callable[[Array], Store] | None = None
    ) -> None:
        self._group, self._store, self._after_update = joined, store, after_update
        self._active = set(range(joined.workers))
        self._clocks: dict[str, Clocks] = {}
        #: Of synchronous arrays: the contributions of rounds that are not complete, by number and worker.
        self._rounds: dict[str, dict[int, dict[int, Contribution]]] = {}
        self._applied: dict[str, int] = {}
        self._waiting: list[_Waiting] = []
        self._unpack = unpack
        self._copy: Store | None = None  # of the server before
        self._next, self._previous = (joined.rank_of((joined.index + step) % joined.servers) for step in (1, -1))
        #: Updates that were sent to the copy, and those that it has made.
        self._sent, self._copied = 0, 0.0
        self._changes: list[tuple[dict[str, Any], list[Array]]] = []  # by the request that is being dealt with
        #: Answers, with the updates that the copy must have made before.
        self._held: deque[tuple[int, int, Array]] = deque()
        self._listened: set[int] = set()
        self._looked = 0.0  # when at those who wait
        self._told: set[float] = set()  # of whom it was said, by when they began to wait
        self._came: queue.SimpleQueue[tuple[int, Transfer]] = queue.SimpleQueue()

    def run(self) -> None:
        """Serves until all workers have ended. Raises the engine's error for one that is lost, after the others were told."""
        self._listened = {*self._active, *((self._next, self._previous) if self._unpack else ())}
        for rank in self._listened:
            self._listen_to(rank)
        try:
            self._send_copy({"kind": "copy"}, [self._store.pack().view(np.int64)] if self._unpack else [])
            while self._active:
                self._take_one()
            if self._unpack:
                for rank in {self._next, self._previous} & self._listened:
                    self._group.messages.send(messages.pack({"kind": "ended"}), rank, group.REQUEST)
        except HostsUpdatedInterrupt:
            self._tell_all({"changed": True})
            raise
        except Exception as failure:
            error = failure if isinstance(failure, CollectiveError) else self._own_failure(failure)
            self._tell_all({"error": str(error), "kind": error.kind, "ranks": error.ranks})
            membership.note_failure(error)
            raise

    def _own_failure(self, failure: Exception) -> CollectiveError:
        rank = self._group.rank
        text = f"parameter server {self._group.name(rank)} failed: {type(failure).__name__}: {failure}"
        return CollectiveError(text, "internal", [rank])

    def _listen_to(self, worker: int) -> None:
        transfer = self._group.messages.receive(None, worker, group.REQUEST, timeout=float("inf"))
        transfer.call_when_over(partial(self._came.put, (worker, transfer)))

    def _take_one(self) -> None:
        if time.monotonic() >= self._looked + LOOK_INTERVAL:
            self._look_at_waiting()
        try:
            worker, transfer = self._came.get(timeout=LOOK_INTERVAL)
        except queue.Empty:
            return
        if worker not in self._listened:  # it has ended, and so has its connection
            return
        transfer.wait(0.0)
        header, arrays = messages.unpack(transfer.memory)
        self._listen_to(worker)
        before = self._store.updates
        getattr(self, f"_on_{header['kind']}")(worker, header, arrays)
        if self._store.updates > before:
            self._store.updates = before + 1
            self._after_update()
        if self._changes:  # those of a request together: a copy has all of them or none
            arrays = [array for _, arrays in self._changes for array in arrays]
            self._send_copy({"kind": "change", "changes": [change for change, _ in self._changes], "updates": self._store.updates}, arrays)
            self._changes.clear()
        self._answer_ready()

    def _on_hello(self, *_: Any) -> None:
        """It has connected."""

    def _on_sync(self, worker: int, header: dict[str, Any], arrays: list[Array]) -> None:
        """It wants to know when all that it has sent is dealt with."""
        self._wait(worker, {**header, "pull": []}, arrays)

    def _on_done(self, worker: int, *_: Any) -> None:
        self._active.remove(worker)
        self._listened.remove(worker)
        for name in self._rounds:
            self._apply_rounds(name)

    def _on_leaving(self, *_: Any) -> None:
        raise HostsUpdatedInterrupt

    def _on_create(self, worker: int, header: dict[str, Any], arrays: list[Array]) -> None:
        name, wanted = header["name"], header["array"]
        if self._store.has(name):  # by another worker, or before this server began: then training goes on with the options of now
            is_new = name not in self._clocks and _without_numbers(wanted) == _without_numbers(self._store.described(name))
            arrays = []
        else:
            is_new = bool(arrays) or not header["initial"]
        if is_new:
            self._store.create(name, wanted, arrays)
            self._note_change({"name": name, "array": wanted, "counts": [len(arrays)]}, arrays)
        if name not in self._clocks and self._store.has(name):
            self._clocks[name] = Clocks(range(self._group.workers), self._active, self._store.described(name)["staleness"])
            if self._clocks[name].staleness == 0:
                self._rounds[name], self._applied[name] = {}, 0
        self._wait(worker, header, [])

    def _on_step(self, worker: int, header: dict[str, Any], arrays: list[Array]) -> None:
        rest = iter(arrays)
        for push in header["push"]:
            name = push["name"]
            contribution = Contribution(push["options"], [next(rest) for _ in range(push["count"])])
            number = self._clocks[name].tick(worker)
            if name in self._rounds:
                self._rounds[name].setdefault(number, {})[worker] = contribution
                self._apply_rounds(name)
            else:
                self._update(name, [contribution])
        if header["pull"]:
            self._wait(worker, header, list(rest))

    def _apply_rounds(self, name: str) -> None:
        while self._applied[name] < self._clocks[name].complete_rounds():
            self._applied[name] += 1
            contributions = self._rounds[name].pop(self._applied[name])
            self._update(name, [contributions[worker] for worker in sorted(contributions)])

    def _update(self, name: str, contributions: list[Contribution]) -> None:
        self._store.update(name, contributions)
        change = {"name": name, "options": [each.options for each in contributions], "counts": [len(each.arrays) for each in contributions]}
        self._note_change(change, [array for each in contributions for array in each.arrays])

    # --- copies

    def _note_change(self, change: dict[str, Any], arrays: list[Array]) -> None:
        if self._unpack:
            self._changes.append((change, arrays))

    def _send_copy(self, header: dict[str, Any], arrays: list[Array]) -> None:
        """To the next server, if it has a copy."""
        if self._unpack and self._next in self._listened:
            self._sent += 1
            self._group.messages.send(messages.pack(header, arrays), self._next, group.REQUEST)

    def _on_copy(self, server: int, _: Any, arrays: list[Array]) -> None:
        assert self._unpack is not None  # noqa: S101 - servers have compared that
        self._copy = self._unpack(arrays[0].view(np.uint8))
        group.kept[self._copy.index] = self._copy
        self._note_copied(server)

    def _on_change(self, server: int, header: dict[str, Any], arrays: list[Array]) -> None:
        assert self._copy is not None  # noqa: S101 - it came first
        rest = iter(arrays)
        for change in header["changes"]:
            parts = [[next(rest) for _ in range(count)] for count in change["counts"]]
            if "array" in change:
                self._copy.create(change["name"], change["array"], parts[0])
            else:
                self._copy.update(change["name"], [Contribution(*each) for each in zip(change["options"], parts)])
        self._copy.updates = header["updates"]
        self._note_copied(server)

    def _note_copied(self, server: int) -> None:
        self._group.messages.send(messages.pack({"kind": "copied"}), server, group.REQUEST)

    def _on_copied(self, *_: Any) -> None:
        self._copied += 1

    def _on_ended(self, server: int, *_: Any) -> None:
        """All workers have told another server that they have ended, and will tell this one."""
        self._listened.remove(server)
        if server == self._next:
            self._copied = math.inf

    # --- answers

    def _wait(self, worker: int, header: dict[str, Any], arrays: list[Array]) -> None:
        self._waiting.append(_Waiting(worker, time.monotonic(), header, arrays))

    def _answer_ready(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if self._obstacles(each):
                self._waiting.append(each)
                continue
            if each.header["kind"] == "create":
                self._reply(each.worker, self._compared(each))
                continue
            rest = iter(each.arrays)
            pulls = each.header["pull"]
            values = [self._store.read(pull["name"], [next(rest) for _ in range(pull["count"])]) for pull in pulls]
            self._held.append((self._sent, each.worker, messages.pack({}, values)))
        while self._held and self._held[0][0] <= self._copied:
            _, worker, message = self._held.popleft()
            self._group.messages.send(message, worker, group.REPLY)

    def _compared(self, waiting: _Waiting) -> dict[str, Any]:
        """The answer to a worker that makes an array as others do, or not as they do."""
        name, wanted = waiting.header["name"], waiting.header["array"]
        if not self._store.has(name):
            return {"error": f"{self._group.name(0)} has ended without making {name}", "kind": "mismatch", "ranks": [0]}
        known = self._store.described(name)
        if wanted == known:
            return {}
        different = [
            f"{key} {wanted.get(key)}, not {known.get(key)}" for key in sorted({*wanted, *known}) if wanted.get(key) != known.get(key)
        ]
        text = f"{self._group.name(waiting.worker)} makes {name} in another way than it was made: {'; '.join(different)}"
        return {"error": text, "kind": "mismatch", "ranks": [waiting.worker]}

    def _obstacles(self, waiting: _Waiting) -> list[int]:
        """The workers for which it waits."""
        if waiting.header["kind"] == "create":
            return [] if self._store.has(waiting.header["name"]) or 0 not in self._active else [0]
        return [other for pull in waiting.header["pull"] for other in self._clocks[pull["name"]].waits_for(waiting.worker)]

    def _look_at_waiting(self) -> None:
        """Refuses who has waited for too long, and says once who has waited for long."""
        self._looked = time.monotonic()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            waited, slow = self._looked - each.since, sorted(set(self._obstacles(each)))
            who = ", ".join(self._group.name(worker) for worker in slow)
            if waited > self._group.timeout:
                text = f"{self._group.name(each.worker)} has waited {self._group.timeout:g} s for an update of {who} (COLLECTIVE_TIMEOUT)"
                self._reply(each.worker, {"error": text, "kind": "timeout", "ranks": slow})
                continue
            self._waiting.append(each)
            if each.since not in self._told and 0 < self._group.stall_warning < waited:
                self._told.add(each.since)
                text = f"{self._group.name(each.worker)} has waited {self._group.stall_warning:g} s for an update of {who}"
                print(f"collective_core: {text}", file=sys.stderr, flush=True)
        self._told &= {each.since for each in self._waiting}

    def _reply(self, worker: int, header: dict[str, Any], arrays: list[Array] | None = None) -> Transfer:
        return self._group.messages.send(messages.pack(header, arrays or []), worker, group.REPLY)

    def _tell_all(self, header: dict[str, Any]) -> None:
        end = time.monotonic() + LAST_WORDS
        for reply in [self._reply(worker, header) for worker in self._active]:
            with contextlib.suppress(CollectiveError):  # those who are lost
                reply.wait(max(0.0, end - time.monotonic()))


def _without_numbers(described: dict[str, Any]) -> dict[str, Any]:
    """What cannot change while an array is trained: learning rates may, and not what state its optimizer has."""
    return {**described, "options": {name: value for name, value in described["options"].items() if isinstance(value, bool)}}
