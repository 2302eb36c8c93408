"""Looks from one host at the others: does a connection to a free port get through, does ssh, and how fast is the way?

Python 3.6+, standard library only. It runs on all hosts at the same time, once, and ends by itself: every host opens one port on
its own address for seconds, and tries the ports of the others meanwhile. Options are JSON on standard input::

    {"key": hex, "me": name, "address": …, "ports": [n, …], "seconds": s, "flow_seconds": s (0: no bandwidth), "ssh": bool,
     "peers": [{"name": …, "address": …, "ports": [n, …], "user": …, "ssh_port": n}, …]}

Both sides of a connection prove that they know the key, which is made for one run: the one that called answers a challenge, the one
that was called answers back. Who cannot is cut off; nothing that it sent is looked at. ``peers`` are in the order of rounds in which
hosts pair up, so that everyone is called by few at a time and measurements seldom wait for each other.
"""

import contextlib
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

BEGIN, END = "===PROVISION-REACH-BEGIN===", "===END==="
CONNECT_S = 2.0
PROOF, WHO = 32, 16  # bytes of a proof, and of a challenge or of what stands for a caller's name
CALL, FLOW = b"c", b"f"  # what a caller wants
READY = b"r"  # a caller's turn has come, too
AGAIN_S = 1.0  # between calls to a peer that may not have begun
AT_ONCE = 4  # logins; sshd refuses some when ten wait (MaxStartups)
LOGIN_S = 10
QUICK = "curve25519-sha256"  # a key exchange
FLOW_S = 0.6  # how long a bandwidth measurement sends
BLOCK = b"\0" * (1 << 18)


def proof(key, *parts):
    return hmac.new(key, b"|".join(parts), hashlib.sha256).digest()


def who(name):
    return hashlib.sha256(name.encode()).digest()[:WHO]


def receive(link, count):
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise OSError("closed")
        data += more
    return data


class Listener:
    """Takes the others' calls until it is told to stop."""

    def __init__(self, order):
        self.key = bytes.fromhex(order["key"])
        self.me = order["me"].encode()
        self.timeout = order["flow_seconds"]
        self.one_flow = threading.Lock()  # in or out: what fills a slow way out delays the receipts of what comes in
        self.last = FLOW if order["flow_seconds"] else CALL  # what each of the others calls for in the end
        self.awaited = {who(peer["name"]) for peer in order["peers"]}
        self.up = {who(peer["name"]): threading.Event() for peer in order["peers"]}  # who has called has begun to listen, too
        self.socket, self.problem = None, None
        for port in order["ports"]:
            family = socket.AF_INET6 if ":" in order["address"] else socket.AF_INET
            candidate = socket.socket(family, socket.SOCK_STREAM)
            try:
                candidate.bind((order["address"], port))
                candidate.listen(64)
            except OSError as error:
                self.problem = str(error)
                candidate.close()
                continue
            self.socket, self.problem = candidate, None
            threading.Thread(target=self.serve, daemon=True).start()
            break

    @property
    def port(self):
        return self.socket.getsockname()[1] if self.socket else None

    def serve(self):
        while True:
            try:
                link, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(link,), daemon=True).start()

    def answer(self, link):
        try:
            with link:
                link.settimeout(CONNECT_S * 2)
                challenge = os.urandom(WHO)
                link.sendall(challenge)
                hello = receive(link, 1 + WHO)
                if not hmac.compare_digest(receive(link, PROOF), proof(self.key, challenge, hello, self.me)) or hello[1:] not in self.up:
                    return
                self.up[hello[1:]].set()
                if hello[:1] == FLOW:
                    self.take_flow(link, challenge)
                else:
                    link.sendall(proof(self.key, challenge, b"answer", self.me))
                if hello[:1] == self.last:
                    self.awaited.discard(hello[1:])
        except OSError:
            return  # the caller sees it and says so

    def wait(self, deadline):
        """Until everyone has called, or the deadline; who has called by then has time for its measurement."""
        while time.monotonic() < deadline + self.timeout:
            if all(time.monotonic() > deadline and not self.up[name].is_set() for name in self.awaited.copy()):
                return
            time.sleep(0.05)

    def take_flow(self, link, challenge):
        with self.one_flow:
            link.sendall(proof(self.key, challenge, b"answer", self.me))
            link.settimeout(self.timeout)
            receive(link, len(READY))
            link.settimeout(LOGIN_S)
            count, began = 0, None
            while True:
                data = link.recv(len(BLOCK))
                if not data:
                    break
                began = began or time.monotonic()
                count += len(data)
            spent = max(time.monotonic() - (began or 0), 1e-6)
            link.sendall(b"%d %f" % (count, spent))


def call(order, peer, port, mode):
    """A proven connection to a peer; OSError where there is none."""
    key = bytes.fromhex(order["key"])
    link = socket.create_connection((peer["address"], port), timeout=CONNECT_S, source_address=(order["address"], 0))
    try:
        if mode == FLOW:
            link.settimeout(order["flow_seconds"])  # its turn may take a while to come
        challenge = receive(link, WHO)
        name, hello = peer["name"].encode(), mode + who(order["me"])
        link.sendall(hello + proof(key, challenge, hello, name))
        if not hmac.compare_digest(receive(link, PROOF), proof(key, challenge, b"answer", name)):
            raise OSError("somebody else answers")
        return link
    except OSError:
        link.close()
        raise


def try_port(order, peer, deadline, up):
    """``{"port": n}`` of the peer's port that answered, or ``{"errors": {port: text}}`` after trying until the deadline.

    A peer that does not listen yet is called again when it has called (``up``), and once in a while, should its calls be lost.
    """
    said = {}
    while True:
        for port in peer["ports"]:
            try:
                call(order, peer, port, CALL).close()
                return {"port": port}
            except socket.timeout:
                said[port] = "timed out"
            except OSError as error:
                said[port] = error.strerror or str(error)
            if time.monotonic() > deadline and len(said) == len(peer["ports"]):
                break
        if time.monotonic() > deadline:
            return {"errors": {str(port): text for port, text in said.items()}}
        if up.is_set():
            time.sleep(0.2)
        else:
            up.wait(AGAIN_S)


def measure(order, peer, port, one_flow):
    """Megabits a second to the peer; None if it failed.

    Both hosts measure nothing else meanwhile. The one whose name comes first is taken first, so nobody waits in a circle.
    """
    try:
        with contextlib.ExitStack() as taken:
            first = order["me"] < peer["name"]
            if first:
                taken.enter_context(one_flow)
            link = taken.enter_context(call(order, peer, port, FLOW))
            if not first:
                taken.enter_context(one_flow)
            link.settimeout(LOGIN_S)
            link.sendall(READY)
            until = time.monotonic() + FLOW_S
            while time.monotonic() < until:
                link.sendall(BLOCK)
            link.shutdown(socket.SHUT_WR)
            count, spent = link.recv(64).split()
            return round(int(count) * 8 / float(spent) / 1e6, 1)
    except (OSError, ValueError):
        return None


def ssh_command():
    """How mpirun logs in, where an installation of ours wrote it; else as ssh does by itself, to hosts whose keys are known."""
    config = os.path.expanduser("~/.ssh/provision_config")
    return ["ssh", "-F", config] if os.path.exists(config) else ["ssh", "-o", "StrictHostKeyChecking=yes"]


def quick_exchange(command, address):
    """The option that has ssh try the cheapest key exchange first, of those that it would take anyway.

    ssh 9 begins with one that computes four times as long as all the rest of a login; these logins carry nothing that is secret.
    """
    try:
        done = subprocess.run(command + ["-G", address], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=LOGIN_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    for line in done.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        names = value.split(",")
        if key == "kexalgorithms" and QUICK in names:
            return ["-o", "KexAlgorithms=" + ",".join([QUICK] + [name for name in names if name != QUICK])]
    return []


def try_ssh(command, peer):
    """None when a login works, else what ssh said."""
    login = list(command)
    if "-F" not in command:
        login += ["-p", str(peer["ssh_port"]), "-l", peer["user"]]
    login += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ControlPath=none", peer["address"], "true"]
    try:
        done = subprocess.run(login, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=LOGIN_S)
    except subprocess.TimeoutExpired:
        return "ssh: connect to host %s port %s: Connection timed out" % (peer["address"], peer["ssh_port"])
    except OSError as error:
        return "ssh cannot be started: %s" % error
    return None if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[-600:] or "exit code %d" % done.returncode


def look(order):
    deadline = time.monotonic() + order["seconds"]
    listener = Listener(order)
    peers = order["peers"]
    with ThreadPoolExecutor(len(peers)) as callers, ThreadPoolExecutor(AT_ONCE) as logins:
        ports = [callers.submit(try_port, order, peer, deadline, listener.up[who(peer["name"])]) for peer in peers]
        said = []
        if order["ssh"]:
            command = ssh_command()
            command += quick_exchange(command, peers[0]["address"])
            said = [logins.submit(try_ssh, command, peer) for peer in peers]
        found = {peer["name"]: {"tcp": port.result()} for peer, port in zip(peers, ports)}
        for peer, answer in zip(peers, said):
            found[peer["name"]]["ssh"] = answer.result()
    if order["flow_seconds"]:
        for peer in peers:
            port = found[peer["name"]]["tcp"].get("port")
            in_time = time.monotonic() < deadline + order["flow_seconds"]
            found[peer["name"]]["mbit"] = measure(order, peer, port, listener.one_flow) if port and in_time else None
    listener.wait(deadline)
    return {"port": listener.port, "problem": listener.problem, "peers": found}


if __name__ == "__main__":
    print("\n%s\n%s\n%s" % (BEGIN, json.dumps(look(json.load(sys.stdin))), END))
