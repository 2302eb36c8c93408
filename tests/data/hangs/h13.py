"""Data-parallel linear regression without a framework: NumPy, and a server on rank 0 over sockets."""
import asyncio
import os
import pickle
import socket
import struct
import time

import numpy as np

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500")) + 7
fetched = asyncio.Event()


def send(s, value):
    data = pickle.dumps(value)
    s.sendall(struct.pack("!I", len(data)) + data)


def receive(s):
    n = struct.unpack("!I", s.recv(4, socket.MSG_WAITALL))[0]
    return pickle.loads(s.recv(n, socket.MSG_WAITALL))


def connect():
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            time.sleep(0.2)


listener = socket.create_server(("", port)) if rank == 0 else None
peers = [listener.accept()[0] for _ in range(size - 1)] if listener else [connect()]
w, rng = np.zeros(4), np.random.default_rng(rank)
for step in range(60):
    if rank == size - 1 and step == 15:  # wait for the next shard; nobody fetches the last one
        asyncio.run(fetched.wait())  # HANGS HERE
    x = rng.normal(size=(16, 4))
    g = x.T @ (x @ (w - 1)) / 16
    if rank == 0:
        g = (g + sum(receive(p) for p in peers)) / size
        [send(p, g) for p in peers]
    else:
        send(peers[0], g)
        g = receive(peers[0])
    w -= 0.1 * g
    time.sleep(0.15)
    print(f"rank {rank} step {step} w {w.round(3)}", flush=True)
