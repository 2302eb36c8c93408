"""Ranks as tasks of a Spark job in barrier mode: all at once or not at all, one rank per task, as HorovodRunner does.

Each task starts its rank as a process of its own (processes.py), so that the executor's Python stays as it was, and returns what
happened to it as frames. A rank that fails does not fail its task: Spark would run the whole stage again. That it does when an executor
is lost: the function is then called anew on all ranks, up to spark.stage.maxConsecutiveAttempts times. The function and the job's
secret travel as Spark's own closures do: encrypted where Spark is told to (spark.network.crypto.enabled).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time
import uuid
from typing import Any, Iterable, Iterator, Mapping

from collective_core.errors import CollectiveError
from collective_core.launch.frames import Frame
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.outcomes import Outcomes, show
from collective_core.launch.processes import Processes, rank_settings
from collective_core.runtime import horovod_variables, network, torch_variables

#: Bytes of output of one rank that come back, the last ones.
MAX_OUTPUT = 4 << 20
#: Characters of Spark's own error that ours quotes: what follows are stacks of Java.
MAX_ERROR = 600
#: What setJobGroup sets, put back afterwards: the user's own jobs may have a group.
GROUP_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


def _task(call: bytes, environment: Mapping[str, str], secret: str, start_timeout: float, context: Any) -> Iterator[tuple[Any, ...]]:
    """One rank, in an executor. ``context``: of the barrier stage."""
    rank = context.partitionId()
    infos = context.getTaskInfos()
    # Spark itself refuses executors with another Python.
    ports = context.allGather(" ".join(map(str, network.free_ports(2))))
    port, master_port = ports[0].split()
    hosts = [info.address.rpartition(":")[0] or info.address for info in infos]
    variables = {
        **horovod_variables.rank_variables(rank, hosts),
        **torch_variables.rank_variables(rank, hosts, (hosts[0], int(master_port)), environment),
        "COLLECTIVE_RANK": str(rank),
        "COLLECTIVE_SIZE": str(len(infos)),
        "COLLECTIVE_STORE": f"{hosts[0]}:{port}",
        "COLLECTIVE_SECRET": secret,
        "COLLECTIVE_START_TIMEOUT": str(start_timeout),
    }
    mailbox = Mailbox()
    # The worker's search path has the files that the user gave to Spark.
    settings = rank_settings(variables, sys.path, hosts.count(hosts[rank]), _address_of(hosts[rank]) if len(set(hosts)) > 1 else "")
    processes = Processes({rank: settings}, call, mailbox, environment)
    output: list[Frame] = []
    kept = 0
    try:
        while True:
            frame = mailbox.get()
            if frame is None:
                continue
            if frame.kind not in ("out", "err"):
                yield frame.kind, frame.rank, bytes(frame.body)
            else:
                output.append(frame)
                kept += len(frame.body)
                while kept > MAX_OUTPUT:
                    kept -= len(output.pop(0).body)
            if frame.kind == "exit":
                break
        yield from (tuple(line) for line in output)
    finally:
        mailbox.close()
        processes.kill()


def _address_of(host: str) -> str:
    """Of this host, at which the others reach it; empty where its name leads to itself only, as on Debian. Spark on YARN has names."""
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None)[0][4][0])
        return "" if address.startswith("127.") or address == "::1" else address
    return ""


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
    tasks at once, or gives up.
    """
    context = getattr(spark, "sparkContext", spark)
    size = _wait_for_slots(context, np, start_timeout)
    secret = secrets.token_hex(32)
    group = f"collective_core-{uuid.uuid4().hex[:8]}"

    def task(_: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        from pyspark import BarrierTaskContext

        return _task(call, environment, secret, start_timeout, BarrierTaskContext.get())

    before = {name: context.getLocalProperty(name) for name in GROUP_PROPERTIES}
    context.setJobGroup(group, f"collective_core: {size} ranks", interruptOnCancel=True)
    try:
        found = context.parallelize(range(size), size).barrier().mapPartitions(task).collect()
    except KeyboardInterrupt:
        context.cancelJobGroup(group)
        raise
    except Exception as error:
        raise CollectiveError(f"Spark ended the job: {str(error)[:MAX_ERROR]}", "peer_lost") from error
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)
    outcomes = Outcomes(dict.fromkeys(range(size), "an executor"))
    for kind, rank, body in found:
        frame = Frame(kind, rank, bytes(body))
        if frame.kind in ("out", "err"):
            show(frame, prefix)
        outcomes.note(frame)
    return outcomes.results()
