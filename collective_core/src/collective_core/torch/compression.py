"""Compression of gradients: the choices for ``compression=``."""

from __future__ import annotations

from typing import Any

import torch

from collective_core.common.compression import Compressor, HalfCompressor, NoneCompressor
from collective_core.lazy import extension

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "LossyCompression", "NoneCompressor"]


class _Half(HalfCompressor):
    wide = (torch.float32, torch.float64)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)


class FP16Compressor(_Half):
    """float16: more precise, but values beyond 65504 become infinite."""

    half = torch.float16


class BF16Compressor(_Half):
    """bfloat16: the range of float32 with 8 bits of precision."""

    half = torch.bfloat16


#: What a lossy compression adds to an optimizer's state_dict, beside "state" and "param_groups".
STATE_KEY = "compression"


class LossyCompression:
    """Compression of a DistributedOptimizer that adds what it leaves out to its next gradients (error feedback)."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:  # noqa: ARG002 - as every compressor's
        raise ValueError(
            f"{self} keeps what it leaves out for the next step, so it needs an optimizer with steps: pass it to DistributedOptimizer "
            "with op=Average or Sum; for a single tensor take Compression.fp16 or bf16"
        )

    decompress = compress

    def error_feedback(self, how: dict[str, Any]) -> Any:
        """What sums buckets so, and keeps what it leaves out. ``how``: the keyword arguments of an allreduce."""
        return extension("slow_networks.error_feedback").ErrorFeedback(self, how)


class Int8(LossyCompression):
    """8-bit integers, in blocks with a scale each: a quarter of the bytes."""

    def __repr__(self) -> str:
        return "Compression.int8"


class TopK(LossyCompression):
    """The share ``ratio`` of each bucket's elements with the largest magnitudes: (n-1) · ratio · 8 bytes an element for n ranks."""

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"Compression.topk: ratio is the share of elements that are sent, above 0 and at most 1, not {ratio}")
        self.ratio = ratio

    def __repr__(self) -> str:
        return f"Compression.topk(ratio={self.ratio})"


class PowerSGD(LossyCompression):
    """Matrices as the product of two factors of ``rank`` columns; what that would not halve, and vectors, are sent whole."""

    def __init__(self, rank: int = 4) -> None:
        if rank < 1:
            raise ValueError(f"Compression.powersgd: rank must be at least 1, not {rank}")
        self.rank = rank

    def __repr__(self) -> str:
        return f"Compression.powersgd(rank={self.rank})"


class Compression:
    """The choices for ``compression=``. ``int8``, ``topk(ratio)`` and ``powersgd(rank)`` are for DistributedOptimizer only."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8()
    topk = TopK
    powersgd = PowerSGD
