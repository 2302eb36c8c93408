"""Allreduces of growing groups of hosts, one rank on each: pairs, then pairs the other way, fours, eights and all. It judges nothing.

It runs in the environment with the engine, as ``python -c``, and writes its report as JSON, with the groups in the order of `levels`::

    {"groups": [[the best time in µs, how many results were wrong], …]}
"""

import json
import signal
import sys
import time

if __name__ == "__main__":  # `levels` is also for a machine without them
    import collective_core as cc
    import numpy as np

LIMIT_S = 60  # then the kernel ends this rank, and with it the job
COUNT = 1 << 18  # float32: 1 MiB
PASSES, TIMES = 3, 7  # over all groups, at other times; of each group in a pass


def levels(size: int) -> "list[list[list[int]]]":
    """Lists of groups that work at the same time."""
    found, width = [], 2
    while width < size:
        found.append([list(range(start, min(start + width, size))) for start in range(0, size, width)])
        if width == 2:
            found.append([sorted((start, (start + 1) % size)) for start in range(1, size, 2)])
        width *= 2
    return [[group for group in level if len(group) > 1] for level in found] + [[list(range(size))]]


def measured(group, process_set):
    """(microseconds of the best allreduce, how many were wrong)."""
    numbers = np.arange(COUNT, dtype=np.int64) % 11
    data = (numbers + cc.rank()).astype(np.float32)
    expected = (numbers * len(group) + sum(group)).astype(np.float32)  # whole numbers that float32 holds
    best, wrong = 1e12, 0
    for _ in range(TIMES):
        begin = time.perf_counter()
        result = cc.allreduce(data, op=cc.Sum, process_set=process_set)
        best = min(best, time.perf_counter() - begin)
        wrong += not np.array_equal(result, expected)
    return 1e6 * best, wrong


def one_pass():
    for level in levels(cc.size()):
        sets = [(group, cc.add_process_set(group) if len(group) < cc.size() else cc.global_process_set) for group in level]
        own = next(((group, each) for group, each in sets if cc.rank() in group), None)
        cc.barrier()
        figures = cc.allgather(np.array([measured(*own) if own else (0.0, 0)], dtype=np.float64))
        yield from ((max(figures[group, 0]), int(sum(figures[group, 1]))) for group in level)
        for group, each in sets:
            if len(group) < cc.size():
                cc.remove_process_set(each)


def main(report):
    signal.alarm(LIMIT_S)
    cc.init()
    passes = zip(*[list(one_pass()) for _ in range(PASSES)])
    if cc.rank() == 0:
        with open(report, "w", encoding="utf-8") as file:
            json.dump({"groups": [(min(us for us, _ in each), sum(wrong for _, wrong in each)) for each in passes]}, file)
    cc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
