"""What a rank sees in a tf.function, in which another rank does not come: a signal, or the other rank's end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import collective_core.tensorflow as hvd
import tensorflow as tf
from common import RANK, report

hvd.init()


@tf.function
def step(x):
    return hvd.allreduce(x)


step(tf.ones([2]))
hvd.barrier()
begin = time.monotonic()
if sys.argv[1] == "interrupted" and RANK == 0:
    threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        step(tf.ones([2]))
    except (KeyboardInterrupt, RuntimeError) as error:  # TensorFlow's own error may get in the way
        report(error=repr(error), seconds=time.monotonic() - begin)
    os._exit(0)
elif sys.argv[1] == "interrupted":
    time.sleep(20)  # longer than the other rank waits
elif RANK == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    try:
        step(tf.ones([2]))
    except tf.errors.OpError as error:
        own = hvd.error_of_engine(error)
        report(type=type(error).__name__, kind=own.kind, ranks=list(own.ranks), text=str(own), seconds=time.monotonic() - begin)
os._exit(0)
