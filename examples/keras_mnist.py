#!/usr/bin/env python3
"""A convolutional network trained with Keras on all ranks, on any of its backends, with images that the script makes itself.

    KERAS_BACKEND=jax provision run -np 2 python examples/keras_mnist.py
    KERAS_BACKEND=tensorflow python -m collective_core.launch -np 2 python examples/keras_mnist.py

Needs: pip install keras, and tensorflow, jax or torch
"""

from __future__ import annotations

import argparse

import collective_core.keras as hvd
import keras
import numpy as np


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten patterns stand for the ten digits: each image is one of them, with noise. Replace this by your own data set."""
    patterns = np.random.default_rng(0).normal(size=(10, 28, 28, 1))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count)
    return (patterns[labels] + generator.normal(scale=0.7, size=(count, 28, 28, 1))).astype(np.float32), labels


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, activation="relu"),
            keras.layers.MaxPooling2D(4),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=1024, help="of each rank")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = make_model()
    # More ranks make larger batches, which allow longer steps.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # every rank begins with rank 0's weights
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=1e-3 * hvd.size(), warmup_epochs=1),
    ]
    images, labels = make_images(options.images, seed=1 + hvd.rank())  # every rank has its own part of the data
    model.fit(images, labels, options.batch_size, options.epochs, verbose=2 if hvd.rank() == 0 else 0, callbacks=callbacks)

    # Each rank tests on its own images, and the average over all ranks is the result.
    _, accuracy = model.evaluate(*make_images(512, seed=100 + hvd.rank()), verbose=0)
    accuracy = float(keras.ops.convert_to_numpy(hvd.allreduce(accuracy)))
    weights = sum(weight.astype(np.float64).sum() for weight in model.get_weights())
    print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)


if __name__ == "__main__":
    main()
