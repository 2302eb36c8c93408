"""The far end of an ssh connection: ``python -m collective_core.launch.agent`` starts the ranks of one host.

It says who it is (``hello``), reads the jobs of its ranks, then sends on what happens to them. When its input ends, the controller
is gone or wants an end: it ends the ranks and itself. Nothing listens, and nothing secret is on a command line.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading

from collective_core.launch import frames, this_host
from collective_core.launch.frames import NO_RANK, Frame, Job
from collective_core.launch.processes import Processes


def main() -> None:
    inward, outward = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints here must not get between the frames
    frames.write(outward, Frame("hello", NO_RANK, json.dumps(this_host.facts()).encode()))
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
