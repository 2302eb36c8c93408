"""An elastic job with Keras on the backend that KERAS_BACKEND names, whose last rank is killed once in the middle of model.fit.

The data are the same on all ranks, so that the weights do not depend on who was there; an epoch that was lost or done twice shows in them.
"""

import os
import signal
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import collective_core.keras as hvd
import keras
import numpy as np

EPOCHS, BATCHES = 4, 3
hvd.init()
killed = Path(sys.argv[1]) / "killed"
x = np.random.default_rng(0).normal(size=(BATCHES * 4, 3)).astype(np.float32)
y = x.sum(1, keepdims=True)
sizes = []


class Death(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002
        if state.epoch == 2 and batch == 1 and hvd.rank() == hvd.size() - 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def make(distributed):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer) if distributed else optimizer, loss="mse")
    return model


def fit(model, **options):
    return model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **options)


@hvd.elastic.run
def train(state):
    sizes.append(hvd.size())
    callbacks = [Death(), hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state, batches_per_commit=100)]
    fit(model, epochs=EPOCHS - state.epoch, callbacks=callbacks)


model, alone = make(True), make(False)
state = hvd.elastic.KerasState(model, epoch=0)
train(state)
fit(alone, epochs=EPOCHS)
same = all(np.allclose(*pair, atol=1e-6) for pair in zip(model.get_weights(), alone.get_weights(), strict=True))
print(f"rank {hvd.rank()} epoch {state.epoch} same {same} sizes {sizes}", flush=True)
