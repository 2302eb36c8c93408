"""The mixing function of splitmix64 (Steele, Lea and Flood, 2014), which spreads any ids of 64 bits: for NumPy's arrays and for tensors."""

from __future__ import annotations

from typing import Any

_MOST = (1 << 63) - 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number > _MOST else number


def _shifted(numbers: Any, bits: int) -> Any:
    """Shifted right with zeros from the left, which signed integers are not."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def mixed(ids: Any) -> Any:
    """Another number of int64 for each id of int64, whose multiplication wraps: no two ids have the same. On every machine alike."""
    numbers = ids + _signed(0x9E3779B97F4A7C15)
    numbers = (numbers ^ _shifted(numbers, 30)) * _signed(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ _shifted(numbers, 27)) * _signed(0x94D049BB133111EB)
    return numbers ^ _shifted(numbers, 31)


def bucket(ids: Any, buckets: int) -> Any:
    """A number below ``buckets`` for each id of int64; many ids may share one."""
    return (mixed(ids) & _MOST) % buckets
