"""The far end of an ssh connection: starts the ranks of one host (remote.py is the near end).

It says who it is (``hello``), reads what its ranks get, then sends on what happens to them. When its input ends, or is silent for too
long, the controller is gone or wants an end: it ends the ranks and itself. Nothing listens, and nothing secret is on a command line.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time

from collective_core.errors import CollectiveError
from collective_core.launch import frames, this_host
from collective_core.launch.frames import NO_RANK, Frame
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.processes import Processes

#: Before the first frame: a shell's start files may have printed something.
MAGIC = b"\0collective_core agent\0"
#: Seconds without a sign of the controller, which sends one every few seconds: its machine or the network is gone.
SILENCE = 60.0
PATIENCE = 2.0


def main() -> None:
    inward, outward = os.fdopen(0, "rb", buffering=0, closefd=False), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints here must not get between the frames
    outward.write(MAGIC)
    frames.write(outward, Frame("hello", NO_RANK, json.dumps(this_host.facts()).encode()))
    plan, call = frames.read(inward), frames.read(inward)
    if plan is None or call is None:
        return
    wanted = json.loads(plan.body)
    settings = {int(rank): text.encode() for rank, text in wanted["ranks"].items()}
    mailbox = Mailbox()
    try:
        processes = Processes(settings, call.body, mailbox, wanted["environment"], wanted["directory"], program=wanted["program"])
    except CollectiveError as error:
        frames.write(outward, Frame("refused", NO_RANK, str(error).encode()))
        return

    ending = threading.Event()

    def end() -> None:
        ending.set()
        processes.ask_to_end()
        processes.wait(time.monotonic() + PATIENCE)
        processes.kill()
        os._exit(1)

    def listen() -> None:
        while select.select([0], [], [], SILENCE)[0] and frames.read(inward) is not None:
            pass
        end()

    threading.Thread(target=listen, daemon=True).start()
    left = set(settings)
    try:
        while left:
            event = mailbox.get()
            if event is None:
                continue
            frames.write(outward, event)
            if event.kind == "exit":
                left.discard(event.rank)
    except OSError:
        end()
    sys.stderr.flush()
    os._exit(1 if ending.is_set() else 0)  # the listening thread waits in a read that nothing ends
