"""Compression of gradients: the choices for ``compression=``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from collective_core.common.compression import Compressor, HalfCompressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Half(HalfCompressor):
    wide = (jnp.float32, jnp.float64)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class FP16Compressor(_Half):
    """float16: more precise, but values beyond 65504 become infinite."""

    half = jnp.float16


class BF16Compressor(_Half):
    """bfloat16: the range of float32 with 8 bits of precision."""

    half = jnp.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
