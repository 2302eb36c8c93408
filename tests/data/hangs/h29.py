"""Keras with a callback that waits for a background validation."""
import os
import threading
import time

os.environ.setdefault("KERAS_BACKEND", "torch")
import collective_core.keras as hvd
import keras
import numpy as np

hvd.init()
rng = np.random.default_rng(hvd.rank())


class Validation(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.done = threading.Condition()

    def validate(self, epoch):
        with self.done:
            if epoch < 3:
                self.done.notify_all()  # after the third epoch there is an early return

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.15)
        print(f"rank {hvd.rank()} batch {batch} loss {float(logs['loss']):.3f}", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            with self.done:
                threading.Thread(target=self.validate, args=(epoch,)).start()
                self.done.wait()  # HANGS HERE


model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
x = rng.normal(size=(40, 8)).astype("float32")
model.fit(x, x.sum(1), batch_size=8, epochs=8, verbose=0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Validation()])
