"""``import horovod.tensorflow as hvd``."""

from collective_core.tensorflow import *  # noqa: F403
from horovod.tensorflow import elastic as elastic  # type: ignore[no-redef]
from horovod.tensorflow import mpi_ops as mpi_ops
from horovod.tensorflow import util as util
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
