"""What collectives cost a TensorFlow program: MNIST's step on two ranks beside the same two processes apart, and a sum of 25 MB.

python -m collective_core.launch -np 2 python benchmarks/tensorflow_step.py

The sides alternate in one run. Medians over all steps of rank 0; the step's figure is images per second of both ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import collective_core.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import collective_core as cc

BATCH = 64
SUMMED = 25_000_000


def make_step(is_distributed: bool) -> Callable[[], Any]:
    """A training step of MNIST's network, on random images."""
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = tf.random.normal([BATCH, 28, 28, 1]), tf.random.uniform([BATCH], maxval=10, dtype=tf.int32)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        if is_distributed:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def alternate(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each side, the median of all rounds after two."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name, run in sides.items():
            cc.barrier()
            begin = time.perf_counter()
            np.asarray(run())
            if number >= 2:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=40)
given = parser.parse_args()

hvd.init()
cores = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
tf.config.threading.set_intra_op_parallelism_threads(cores)
steps = alternate({"apart": make_step(False), "together": make_step(True)}, given.rounds)
values = tf.random.normal([SUMMED // 4])
as_array = np.asarray(values)
summed = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
grouped = tf.function(lambda x: hvd.grouped_allreduce(tf.split(x, 10), op=hvd.Sum)[0])
naive = tf.function(lambda x: tf.numpy_function(lambda array: cc.allreduce(array, op=cc.Sum), [x], tf.float32))
sums = alternate(
    {
        "cc.allreduce of the array": lambda: cc.allreduce(as_array, op=cc.Sum)[:1],
        "hvd.allreduce": lambda: summed(values)[:1],
        "hvd.grouped_allreduce of ten": lambda: grouped(values)[:1],
        "tf.numpy_function": lambda: naive(values)[:1],
    },
    max(5, given.rounds // 4),
)
if hvd.rank() == 0:
    rates = {name: BATCH * hvd.size() / taken * 1e3 for name, taken in steps.items()}
    print(f"MNIST step: {rates['apart']:.0f} images/s apart, {rates['together']:.0f} together: {rates['together'] / rates['apart']:.2f}")
    base = sums["cc.allreduce of the array"]
    for name, taken in sums.items():
        print(f"25 MB, {name}: {taken:.1f} ms, {taken / base:.2f} of the array's")
