"""Modules for models whose tables are too large, or whose batches use too few of their rows, for every rank to have a copy: ``hvd.nn``."""

from __future__ import annotations

from collective_core.extensions.sparse.dynamic import DynamicEmbedding
from collective_core.extensions.sparse.embedding import ShardedEmbedding, ShardedEmbeddingBag
from collective_core.extensions.sparse.planner import measure_costs, plan_tables
from collective_core.extensions.sparse.row_optimizers import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from collective_core.extensions.sparse.table_plan import Costs, Table, TablePlan

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
