"""An elastic job with TensorFlow, whose last rank is killed once in the middle of a step of the others, in a tf.function."""

import os
import signal
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import collective_core.tensorflow as hvd
import tensorflow as tf

hvd.init()
killed = Path(sys.argv[1]) / "killed"
variable = tf.Variable(tf.zeros(3))
made = []


@hvd.elastic.run
def train(state):
    @tf.function
    def step(number):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * number
        variable.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0])

    made.append(hvd.size())
    while state.step < 12:
        if state.step == 5 and hvd.rank() == hvd.size() - 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step(tf.constant(float(state.step)))
        state.step += 1
        if state.step % 2 == 0:
            state.commit()
    return state.step


state = hvd.elastic.TensorFlowState([variable], step=0)
print(f"rank {hvd.rank()} step {train(state)} variable {variable.numpy().tolist()} calls {made}", flush=True)
