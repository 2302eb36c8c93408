"""Autotune: the size of DistributedOptimizer's buckets, chosen by measuring (COLLECTIVE_AUTOTUNE)."""
