"""Compression of gradients: the choices for ``compression=``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective_core.common.compression import Compressor, HalfCompressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Half(HalfCompressor):
    wide = (tf.float32, tf.float64)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)


class FP16Compressor(_Half):
    """float16: more precise, but values beyond 65504 become infinite."""

    half = tf.float16


class BF16Compressor(_Half):
    """bfloat16: the range of float32 with 8 bits of precision."""

    half = tf.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
