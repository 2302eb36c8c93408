#!/usr/bin/env python3
"""What the engine costs a training step of Keras, and an allreduce of JAX: two ranks beside the same two that do not communicate.

    .venv-engine/bin/python benchmarks/keras_steps.py [--backend tensorflow] [--np 2] [--rounds 7] [--steps 20]

A round trains the same small convolutional network for so many steps in each way, one after the other, in the same processes; between
rounds all ranks meet. `jax` also measures an allreduce of 25 MB in a compiled function beside `cc.allreduce` of NumPy arrays. Printed are
medians of the slowest rank, in milliseconds, and the ratio to the first row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

from collective_core import Runner

BATCH = 64


def train(backend: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step on this rank, by way and round."""
    os.environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="2")
    import collective_core.keras as hvd
    import keras
    import numpy as np

    import collective_core as cc

    hvd.init()
    generator = np.random.default_rng(hvd.rank())
    images = generator.normal(size=(BATCH * steps, 28, 28, 1)).astype(np.float32)
    labels = generator.integers(0, 10, BATCH * steps)

    def make(optimizer: object) -> keras.Model:
        layers = [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(32, 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential(layers)
        model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    ways = {
        "not communicating": make(keras.optimizers.SGD(0.01)),
        "DistributedOptimizer": make(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(rounds + 1):
        for way, model in ways.items():
            cc.barrier()
            begin = time.perf_counter()
            model.fit(images, labels, batch_size=BATCH, epochs=1, verbose=0)
            if round_:  # the first compiles
                times[way].append((time.perf_counter() - begin) / steps)
    hvd.shutdown()
    return times


def reduce(rounds: int) -> dict[str, list[float]]:
    """Seconds per allreduce of 25 MB on this rank, by way and round."""
    import collective_core.jax as hvd
    import jax
    import jax.numpy as jnp
    import numpy as np

    import collective_core as cc

    hvd.init()
    count = 6_250_000
    source, target, on_device = np.ones(count, np.float32), np.empty(count, np.float32), jnp.ones(count)
    compiled = jax.jit(lambda array: hvd.allreduce(array, op=hvd.Sum))
    ways = {
        "cc.allreduce of NumPy arrays": lambda: cc.allreduce(source, op=cc.Sum),
        "cc.allreduce with out": lambda: cc.allreduce(source, op=cc.Sum, out=target),
        "hvd.allreduce in jit": lambda: compiled(on_device).block_until_ready(),
        "hvd.allreduce": lambda: hvd.allreduce(on_device, op=hvd.Sum).block_until_ready(),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(rounds + 2):
        for way, call in ways.items():
            cc.barrier()
            begin = time.perf_counter()
            call()
            if round_ > 1:
                times[way].append(time.perf_counter() - begin)
    hvd.shutdown()
    return times


def show(title: str, found: list[dict[str, list[float]]]) -> None:
    print(title)
    medians = {way: 1e3 * statistics.median(map(max, zip(*(rank[way] for rank in found), strict=True))) for way in found[0]}
    first = next(iter(medians.values()))
    for way, median in medians.items():
        print(f"  {way:30} {median:8.2f} ms   {first / median:5.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"), action="append")
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    wanted = parser.parse_args()
    runner = Runner(np=wanted.np, env={"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"})
    for backend in wanted.backend or ["tensorflow", "jax"]:
        show(f"a step of Keras on {backend}, {wanted.np} ranks", runner.run(train, backend, wanted.rounds, wanted.steps))
        if backend == "jax":
            show(f"a sum of 25 MB, {wanted.np} ranks", runner.run(reduce, 3 * wanted.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
