#!/usr/bin/env python3
"""A small network trained with JAX and optax on all ranks. Each rank has its own part of the data, which this script makes itself.

    provision run -np 2 python examples/jax_optax.py
    python -m collective_core.launch -np 2 python examples/jax_optax.py

Needs: pip install jax optax
"""

from __future__ import annotations

import argparse

import collective_core.jax as hvd
import jax
import jax.numpy as jnp
import numpy as np
import optax

CLASSES, FEATURES, HIDDEN = 10, 64, 128


def make_data(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Points around one centre per class."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, samples)
    return (centres[labels] + generator.normal(scale=1.0, size=(samples, FEATURES))).astype(np.float32), labels


def make_parameters(seed: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (FEATURES, HIDDEN)) * (2 / FEATURES) ** 0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, CLASSES)) * (2 / HIDDEN) ** 0.5,
        "b2": jnp.zeros(CLASSES),
    }


def predict(parameters: dict[str, jax.Array], points: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(points @ parameters["w1"] + parameters["b1"])
    return hidden @ parameters["w2"] + parameters["b2"]


def loss_of(parameters: dict[str, jax.Array], points: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(parameters, points), labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of each rank in a step")
    options = parser.parse_args()

    hvd.init()
    # More ranks make larger batches, which allow longer steps.
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-3 * hvd.size()))
    # Every rank begins with rank 0's parameters, whatever its own are.
    parameters = hvd.broadcast_parameters(make_parameters(seed=hvd.rank()), root_rank=0)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, points, labels):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, points, labels)
        updates, state = optimizer.update(gradients, state, parameters)  # gradients are averaged over the ranks here
        return optax.apply_updates(parameters, updates), state, hvd.allreduce(loss)

    points, labels = make_data(seed=1 + hvd.rank(), samples=options.steps * options.batch_size)
    for number in range(options.steps):
        batch = slice(number * options.batch_size, (number + 1) * options.batch_size)
        parameters, state, loss = step(parameters, state, points[batch], labels[batch])
        if number % 20 == 0 and hvd.rank() == 0:
            print(f"step {number}: loss {float(loss):.3f}", flush=True)

    # Each rank tests on its own points, and the average over all ranks is the result.
    points, labels = make_data(seed=100 + hvd.rank(), samples=500)
    accuracy = hvd.allreduce(jnp.mean(jnp.argmax(predict(parameters, points), axis=1) == labels))
    weights = sum(np.asarray(leaf, np.float64).sum() for leaf in jax.tree_util.tree_leaves(parameters))
    print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {float(accuracy):.3f}, sum of weights {weights:.9f}", flush=True)


if __name__ == "__main__":
    main()
