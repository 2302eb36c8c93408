"""Training with JAX: the same as one process with the whole batch, the same parameters everywhere."""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import collective_core.jax as hvd
import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

hvd.init()
rank, size = hvd.rank(), hvd.size()
STEPS, BATCH = 12, 8
generator = np.random.default_rng(7)
points = generator.normal(size=(STEPS, size * BATCH, 5)).astype(np.float32)
wanted = points @ generator.normal(size=(5, 3)).astype(np.float32)


def loss_of(parameters, x, y):
    return jnp.mean((jnp.tanh(x @ parameters["w"]) @ parameters["v"] - y) ** 2)


def begin(seed):
    one, two = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(one, (5, 16)), "v": jax.random.normal(two, (16, 3))}


def train(optimizer, parameters, part, gradients_of=None):
    gradients_of = gradients_of or jax.value_and_grad(loss_of)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, x, y):
        loss, gradients = gradients_of(parameters, x, y)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    for number in range(STEPS):
        parameters, state, loss = step(parameters, state, points[number, part], wanted[number, part])
    return parameters, loss


mine, whole = slice(rank * BATCH, (rank + 1) * BATCH), slice(None)
found = {}


def same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, rtol=2e-4, atol=2e-6) for a, b in pairs)


started = hvd.broadcast_parameters(begin(rank), root_rank=1)
assert same(started, begin(1))
alone = {}
for name, optimizer in (("sgd", optax.sgd(0.1, momentum=0.9)), ("adam", optax.adam(0.01))):
    trained, _ = train(hvd.DistributedOptimizer(optimizer), started, mine)
    alone[name], _ = train(optimizer, started, whole)
    found[name] = same(trained, alone[name])
    everyone = hvd.allgather_object([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trained)])
    found[f"{name} on all ranks"] = all(other == everyone[0] for other in everyone)
    found[f"{name} differs from alone"] = not same(trained, train(optimizer, started, mine)[0])

sgd = optax.sgd(0.1, momentum=0.9)
divided, _ = train(hvd.DistributedOptimizer(sgd, gradient_predivide_factor=size), started, mine)
found["predivided"] = same(divided, alone["sgd"])
summed, _ = train(hvd.DistributedOptimizer(optax.sgd(0.1 / size, momentum=0.9), op=hvd.Sum), started, mine)
found["summed"] = same(summed, alone["sgd"])
by_grad, _ = train(sgd, started, mine, gradients_of=hvd.value_and_grad(loss_of))
found["value_and_grad"] = same(by_grad, alone["sgd"])
found["grad"] = same(hvd.grad(loss_of)(started, points[0, mine], wanted[0, mine]), jax.grad(loss_of)(started, points[0], wanted[0]))
half, _ = train(hvd.DistributedOptimizer(sgd, compression=hvd.Compression.bf16), started, mine)
found["compressed"] = bool(jnp.abs(half["v"] - alone["sgd"]["v"]).max() < 0.1)

# Two passes a step: as one process that adds up the same gradients.
for averaged in (True, False):
    distributed = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2, average_aggregated_gradients=averaged)
    trained, _ = train(distributed, started, mine)
    parameters, state = started, sgd.init(started)
    for number in range(0, STEPS, 2):
        pair = [jax.grad(loss_of)(parameters, points[number + k], wanted[number + k]) for k in range(2)]
        divisor = 2 if averaged else 1
        total = jax.tree.map(lambda a, b, divisor=divisor: (a + b) / divisor, *pair)
        updates, state = sgd.update(total, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    found[f"two passes {averaged}"] = same(trained, parameters)

# A rank outside the process set trains alone.
first = hvd.add_process_set([0])
trained, _ = train(hvd.DistributedOptimizer(sgd, process_set=first), started, mine)
found["outside of the set"] = same(trained, train(sgd, started, mine)[0])

for label, options in {"op": {"op": hvd.Max}, "factor": {"op": hvd.Sum, "gradient_predivide_factor": 2.0}}.items():
    try:
        hvd.DistributedOptimizer(sgd, **options)
    except ValueError as error:
        found[label] = str(error) != ""
try:
    hvd.DistributedOptimizer("sgd")
except ValueError as error:
    found["no optimizer"] = "takes an optimizer of optax" in str(error)

# Elastic states, where nothing changes.
state = hvd.elastic.JaxState(params=jax.tree.map(lambda leaf: leaf * (rank + 1), started), step=rank)


@hvd.elastic.run
def run(state):
    for _ in range(3):
        state.params = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(state.params)
        state.step += 1
        state.commit()
    return state.step


found["elastic"] = run(state) == 3 and same(state.params, jax.tree.map(lambda leaf: leaf + 3, started))
state.params, state.step = jax.tree.map(jnp.zeros_like, started), 9
state.restore()
found["restored"] = state.step == 3 and same(state.params, jax.tree.map(lambda leaf: leaf + 3, started))


@hvd.elastic.run
def fail(state):
    jax.block_until_ready(jax.jit(hvd.allreduce)(jnp.ones(2 + rank)))


try:
    fail(state)
except jax.errors.JaxRuntimeError as error:
    found["failed"] = "the ranks ask for different things" in str(error)
common.report(found=found)
hvd.shutdown()
