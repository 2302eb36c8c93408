"""``import horovod.tensorflow.keras as hvd``, for Keras 3."""

from collective_core.keras import *  # noqa: F403
from horovod.tensorflow.keras import callbacks as callbacks  # type: ignore[no-redef]
from horovod.tensorflow.keras import elastic as elastic  # type: ignore[no-redef]
