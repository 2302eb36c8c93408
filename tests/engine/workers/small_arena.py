"""Ranks whose address space is limited: the arena shrinks or is missing, everything else works."""

import resource

import common
import numpy as np

import collective_core as cc

LIMIT = 3 << 30
resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
cc.init()
size = cc.size()
try:
    cc.empty(1 << 40, np.uint8)
    error = ""
except cc.CollectiveError as failure:
    error = str(failure)
data = np.full(300_001, cc.rank() + 1, np.float32)
total = cc.allreduce(data, op=cc.Sum)
common.report(right=bool((total == size * (size + 1) // 2).all()), error=error)
cc.shutdown()
