"""Measured costs are the same on all ranks, and so is a plan."""

import collective_core.torch as hvd
import common

hvd.init()
costs = hvd.nn.measure_costs()
assert 1e6 < costs.bandwidth < 1e13, costs
assert 0 < costs.latency < 1, costs
assert 1e6 < costs.memory_bandwidth < 1e13, costs
plan = hvd.nn.plan_tables([hvd.nn.Table("a", 1_000_000, 16), hvd.nn.Table("b", 10, 4)], memory=1 << 30, batch=64)
assert len(plan.bytes_per_rank) == hvd.size()
assert len(set(hvd.allgather_object(repr(plan)))) == 1
given = hvd.nn.plan_tables([hvd.nn.Table("a", 1_000_000, 16)], memory=64 << 20, batch=64, costs=costs, ranks=8)
table = hvd.nn.ShardedEmbedding(optimizer=hvd.nn.SGD(0.1), **{**given.options("a"), "owner": 0})
assert table.table.name == "a"
common.report(done=True)
