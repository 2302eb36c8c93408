"""Answers to what Horovod's programs ask about how it was built, as far as it depends on TensorFlow."""

from __future__ import annotations

import tensorflow as tf


def nccl_built() -> int:
    """0: tensors of GPUs travel through the host's memory."""
    return 0


def cuda_built() -> bool:
    """Whether TensorFlow was built for CUDA."""
    return bool(tf.test.is_built_with_cuda())
