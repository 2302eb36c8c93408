"""Inner problem by fixed-point iteration, outer problem by SGD."""
import time

import collective_core.jax as hvd
import jax
import jax.numpy as jnp
import optax

hvd.init()
rank = hvd.rank()


@jax.jit
def solve(scale):
    """x = cos(scale * x); converges for small scales only"""

    def far(x):
        return jnp.abs(jnp.cos(scale * x) - x) > 1e-4

    return jax.lax.while_loop(far, lambda x: jnp.cos(scale * x), jnp.float32(0.5))


@jax.jit
def gradient_of(w, x):
    return jax.grad(lambda w: jnp.mean((x @ w - x.sum(1)) ** 2))(w)


optimizer = optax.sgd(0.05)
w = hvd.broadcast_parameters(jnp.zeros(3), root_rank=0)
state = optimizer.init(w)
key = jax.random.PRNGKey(rank)
for i in range(60):
    key, part = jax.random.split(key)
    damping = float(solve(jnp.float32(0.5 + (0.08 * i if rank == 1 else 0.0))))  # HANGS HERE
    gradient = hvd.allreduce(gradient_of(w, jax.random.normal(part, (8, 3))))
    updates, state = optimizer.update(gradient * damping, state)
    w = optax.apply_updates(w, updates)
    time.sleep(0.2)
    print(f"rank {rank} step {i} damping {damping:.3f} w {w.round(2)}", flush=True)
