"""Gradient compression: what travels instead of the gradient. Horovod's interface, so that programs can bring compressors of their own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Compressor:
    """Turns an array into one to send, and a received one back. ``context`` is whatever decompress needs."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the array as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:  # noqa: ARG004 - the interface of every compressor
        return tensor


class _HalfCompressor(Compressor):
    """Sends floating-point arrays in a 16-bit type; the engine still sums them in float32."""

    half: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype in (jnp.float32, jnp.float64):
            return tensor.astype(cls.half), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        return tensor if context is None else tensor.astype(context)


class FP16Compressor(_HalfCompressor):
    """float16: more precise, but values beyond 65504 become infinite."""

    half = jnp.float16


class BF16Compressor(_HalfCompressor):
    """bfloat16: the range of float32 with 8 bits of precision."""

    half = jnp.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
