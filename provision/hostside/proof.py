"""Connections of hosts that prove to each other that they know the key of one run. Python 3.6+, standard library only.

An ``order`` has the ``key`` (hex), and of this host its name (``me``), ``address``, and ``ports`` to listen on; a peer has ``name`` and
``address``.
"""

import hashlib
import hmac
import json
import socket

PROOF = 32  # bytes


def proof(key, what, sender, receiver):
    return hmac.new(bytes.fromhex(key), json.dumps([what, sender, receiver]).encode(), hashlib.sha256).digest()


def receive(link, count=PROOF):
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise OSError("closed")
        data += more
    return data


def listen(order):
    """A socket on the first of the order's ports that is free; raises OSError where none is."""
    problem = None
    for port in order["ports"]:
        listening = socket.socket(socket.AF_INET6 if ":" in order["address"] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.bind((order["address"], port))
            listening.listen(64)
            return listening
        except OSError as error:
            listening.close()
            problem = error
    raise problem


def caller_of(order, link, names):
    """The one of these peers that calls, after it was answered; None for everybody else."""
    said = receive(link)
    caller = next((name for name in names if said == proof(order["key"], "call", name, order["me"])), None)
    if caller is not None:
        link.sendall(proof(order["key"], "answer", order["me"], caller))
    return caller


def call(order, peer, port, seconds):
    """A connection to the peer; raises OSError where that does not answer."""
    link = socket.create_connection((peer["address"], port), timeout=seconds, source_address=(order["address"], 0))
    try:
        link.sendall(proof(order["key"], "call", order["me"], peer["name"]))
        if receive(link) != proof(order["key"], "answer", peer["name"], order["me"]):
            raise OSError("another program answers")
        return link
    except OSError:
        link.close()
        raise
