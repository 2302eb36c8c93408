"""Ranks as tasks of a Spark job in barrier mode: all at once or not at all, one rank per task, as HorovodRunner does.

Each task starts its rank as a process of its own (processes.py), so that the executor's Python stays as it was, and returns what
happened to it as frames. A rank that fails does not fail its task: Spark would run the whole stage again.
"""

from __future__ import annotations

import json
import queue
import secrets
import time
import uuid
from typing import Any, Iterable, Iterator, Mapping

from collective_core.errors import CollectiveError
from collective_core.launch import this_host
from collective_core.launch.frames import Frame, Job
from collective_core.launch.outcomes import Outcomes, show
from collective_core.launch.processes import Processes

#: Bytes of output of one rank that come back, the last ones.
MOST_OUTPUT = 4 << 20


def _task(call: bytes, environment: Mapping[str, str], secret: str, start_timeout: float, context: Any) -> Iterator[tuple[Any, ...]]:
    """One rank, in an executor. ``context``: of the barrier stage."""
    rank = context.partitionId()
    infos = context.getTaskInfos()
    # Spark itself refuses executors with another Python.
    ports = context.allGather(str(this_host.free_port()))
    address = infos[0].address.rpartition(":")[0] or infos[0].address
    settings = {
        "path": None,
        "environment": {
            "COLLECTIVE_RANK": str(rank),
            "COLLECTIVE_SIZE": str(len(infos)),
            "COLLECTIVE_STORE": f"{address}:{ports[0]}",
            "COLLECTIVE_SECRET": secret,
            "COLLECTIVE_START_TIMEOUT": str(start_timeout),
        },
    }
    events: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    processes = Processes({rank: Job(json.dumps(settings).encode(), call)}, events, environment)
    output: list[Frame] = []
    kept = 0
    try:
        while True:
            frame = events.get()
            if frame.kind not in ("out", "err"):
                yield tuple(frame)
            else:
                output.append(frame)
                kept += len(frame.body)
                while kept > MOST_OUTPUT:
                    kept -= len(output.pop(0).body)
            if frame.kind == "exit":
                break
        yield from (tuple(line) for line in output)
    finally:
        processes.stop()


def _wait_for_slots(context: Any, np: int | None, seconds: float) -> int:
    """The number of ranks, once Spark has executors for so many tasks at once. It would itself wait for ten minutes."""
    scheduler = context._jsc.sc()
    end = time.monotonic() + seconds
    while True:
        slots = int(scheduler.maxNumConcurrentTasks(scheduler.resourceProfileManager().defaultResourceProfile()))
        if slots >= (np or 1):
            return np or slots
        if time.monotonic() > end:
            text = (
                f"Spark runs {slots} tasks at once and {np or 1} ranks need as many: give it more cores or executors, or pass a smaller np"
            )
            raise CollectiveError(text, "invalid")
        time.sleep(0.2)


def run(spark: Any, np: int | None, call: bytes, environment: Mapping[str, str], start_timeout: float, prefix: bool) -> list[Any]:
    """Runs a packed call on ``np`` tasks (default: as many as Spark runs at once). ``spark``: a SparkSession or SparkContext.

    Raises :class:`RankFailedError` for the rank that failed first, and :class:`CollectiveError` when Spark cannot run so many
    tasks at once.
    """
    context = getattr(spark, "sparkContext", spark)
    size = _wait_for_slots(context, np, start_timeout)
    secret = secrets.token_hex(32)
    group = f"collective_core-{uuid.uuid4().hex[:8]}"

    def task(_: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        from pyspark import BarrierTaskContext

        return _task(call, environment, secret, start_timeout, BarrierTaskContext.get())

    context.setJobGroup(group, f"collective_core: {size} ranks", interruptOnCancel=True)
    try:
        found = context.parallelize(range(size), size).barrier().mapPartitions(task).collect()
    except KeyboardInterrupt:
        context.cancelJobGroup(group)
        raise
    outcomes = Outcomes(dict.fromkeys(range(size), "an executor"))
    for kind, rank, body in found:
        frame = Frame(kind, rank, bytes(body))
        if frame.kind in ("out", "err"):
            show(frame, prefix)
        outcomes.note(frame)
    return outcomes.results()
