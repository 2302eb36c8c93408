"""Starts the engine while strangers knock. argv[1]: strangers, flood, wrong-secret, or what somebody between rank 1 and rank 0 does:
replay, of what rank 1 has said before, or dropped: hang up on it, at once and after its proof.

Drives the layer below init() with a launcher of its own: the ranks meet through files in argv[2], so that the test can slip
between the opening of the listeners and the connecting.
"""

import os
import pathlib
import socket
import sys
import threading
import time

import common

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from collective_core.errors import CollectiveError
from eavesdropper import Eavesdropper, play

from collective_core import _native

mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])


def meet(start):
    """Opens the listeners for the job's so many-th start; the ports and sockets of all."""
    port, name = _native.open_listeners("127.0.0.1")
    (folder / f"{start}.{common.RANK}.part").write_text(f"{port} {name}")
    (folder / f"{start}.{common.RANK}.part").rename(folder / f"{start}.{common.RANK}")
    paths = [folder / f"{start}.{rank}" for rank in range(common.SIZE)]
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    return port, [path.read_text().split() for path in paths]


port, places = meet(0)
secret = b"s" * 32
if mode == "wrong-secret" and common.RANK == 1:
    secret = b"x" * 32


def peers_at(places):
    return [
        _native.PeerInfo(r, os.getpid() if r == common.RANK else 0, f"host{r * common.HOSTS // common.SIZE}", "box", "127.0.0.1", int(p), n)
        for r, (p, n) in enumerate(places)
    ]


held, answers = [], []


def knock():
    """Silence, garbage, a hello with a false proof, on both doors of rank 0."""
    hello = b"collcore" + (6).to_bytes(4, "little") + (1).to_bytes(4, "little") + (0).to_bytes(4, "little") + bytes(4) + b"\x02" + bytes(39)
    for payload in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10, os.urandom(5000), hello):
        for door in (("127.0.0.1", int(places[0][0])), "\0" + places[0][1]):
            stranger = socket.socket(socket.AF_UNIX if isinstance(door, str) else socket.AF_INET)
            stranger.connect(door)
            stranger.settimeout(5)
            held.append(stranger)
            if payload:
                stranger.sendall(payload)
            if payload is hello:
                reply = stranger.recv(64, socket.MSG_WAITALL)
                assert len(reply) == 64
                stranger.sendall(os.urandom(32))
                try:
                    answers.append(stranger.recv(1))
                except ConnectionResetError:
                    answers.append(b"")
    common.tell("strangers have knocked")


if mode == "flood" and common.RANK == 0:
    time.sleep(1)  # rank 1 calls first, and then more strangers than are held at once
    for _ in range(400):
        held.append(socket.socket(socket.AF_INET if common.HOSTS > 1 else socket.AF_UNIX))
        held[-1].connect(("127.0.0.1", int(places[0][0])) if common.HOSTS > 1 else "\0" + places[0][1])
if mode == "strangers" and common.RANK == 0:
    thread = threading.Thread(target=knock)
    thread.start()
if mode == "strangers" and common.RANK == 1:
    common.wait_to_be_told("strangers have knocked", 15.0)
middle = None
if mode == "dropped" and common.RANK == 1:
    middle = Eavesdropper(int(places[0][0]), drops=(0, 64))
    places[0][0] = str(middle.port)
if mode == "replay":
    # A first start, in which somebody stands between rank 1 and rank 0; then a second one, with the same secret.
    middle = Eavesdropper(int(places[0][0])) if common.RANK == 1 else None
    if middle:
        places[0][0] = str(middle.port)
    _native.connect(common.RANK, peers_at(places), secret, 20.0, 20.0)
    _native.run(_native.operation(_native.BARRIER, "first", "uint8", (), 0))
    _native.close()
    port, places = meet(1)
    answers = [len(play(int(places[0][0]), said)) for said in middle.said] if middle else []
try:
    _native.connect(common.RANK, peers_at(places), secret, 20.0, 4.0 if mode == "wrong-secret" else 20.0)
    if common.RANK == 0 and mode == "strangers":
        thread.join()
        assert answers == [b"", b""], answers
    _native.run(_native.operation(_native.BARRIER, "b", "uint8", (), 0))
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(int(fields[1].split(":")[1], 16))
    calls = len(middle.said) if middle else 0
    common.report(connected=True, still_listening=port in listening, calls=calls, answers=[a for a in answers if mode == "replay"])
    if mode == "dropped" and common.RANK == 1:
        time.sleep(0.6)  # rank 0 says that it waits: what it says is unread when rank 1 shuts down, which must cost nobody an operation
    _native.run(_native.operation(_native.BARRIER, "e", "uint8", (), 0))
except CollectiveError as error:
    common.report(connected=False, error=str(error), kind=error.kind, ranks=list(error.ranks))
_native.close()
if middle:
    middle.finish()
