"""Batch normalisation over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collective_core.arrays import Sum
from collective_core.runtime import launchers
from collective_core.runtime.process_sets import ProcessSet, global_process_set, members_of
from collective_core.tensorflow.mpi_ops import allreduce


@keras.saving.register_keras_serializable(package="collective_core")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``keras.layers.BatchNormalization`` with mean and variance over the batches of all ranks of ``process_set`` while training.

    Batches may have different sizes, and ranks that have joined do not count. ``fused``: Horovod's; True is refused with ValueError.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**{"name": "sync_batch_normalization", **kwargs})
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if members_of(self._process_set).size == 1 and not launchers.is_elastic():
            return mean, variance
        count = self._count(inputs, mask, mean.dtype)
        # First the mean of all, then the squares around it: no difference of large numbers.
        sums = self._sum(tf.concat([tf.math.multiply_no_nan(mean, count), [count]], 0))
        mean_of_all = sums[:-1] / sums[-1]
        squares = self._sum(tf.math.multiply_no_nan(variance + tf.square(mean - mean_of_all), count))
        return mean_of_all, squares / sums[-1]

    def _count(self, inputs: Any, mask: Any, dtype: Any) -> Any:
        """Samples per channel in this rank's batch."""
        if mask is None:
            return tf.cast(tf.size(inputs) // tf.shape(inputs)[self.axis], dtype)
        spread = tf.broadcast_to(tf.expand_dims(tf.cast(mask, dtype), -1), tf.shape(inputs))
        return tf.reduce_sum(spread) / tf.cast(tf.shape(inputs)[self.axis], dtype)

    def _sum(self, tensor: Any) -> Any:
        return allreduce(tensor, op=Sum, process_set=self._process_set)
