"""SyncBatchNorm."""

from collective_core.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
