"""Gradient compression: what travels instead of the gradient. Horovod's interface, so that programs can bring compressors of their own."""

from __future__ import annotations

from typing import Any


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


class HalfCompressor(Compressor):
    """Sends floating-point tensors in a 16-bit type; the engine still sums them in float32.

    Frameworks say which types are ``wide``, which is the ``half``, and how to ``cast``.
    """

    wide: tuple[Any, ...]
    half: Any

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype in cls.wide:
            return cls.cast(tensor, cls.half), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        return tensor if context is None else cls.cast(tensor, context)
