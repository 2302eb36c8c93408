"""The far end of an ssh connection: ``python -m collective_core.launch.agent`` starts the ranks of one host.

It says who it is (``hello``), reads the jobs of its ranks, then sends on what happens to them. When its input ends, the controller
is gone or wants an end: it ends the ranks and itself. Nothing listens, and nothing secret is on a command line.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from typing import Any

from collective_core import __version__
from collective_core.launch import frames
from collective_core.launch.frames import NO_RANK, Frame, Job
from collective_core.launch.processes import Processes


def hello() -> dict[str, Any]:
    """What the controller must know of this host: ``address`` is the one at which ssh reached it."""
    address = os.environ.get("SSH_CONNECTION", "").split()
    family = socket.AF_INET6 if len(address) > 2 and ":" in address[2] else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {
        "version": __version__,
        "python": "{}.{}".format(*sys.version_info[:2]),
        "address": address[2] if len(address) > 2 else "",
        "controller": address[0] if address else "",
        "port": port,
    }


def main() -> None:
    inward, outward = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints here must not get between the frames
    frames.write(outward, Frame("hello", NO_RANK, json.dumps(hello()).encode()))
    settings = frames.read(inward)
    if settings is None:
        return
    wanted = json.loads(settings.body)
    jobs: dict[int, Job] = {}
    while len(jobs) < wanted["ranks"]:
        of_rank, call = frames.read(inward), frames.read(inward)
        if of_rank is None or call is None:
            return
        jobs[call.rank] = Job(of_rank.body, call.body)
    events: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    try:
        processes = Processes(jobs, events, wanted["environment"], wanted["directory"])
    except OSError as error:
        frames.write(outward, Frame("refused", NO_RANK, f"{error.filename or 'the ranks'}: {error.strerror}".encode()))
        return

    def listen() -> None:
        while frames.read(inward) is not None:
            pass
        processes.stop()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    left = set(jobs)
    try:
        while left:
            event = events.get()
            frames.write(outward, event)
            if event.kind == "exit":
                left.discard(event.rank)
    except BrokenPipeError:
        processes.stop()
    os._exit(0)  # the listening thread waits in a read that nothing ends


if __name__ == "__main__":
    main()
