"""SyncBatchNormalization."""

from collective_core.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
