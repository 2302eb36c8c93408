"""``--negotiation``: what it costs the ranks to agree on an operation, by their number.

A barrier is nothing but this agreement, so barriers are what is measured. Every rank is a forked process with a host of its own as
far as the engine can tell (TCP over loopback), which is the dearest case. Steps, messages and bytes are counted by the engine. The
time on the wall is that of all ranks on this machine's few cores, one after the other; the processor's time per rank is what a rank
of a real cluster spends, beside the network's latency once per step.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import statistics
import time
from multiprocessing.connection import Connection, wait
from typing import Any, Callable

from collective_core.errors import CollectiveError
from collective_core.runtime import cores

import collective_core as cc
from collective_core import _native

from . import report
from .options import Options

#: Exchanges of all ranks together in a measurement; at least so many per rank.
EXCHANGES, MIN_EXCHANGES = 8192, 40
WARM_UP = 10
#: Seconds: hundreds of processes on a few cores take their time to meet.
START_SECONDS = 240
RESULT_SECONDS = 600


def run(wanted: Options) -> dict[str, Any]:
    """The document of ``--negotiation``. Raises :class:`CollectiveError` when a rank failed."""
    return {
        "schema": report.SCHEMA,
        "cores": cores.share(1),
        "rounds": wanted.rounds,
        "negotiation": [_of_world(size, wanted.rounds) for size in wanted.negotiation],
        "missing": {},
    }


def _of_world(size: int, repetitions: int) -> dict[str, Any]:
    return _summary(size, of_forked_ranks(size, _measure, size, repetitions))


def of_forked_ranks(size: int, measure: Callable[..., dict[str, Any]], *arguments: Any) -> list[dict[str, Any]]:
    """What ``measure(*arguments)`` returns in each of ``size`` forked ranks, which it makes ranks with ``cc.init()``; in no order.

    Raises :class:`CollectiveError` when a rank failed.
    """
    job = f"local:negotiation-{secrets.token_hex(8)}"
    forked = multiprocessing.get_context("fork")
    readers, ranks = [], []
    for rank in range(size):
        reader, writer = forked.Pipe(duplex=False)
        process = forked.Process(target=_be_rank, args=(rank, size, job, writer, measure, arguments))
        process.start()
        writer.close()
        readers.append(reader)
        ranks.append(process)
    try:
        return _collect(readers)
    finally:
        for process in ranks:
            process.terminate()
            process.join()


def _collect(readers: list[Connection]) -> list[dict[str, Any]]:
    deadline, results, awaited = time.monotonic() + RESULT_SECONDS, [], list(readers)
    while awaited:
        ready = wait(awaited, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise CollectiveError(f"{len(awaited)} of {len(readers)} ranks have not finished after {RESULT_SECONDS} s", "timeout")
        for reader in [reader for reader in awaited if reader in ready]:
            awaited.remove(reader)
            try:
                result: dict[str, Any] = reader.recv()
            except EOFError:
                raise CollectiveError("a rank ended without a result", "peer_lost") from None
            if "error" in result:
                raise CollectiveError(result["error"], "internal")
            results.append(result)
    return results


def _be_rank(
    rank: int, size: int, job: str, writer: Connection, measure: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        COLLECTIVE_RANK=str(rank),
        COLLECTIVE_SIZE=str(size),
        COLLECTIVE_STORE=job,
        COLLECTIVE_HOST_ID=f"host{rank}",
        COLLECTIVE_ADDRESS="127.0.0.1",
        COLLECTIVE_START_TIMEOUT=str(START_SECONDS),
    )
    try:
        writer.send(measure(*arguments))
        cc.shutdown()
    except CollectiveError as error:
        writer.send({"error": str(error)})


def _measure(size: int, repetitions: int) -> dict[str, Any]:
    begin = time.perf_counter()
    cc.init()
    started = time.perf_counter() - begin
    exchanges = max(MIN_EXCHANGES, EXCHANGES // size)
    for _ in range(WARM_UP):
        cc.barrier("warm up")
    before = _native.traffic()
    walls, busy = [], time.process_time()
    for _ in range(repetitions):
        begin = time.perf_counter()
        for _ in range(exchanges):
            cc.barrier("negotiation")
        walls.append((time.perf_counter() - begin) / exchanges)
    busy = (time.process_time() - busy) / (repetitions * exchanges)
    spent = [after - earlier for after, earlier in zip(_native.traffic(), before)]
    return {"start": started, "wall": statistics.median(walls), "busy": busy, "spent": spent}


def _summary(size: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    def each(number: int) -> float:
        # The median: a rank that waits for half a second tells all others, which belongs to waiting and not to agreeing.
        return float(statistics.median(r["spent"][number] / r["spent"][0] for r in results))

    return {
        "np": size,
        "steps": round(each(1), 2),
        "messages": round(each(2), 2),
        "bytes": round(each(3), 1),
        "cpu_us": round(statistics.mean(r["busy"] for r in results) * 1e6, 1),
        "wall_us": round(max(r["wall"] for r in results) * 1e6, 1),
        "start_s": round(max(r["start"] for r in results), 2),
    }
