"""``import horovod.keras as hvd``, for Keras 3."""

from collective_core.keras import *  # noqa: F403
from horovod.keras import callbacks as callbacks  # type: ignore[no-redef]
from horovod.keras import elastic as elastic  # type: ignore[no-redef]
