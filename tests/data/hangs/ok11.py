"""Validation on rank 0 after each round; the first one compiles a long program."""
import time

import collective_core.jax as hvd
import jax
import jax.numpy as jnp
import optax

hvd.init()
rank = hvd.rank()
optimizer = hvd.DistributedOptimizer(optax.adam(0.05))
w = hvd.broadcast_parameters(jnp.zeros(4), root_rank=0)
state = optimizer.init(w)
key = jax.random.PRNGKey(rank)


@jax.jit
def step(w, state, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(1)) ** 2))(w)
    updates, state = optimizer.update(gradient, state, w)
    return optax.apply_updates(w, updates), state, loss


def rollout(w):
    mix = jnp.eye(4) * 0.9 + 0.02
    for _ in range(30):  # unrolled, so it compiles more slowly than a loop
        w = jnp.tanh(mix @ w)
    return w.sum()


for i in range(24):
    key, part = jax.random.split(key)
    w, state, loss = step(w, state, jax.random.normal(part, (8, 4)))
    time.sleep(0.2)
    print(f"rank {rank} step {i} loss {float(loss):.4f}", flush=True)
    if i == 11:
        if rank == 0:
            print("rollout", float(jax.jit(jax.grad(rollout))(w).sum()), flush=True)
            time.sleep(28)  # writes the plots
        hvd.barrier()
