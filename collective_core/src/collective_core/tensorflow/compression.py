"""Gradient compression: what travels instead of the gradient. Horovod's interface, so custom compressors keep working."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Turns a tensor into one to send, and a received one back. ``context`` is whatever decompress needs."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:  # noqa: ARG004 - the interface of every compressor
        return tensor


class _HalfCompressor(Compressor):
    """Sends floating-point tensors in a 16-bit type; the engine still sums them in float32."""

    half: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, cls.half), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compressor(_HalfCompressor):
    """float16: more precise, but values beyond 65504 become infinite."""

    half = tf.float16


class BF16Compressor(_HalfCompressor):
    """bfloat16: the range of float32 with 8 bits of precision."""

    half = tf.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
