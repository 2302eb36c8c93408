"""Check of connections from one host to the others: does a free port get through, does ssh?

Python 3.6+, standard library only. It runs on all hosts at the same time, once, and ends by itself: every host opens one port on
its own address for seconds, and meanwhile tries the ports of the others. Options are JSON on standard input::

    {"key": hex, "me": name, "address": …, "ports": [n, …], "seconds": s, "ssh": bool,
     "peers": [{"name": …, "address": …, "ports": [n, …], "user": …, "ssh_port": n}, …]}

The document that it prints::

    {"port": n or null, "problem": null or why it could not listen,
     "tcp": {name: {port: error}, …}, "ssh": {name: null or the error, …}}  (no ports where one was reached)

Both sides of a connection prove that they know the key, which is made for one run; everybody else is cut off.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from .proof import call, caller_of, listen

BEGIN, END = "===PROVISION-REACH-BEGIN===", "===END==="
CONNECT_S = 2.0
RETRY_S = 1.0  # between calls to a peer that may not have begun
LOGINS = 4  # at once; sshd refuses some when ten wait (MaxStartups)
LOGIN_S = 10


class Listener:
    """Takes the calls of the other hosts. ``called``: peer → whether it has called."""

    def __init__(self, order):
        self.order, self.socket, self.problem = order, None, None
        self.called = {peer["name"]: threading.Event() for peer in order["peers"]}
        try:
            self.socket = listen(order)
            threading.Thread(target=self.serve, daemon=True).start()
        except OSError as error:
            self.problem = str(error)

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
                caller = caller_of(self.order, link, self.called)
                if caller:
                    self.called[caller].set()
        except OSError:
            return  # the caller sees it and reports it


def try_ports(order, peer, deadline, called):
    """Port → error of each, after trying them until the deadline; nothing once one was reached.

    A peer that does not listen yet is called again when it has called, and once in a while, should its calls be lost.
    """
    errors = {}
    while True:
        for port in peer["ports"]:
            try:
                call(order, peer, port, CONNECT_S).close()
                return {}
            except socket.timeout:
                errors[port] = "timed out"
            except OSError as error:
                errors[port] = error.strerror or str(error)
            if time.monotonic() > deadline and len(errors) == len(peer["ports"]):
                return errors
        if called.is_set():
            time.sleep(0.2)
        else:
            called.wait(RETRY_S)


def try_ssh(peer):
    """None when a login works (without a user: when sshd's port is reached), else the error. As mpirun, if we set that up, else as ssh."""
    if peer["user"] is None:
        try:
            return socket.create_connection((peer["address"], peer["ssh_port"]), CONNECT_S).close()
        except OSError as error:
            return str(error)
    config = os.path.expanduser("~/.ssh/provision_config")
    if os.path.exists(config):
        login = ["ssh", "-F", config]
    else:
        login = ["ssh", "-o", "StrictHostKeyChecking=yes", "-p", str(peer["ssh_port"]), "-l", peer["user"]]
    login += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ControlPath=none", "--", peer["address"], "true"]
    try:
        done = subprocess.run(login, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=LOGIN_S)
    except subprocess.TimeoutExpired:
        return "ssh: connect to host %s port %s: Connection timed out" % (peer["address"], peer["ssh_port"])
    except OSError as error:
        return "ssh cannot be started: %s" % error
    return None if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[-600:] or "exit code %d" % done.returncode


def check(order):
    deadline = time.monotonic() + order["seconds"]
    listener = Listener(order)
    peers = order["peers"]
    with ThreadPoolExecutor(len(peers)) as callers, ThreadPoolExecutor(LOGINS) as logins:
        tcp = [callers.submit(try_ports, order, peer, deadline, listener.called[peer["name"]]) for peer in peers]
        ssh = [logins.submit(try_ssh, peer) for peer in peers] if order["ssh"] else []
        names = [peer["name"] for peer in peers]
        found = {"tcp": {name: errors.result() for name, errors in zip(names, tcp)}}
        found["ssh"] = {name: error.result() for name, error in zip(names, ssh)}
    for called in listener.called.values():  # others may have begun later
        called.wait(max(0.0, deadline - time.monotonic()))
    return dict(found, port=listener.port, problem=listener.problem)


if __name__ == "__main__":
    print("\n%s\n%s\n%s" % (BEGIN, json.dumps(check(json.load(sys.stdin))), END))
