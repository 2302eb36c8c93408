"""Modules for models whose tables are too large, or whose batches use too few of their rows, for every rank to have a copy: ``hvd.nn``."""

from __future__ import annotations

from collective_core.common.table_plan import Costs, Table, TablePlan
from collective_core.torch.nn.dynamic import DynamicEmbedding
from collective_core.torch.nn.embedding import ShardedEmbedding, ShardedEmbeddingBag
from collective_core.torch.nn.planner import measure_costs, plan_tables
from collective_core.torch.nn.row_optimizers import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Costs",
    "DynamicEmbedding",
    "RowOptimizer",
    "RowWiseAdagrad",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "Table",
    "TablePlan",
    "measure_costs",
    "plan_tables",
]
