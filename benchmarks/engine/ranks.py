"""What every rank does; rank 0 prints."""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

import numpy as np
from collective_core.runtime import membership

import collective_core as cc

from . import engines, limits, measure, options, report
from .options import ELEMENT_BYTES, Options, UsageError


def main(wanted: Options) -> int:
    """Measures what was asked for. Raises :class:`UsageError` when --np and the ranks that mpirun started disagree."""
    measure.keep_freed_memory()
    if not wanted.train:
        os.environ.setdefault("COLLECTIVE_ADOPT_TENSORS", "1")  # for the side of that name: NumPy's arrays, which others use, stay
    cc.init()
    if wanted.ranks is not None and wanted.ranks != cc.size():
        raise UsageError(f"--np {wanted.ranks}, but the launcher started {cc.size()} ranks; leave --np away under mpirun")
    if wanted.train in options.TABLES:
        from . import ctr

        document = ctr.run(wanted)
    elif wanted.train:
        from . import training

        document = training.run(wanted)
    elif wanted.overhead:
        from . import overhead

        document = overhead.run(wanted)
    else:
        document = collectives(wanted)
    if cc.rank() == 0:
        report.show(document, wanted.json)
        if wanted.report is not None:
            report.write(document, wanted.report)
    cc.shutdown()
    return 0


def collectives(wanted: Options) -> dict[str, Any]:
    """The document of a run: every side, every size, and the limit."""
    sides, missing = engines.assemble(wanted.peers)
    limit = limits.of_this_job()
    hosts = len({peer.host_id for peer in membership.current().peers})
    results: list[dict[str, Any]] = []
    limit_seconds: list[float] = []
    for size in wanted.sizes:
        arrays = [side.array(size // ELEMENT_BYTES) for side in sides]
        steps = [side.step(array) for side, array in zip(sides, arrays)]
        for side, array, step in zip(sides, arrays, steps):
            must_be_right(side, array, step)
        *seconds, at_limit = measure.alternate([*steps, limit.step], wanted.rounds)
        limit_seconds += at_limit
        results += [report.collective_row(side.name, side.memory, side.call, size, cc.size(), spent) for side, spent in zip(sides, seconds)]
        if cc.rank() == 0 and sys.stderr.isatty():
            print(f"{size} bytes done", file=sys.stderr)
    figures = limit.figures(statistics.median(limit_seconds))
    return {
        "schema": report.SCHEMA,
        "np": cc.size(),
        "hosts": hosts,
        "rounds": wanted.rounds,
        "results": results,
        "missing": missing,
        "limit_of": limit.what,
        **{name: round(value, 3) for name, value in figures.items()},
    }


def must_be_right(side: Any, array: Any, step: measure.Step) -> None:
    """One sum of known numbers on every rank; then zeros, which no number of sums makes larger."""
    size = cc.size()
    array[:] = cc.rank() + 1
    step()
    wrong = np.array([int((array != size * (size + 1) // 2).sum())])
    array[:] = 0
    if cc.allreduce(wrong, op=cc.Max)[0]:
        raise cc.CollectiveError(
            f"{side.name} ({side.call}, {side.memory} memory) returned wrong sums of {array.nbytes} bytes; nothing was measured"
        )
