"""Shared by the worker scripts: pretended hosts, references in rank order, reports to the test."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import numpy as np

#: Characters of a line that mpirun passes on as one: its buffer has 2,048 bytes.
LONGEST_LINE = 2000
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
HOSTS = int(os.environ.get("TEST_HOSTS", "1"))
if HOSTS > 1:
    os.environ["COLLECTIVE_HOST_ID"] = f"host{RANK * HOSTS // SIZE}"


def report(**facts):
    """For the test: one line, written at once, or a file where it is so long that mpirun would mix the lines of several ranks."""
    text = json.dumps({"rank": RANK, **facts})
    if len(text) > LONGEST_LINE and "TEST_REPORTS" in os.environ:
        Path(os.environ["TEST_REPORTS"], f"{RANK}.json").write_text(text)
        return
    sys.stdout.write(f"REPORT {text}\n")
    sys.stdout.flush()


def tell(what):
    """For other ranks of the job that wait for it, where the engine is not to be used for that."""
    Path(os.environ["TEST_REPORTS"], what).touch()


def wait_to_be_told(what, limit=60.0):
    end = time.monotonic() + limit
    while not Path(os.environ["TEST_REPORTS"], what).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"nobody said {what}")
        time.sleep(0.01)


def values(rank, count, dtype, seed=0):
    """Values whose sum depends on the order of summation: signs differ, magnitudes spread over four decades."""
    generator = np.random.default_rng([seed, rank, count])
    if np.issubdtype(np.dtype(dtype), np.floating):
        scale = 10.0 ** generator.integers(-2, 3, size=count)
        return (generator.standard_normal(count) * scale).astype(dtype)
    if dtype == "bool":
        return generator.integers(0, 2, size=count).astype(bool)
    info = np.iinfo(dtype)
    return generator.integers(info.min, info.max, size=count, dtype=dtype, endpoint=True)


def by_host(parts, reduce, scale=1.0):
    """``parts``, or what ``reduce`` makes of those of each host, where the job adds so: in their type, times ``scale``."""
    if os.environ.get("COLLECTIVE_SUM_ORDER") == "ranks" or len(parts) != SIZE or SIZE % HOSTS or SIZE == HOSTS or HOSTS == 1:
        return parts
    each = SIZE // HOSTS
    sums = [reduce(parts[first : first + each]) for first in range(0, SIZE, each)]
    return [(total * total.dtype.type(scale) if scale != 1 else total).astype(parts[0].dtype) for total in sums]


def sum_in_rank_order(parts, scale=1.0):
    """((x0 + x1) + x2) + ...: float16 in float32, integers wrapping; returns the accumulator's type. ``scale``: of hosts' sums."""
    wide = np.float32 if parts[0].dtype == np.float16 else parts[0].dtype
    parts = by_host(parts, lambda some: _sum(some, wide), scale)
    return _sum(parts, wide)


def _sum(parts, wide):
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total | part if total.dtype == bool else total + part.astype(wide)
    return total


def reduce_in_rank_order(parts, op, divisor=None):
    """``divisor``: of an average, where it is not the number of parts."""
    dtype, divisor = parts[0].dtype, divisor or len(parts)
    with np.errstate(over="ignore"):
        # A host's sum of float16 travels as a mean of as many as a power of two.
        adds_by_host = dtype == np.float16 and by_host(parts, sum) is not parts
        scale = 0.5 ** math.ceil(math.log2(SIZE // HOSTS)) if adds_by_host else 1.0
        if op == "Sum":
            total = sum_in_rank_order(parts, scale)
            return (total * total.dtype.type(1 / scale) if adds_by_host else total).astype(dtype)
        if op == "Average":
            total = sum_in_rank_order(parts, scale)
            if np.issubdtype(dtype, np.floating):
                return (total / total.dtype.type(divisor) * total.dtype.type(1 / scale)).astype(dtype)
            total = total.astype(np.int64 if dtype.kind == "i" else np.uint64)
            towards_zero = (total < 0) & (total % divisor != 0)
            return (total // divisor + towards_zero).astype(dtype)
        wide = np.float32 if dtype == np.float16 else dtype
        function = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}[op]
        if op != "Product" or dtype != np.float16:
            parts = by_host(parts, lambda some: functools.reduce(function, [part.astype(wide) for part in some]))
        return functools.reduce(function, [part.astype(wide) for part in parts]).astype(dtype)


def expect(call, kind, message):
    """``call`` raises an error of this kind whose text has what ``message`` matches."""
    try:
        call()
    except kind as error:
        if not re.search(message, str(error)):
            raise
    else:
        raise RuntimeError(f"no {kind.__name__}: {message}")
