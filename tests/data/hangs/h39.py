"""JAX and optax; a thread of rank 0 writes snapshots."""
import pickle
import queue
import tempfile
import threading
import time

import collective_core.jax as hvd
import jax
import jax.numpy as jnp
import numpy as np
import optax

writes = queue.Queue()


def writer():
    with tempfile.TemporaryFile() as f:
        while True:
            step, tree = writes.get()
            if step % 8 == 0:
                continue  # kept elsewhere
            pickle.dump(tree, f)
            writes.task_done()


hvd.init()
if hvd.rank() == 0:
    threading.Thread(target=writer, daemon=True).start()
optimizer = hvd.DistributedOptimizer(optax.sgd(0.05))
w = hvd.broadcast_parameters(jnp.zeros((4, 1)), root_rank=0)
state = optimizer.init(w)
key = jax.random.PRNGKey(hvd.rank())


@jax.jit
def step(w, state, x):
    loss, gradients = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(1, keepdims=True)) ** 2))(w)
    updates, state = optimizer.update(gradients, state, w)
    return optax.apply_updates(w, updates), state, loss


for i in range(1, 61):
    key, part = jax.random.split(key)
    w, state, loss = step(w, state, jax.random.normal(part, (16, 4)))
    time.sleep(0.2)
    print(f"rank {hvd.rank()} step {i} loss {float(loss):.4f}", flush=True)
    if hvd.rank() == 0 and i % 4 == 0:
        writes.put((i, np.asarray(w)))
        writes.join()  # HANGS HERE
