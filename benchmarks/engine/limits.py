"""What the machine itself can do: the bandwidth of its memory, and of its network in both directions at once.

An allreduce of N bytes on each of P ranks of one host reads every input and writes every output once, so it takes at least
2 * P * N / B at a memory bandwidth B. Between H hosts at least 2 (H-1)/H * N bytes cross every link in each direction.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from typing import Any

import numpy as np
from collective_core.runtime import membership

import collective_core as cc

#: Larger than any cache, together with its copy.
COPIED_BYTES = 128 << 20
#: Per step and direction: long enough for TCP to reach its speed.
SENT_BYTES = 128 << 20
BLOCK_BYTES = 1 << 20
CONNECT_SECONDS = 30.0


def bus_limit_of_memory(bandwidth: float, ranks: int) -> float:
    """Bus bandwidth of an allreduce that takes 2 * P * N / B: B (P-1) / P**2, in the unit of ``bandwidth``."""
    return bandwidth * (ranks - 1) / ranks**2


def bus_limit_of_network(each_way: float, ranks: int, hosts: int) -> float:
    """Bus bandwidth of an allreduce that takes 2 (H-1)/H * N / each_way, in the unit of ``each_way``."""
    return each_way * ((ranks - 1) / ranks) / ((hosts - 1) / hosts)


class Memory:
    """A copy from memory to memory that all ranks make at once."""

    what = "memory, read and written by all ranks of a host at once"

    def __init__(self) -> None:
        self._source = np.ones(COPIED_BYTES, dtype=np.uint8)
        self._target = np.zeros(COPIED_BYTES, dtype=np.uint8)
        self._size = cc.size()

    def step(self) -> None:
        np.copyto(self._target, self._source)

    def figures(self, seconds: float) -> dict[str, float]:
        """GB/s from the seconds of a step: the bandwidth, and the bus bandwidth that no allreduce can exceed."""
        bandwidth = 2 * COPIED_BYTES * self._size / seconds / 1e9
        return {"memory_gbs": bandwidth, "limit_gbs": bus_limit_of_memory(bandwidth, self._size)}


class Link:
    """Plain TCP from every host's first rank to the next host's, all at once: what iperf3 measures both ways at once."""

    what = "network, both ways at once"

    def __init__(self) -> None:
        member = membership.current()
        self._size = member.size
        hosts = list(dict.fromkeys(peer.host_id for peer in member.peers))
        self._hosts = len(hosts)
        self._active = member.local_rank == 0
        address = member.peers[member.rank].address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            # The word keeps strangers out of the measurement; it travels through the engine's own authenticated connections.
            places = _gather({"port": listener.getsockname()[1], "word": secrets.token_hex(16)})
            if not self._active:
                return
            after = (hosts.index(member.peers[member.rank].host_id) + 1) % len(hosts)
            following = next(peer for peer in member.peers if peer.host_id == hosts[after])
            self._outgoing = socket.create_connection((following.address, places[following.rank]["port"]), CONNECT_SECONDS)
            self._outgoing.sendall(places[following.rank]["word"].encode())
            listener.settimeout(CONNECT_SECONDS)
            self._incoming = _first_who_knows(listener, places[member.rank]["word"].encode())
        self._block = bytes(BLOCK_BYTES)
        self._received = bytearray(BLOCK_BYTES)

    def step(self) -> None:
        """Sends and receives SENT_BYTES at the same time."""
        if not self._active:
            return
        sender = threading.Thread(target=self._send)
        sender.start()
        left = SENT_BYTES
        while left:
            got = self._incoming.recv_into(self._received, min(left, BLOCK_BYTES))
            if not got:
                raise ConnectionError("the other host closed the connection of the network measurement")
            left -= got
        sender.join()

    def _send(self) -> None:
        for _ in range(SENT_BYTES // BLOCK_BYTES):
            self._outgoing.sendall(self._block)

    def figures(self, seconds: float) -> dict[str, float]:
        """GB/s from the seconds of a step: each way, and the bus bandwidth that no allreduce can exceed."""
        each_way = SENT_BYTES / seconds / 1e9
        return {"network_gbs_each_way": each_way, "limit_gbs": bus_limit_of_network(each_way, self._size, self._hosts)}


def _first_who_knows(listener: socket.socket, word: bytes) -> socket.socket:
    while True:
        caller, _ = listener.accept()
        caller.settimeout(CONNECT_SECONDS)
        if caller.recv(len(word), socket.MSG_WAITALL) == word:
            return caller
        caller.close()


def _gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
    lines = cc.allgather(np.frombuffer(json.dumps(mine).encode() + b"\n", dtype=np.uint8))
    return [json.loads(line) for line in lines.tobytes().decode().splitlines()]


def of_this_job() -> Memory | Link:
    """What bounds an allreduce of all ranks: memory on one host, else the network."""
    hosts = {peer.host_id for peer in membership.current().peers}
    return Link() if len(hosts) > 1 else Memory()
