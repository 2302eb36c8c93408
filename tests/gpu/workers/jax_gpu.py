"""JAX on a GPU: collectives inside jit and their gradients, through host memory."""

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import collective_core.jax as hvd
import jax
import jax.numpy as jnp

hvd.init()
assert jax.default_backend() == "gpu"
rank, size = hvd.rank(), hvd.size()
x = jnp.arange(10.0) + rank
total = size * jnp.arange(10.0) + size * (size - 1) / 2
double_sum = jax.jit(lambda x: 2 * hvd.allreduce(x, op=hvd.Sum))
assert jnp.allclose(double_sum(x), 2 * total)
of_squares = jax.jit(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()))
assert jnp.allclose(of_squares(x), 2 * size * total), of_squares(x)
assert jnp.array_equal(hvd.broadcast(x, size - 1), jnp.arange(10.0) + size - 1)
assert hvd.allgather(x).shape == (10 * size,)
print("REPORT", rank, flush=True)
