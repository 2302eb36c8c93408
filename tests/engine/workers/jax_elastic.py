"""An elastic job with JAX, whose rank 1 is killed once in the middle of a step of the others."""

import os
import signal
import sys
from pathlib import Path

import collective_core.jax as hvd
import jax
import jax.numpy as jnp

hvd.init()
killed = Path(sys.argv[1]) / "killed"


@jax.jit
def step(params):
    return params + hvd.allreduce(jnp.ones(3))


@hvd.elastic.run
def train(state):
    while state.step < 12:
        if state.step == 5 and hvd.rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.params = jax.block_until_ready(step(state.params))
        state.step += 1
        state.commit()
    return state.step


state = hvd.elastic.JaxState(params=jnp.zeros(3), step=0)
print(f"rank {hvd.rank()} step {train(state)} params {state.params.tolist()}", flush=True)
