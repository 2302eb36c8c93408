"""Collectives on JAX arrays, called at once and compiled, against NumPy; gradients; order; what is refused."""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import common
import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
import collective_core.jax as hvd  # noqa: E402
import jax.numpy as jnp  # noqa: E402

hvd.init()
rank, size = hvd.rank(), hvd.size()
checked = 0
errors = {}
#: Relative error of one rounding, times the ranks' additions.
PRECISION = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-7, "float64": 1e-15}
DTYPES = ("uint8", "int8", "int32", "int64", "bool", *PRECISION)
REDUCE = {"Sum": np.add, "Min": np.minimum, "Max": np.maximum, "Product": np.multiply}
BOOLEAN = {"Sum": np.logical_or, "Max": np.logical_or, "Min": np.logical_and, "Product": np.logical_and}


def values(r, shape, dtype):
    generator = np.random.default_rng([r, *shape])
    if dtype == "bool":
        return jnp.array(generator.integers(0, 2, shape), bool)
    if dtype in PRECISION:
        return jnp.array(generator.uniform(0.5, 1.5, shape) * generator.integers(-1, 2, shape), dtype)
    return jnp.array(generator.integers(0 if dtype == "uint8" else -9, 10, shape), dtype)


def wide(array):
    return np.asarray(array, np.float64) if str(array.dtype) in PRECISION else np.asarray(array)


def reduced(parts, op, dtype):
    """The reduction in float64, or in the integers' own wrapping arithmetic."""
    function = BOOLEAN[op] if dtype == "bool" else REDUCE["Sum" if op == "Average" else op]
    total = wide(parts[0])
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            total = function(total, wide(part))
    if op == "Average":
        return total / size if dtype in PRECISION else np.trunc(total / size).astype(total.dtype)
    return total


def check(label, got, want):
    global checked
    checked += 1
    assert isinstance(got, jax.Array), (label, type(got))
    assert got.shape == want.shape, (label, got.shape, want.shape)
    precision = PRECISION.get(str(got.dtype))
    if precision is None:
        assert got.dtype == want.dtype, (label, got.dtype, want.dtype)
        assert np.array_equal(np.asarray(got), want), (label, got, want)
    else:
        assert (np.abs(wide(got) - want) <= precision * size * (np.abs(want) + size)).all(), (label, got, want)


def refused(label, call):
    """What every rank gets instead of a result."""
    try:
        jax.block_until_ready(call())
    except Exception as error:  # noqa: BLE001 - it is reported
        errors[label] = [type(error).__name__, str(error)[-400:]]
    else:
        raise AssertionError(f"{label} was not refused")


def split_rows(rows):
    return [rows // size + (1 if r < rows % size else 0) for r in range(size)]


def collectives(mine, mine_unevenly, ops, root):
    """All of them, of one array."""
    made = {f"allreduce {op}": hvd.allreduce(mine, op=op) for op in ops}
    made["broadcast"] = hvd.broadcast(mine, root)
    if mine.ndim:
        made.update({f"reducescatter {op}": hvd.reducescatter(mine, op=op) for op in ops})
        made["allgather"] = hvd.allgather(mine_unevenly)
        if mine.shape[0] % size == 0:
            made["alltoall"] = hvd.alltoall(mine)
    return made


for dtype in DTYPES:
    ops = ["Sum", "Min", "Max", "Product"] + ([] if dtype == "bool" else ["Average"])
    for shape in [(0, 3), (1,), (size, 2), (2 * size + 1, 700)] + ([()] if dtype in ("float32", "int64") else []):
        everyone = [values(r, shape, dtype) for r in range(size)]
        uneven = [part[: r + 1] if shape else part for r, part in enumerate(everyone)]
        root = size - 1
        want = {f"allreduce {op}": reduced(everyone, op, dtype) for op in ops}
        want["broadcast"] = wide(everyone[root])
        if shape:
            for op in ops:
                want[f"reducescatter {op}"] = np.split(want[f"allreduce {op}"], np.cumsum(split_rows(shape[0]))[:-1])[rank]
            share = shape[0] // size
            want["alltoall"] = np.concatenate([wide(part)[rank * share : (rank + 1) * share] for part in everyone])
        for rows, way in ((uneven, collectives), (everyone, jax.jit(collectives, static_argnums=(2, 3)))):
            want["allgather"] = np.concatenate([wide(part) for part in rows]) if shape else None
            for label, got in way(everyone[rank], rows[rank], tuple(ops), root).items():
                check(f"{label} {dtype}{shape}", got, want[label])

# Groups: small arrays of several types travel together, large ones alone; scaled before and after the sum.
shapes = {"a": (3, 5), "b": (), "c": (70_000,), "d": [(2,), (0,), (17, 2)]}
trees = [jax.tree.map(lambda s, r=r: values(r, s, "float32"), shapes, is_leaf=lambda s: isinstance(s, tuple)) for r in range(size)]
for each in (hvd.grouped_allreduce, jax.jit(hvd.grouped_allreduce, static_argnames=("op", "prescale_factor", "postscale_factor"))):
    got = each({**trees[rank], "i": jnp.arange(3) + rank}, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        if "'i'" in str(path):
            check(f"group {path}", leaf, sum(2 * (np.arange(3) + r) for r in range(size)) // 2)
        else:
            parts = [wide(dict(jax.tree_util.tree_leaves_with_path(tree))[path]) for tree in trees]
            check(f"group {path}", leaf, sum(parts))
assert hvd.allreduce([]) == []
half = jax.jit(lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16))(jnp.full(3, 1.0 + rank, jnp.float32))
assert half.dtype == jnp.float32
check("compressed", half, np.full(3, (size + 1) / 2))

# Gradients, Horovod's.
weight = rank + 1.0
weights = np.arange(1.0, size + 1)
for grad in (jax.grad, lambda function: jax.jit(jax.grad(function))):
    x = jnp.ones((size * 2, 2))
    check("grad sum", grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) * weight).sum())(x), np.full(x.shape, weights.sum()))
    check("grad average", grad(lambda x: (hvd.allreduce(x) * weight).sum())(x), np.full(x.shape, weights.mean()))
    check("grad gathered", grad(lambda x: (hvd.allgather(x) * weight).sum())(x), np.full(x.shape, weights.mean()))
    wanted = np.full(x.shape, weights.mean() if rank == 1 else 0.0)
    check("grad broadcast", grad(lambda x: (hvd.broadcast(x, 1) * weight).sum())(x), wanted)
    each = np.repeat(weights, 2)[:, None] * np.ones((1, 2))
    check("grad scattered", grad(lambda x: (hvd.reducescatter(x, op=hvd.Sum) * weight).sum())(x), each * size)
    check("grad exchanged", grad(lambda x: (hvd.alltoall(x) * weight).sum())(x), each)
    group = grad(lambda t: (hvd.allreduce(t)["x"] * weight).sum() + hvd.allreduce(t)["y"])({"x": x, "y": jnp.ones(())})
    check("grad of a group", group["x"], np.full(x.shape, weights.mean()))
    check("grad of a group", group["y"], np.ones(()))
uneven = jnp.ones((rank + 1, 2))
check("grad gathered unevenly", jax.grad(lambda x: (hvd.allgather(x) * weight).sum())(uneven), np.full(uneven.shape, weights.mean()))
splits = [rank + 1] + [1] * (size - 1)
exchanged, rows = hvd.alltoall(jnp.arange(rank + size), splits=splits)
assert rows.tolist() == ([r + 1 for r in range(size)] if rank == 0 else [1] * size)
sent = jax.grad(lambda x: (hvd.alltoall(x, splits=splits)[0] * weight).sum())(jnp.ones(rank + size))
check("grad exchanged unevenly", sent, np.repeat(weights, splits))
second = jax.jit(jax.jacrev(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum())))(jnp.ones(2))
check("second derivative", second, 2.0 * size * size * np.eye(2))


# Order: in loops and branches, beside calls that are made at once, and under vmap.
@jax.jit
def loop(x):
    def body(carry, number):
        carry = jax.lax.cond(number % 2 == 0, lambda c: hvd.allreduce(c, op=hvd.Sum), lambda c: hvd.allreduce(c + 1, op=hvd.Max), carry)
        return carry, hvd.broadcast(carry, 0)

    return jax.lax.scan(body, x, jnp.arange(6))


def loop_of_numpy():
    now, kept = [np.full(4, float(r)) for r in range(size)], []
    for number in range(6):
        total = sum(now) if number % 2 == 0 else np.max(now, axis=0) + 1
        now = [total] * size
        kept.append(total)
    return now[rank], np.array(kept)


after, kept = loop(jnp.full(4, float(rank)))
at_once = hvd.allreduce(jnp.full(5, float(rank)), op=hvd.Sum)  # while the loop may still be running
check("at once", at_once, np.full(5, sum(range(size)), float))
check("loop", after, loop_of_numpy()[0])
check("loop", kept, loop_of_numpy()[1])
until = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 100, lambda c: hvd.allreduce(c + 1, op=hvd.Sum), x))(jnp.zeros(2))
count = 0.0
while count < 100:
    count = (count + 1) * size
check("while", until, np.full(2, count))
batch = jnp.arange(6.0).reshape(3, 2) * (rank + 1)
check("vmap", jax.jit(jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Sum)))(batch), np.arange(6.0).reshape(3, 2) * weights.sum())
check("constant", jax.jit(lambda: hvd.allreduce(np.full(2, rank + 1.0)))(), np.full(2, weights.mean()))
both = jax.jit(lambda x: (hvd.allreduce(x[0], name="a"), hvd.allreduce(x[1], name="b")))([jnp.ones(2), jnp.ones(70_000)])
check("names", both[1], np.ones(70_000))

# Process sets, objects and trees.
alone = hvd.add_process_set([0])
if rank == 0:
    check("set", jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=alone))(jnp.ones(2)), np.ones(2))
    check("set", hvd.allgather(jnp.ones(2), process_set=alone), np.ones(2))
else:
    refused("not in the set", lambda: hvd.allreduce(jnp.ones(2), process_set=alone))
assert hvd.remove_process_set(alone)
assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
assert hvd.allgather_object(rank) == list(range(size))
tree = hvd.broadcast_parameters({"w": jnp.full(3, float(rank)), "n": rank, "none": None}, root_rank=1)
check("tree", tree["w"], np.ones(3))
assert int(tree["n"]) == 1
assert tree["none"] is None
hvd.barrier()

# What is refused, on every rank, and leaves everything usable.
refused("shapes", lambda: hvd.allreduce(jnp.ones(2 + rank)))
refused("compiled shapes", lambda: jax.jit(hvd.allreduce)(jnp.ones(2 + rank)))
refused("fused shapes", lambda: hvd.allreduce([jnp.ones(2 + rank), jnp.ones(2 + size - rank)]))
refused("complex", lambda: hvd.allreduce(jnp.ones(2) * 1j))
refused("op", lambda: jax.jit(lambda x: hvd.allreduce(x, op="Median"))(jnp.ones(2)))
refused("text", lambda: hvd.allreduce("text"))
refused("key", lambda: hvd.allreduce(jax.random.key(0)))
refused("rows", lambda: jax.jit(hvd.allgather)(jnp.ones((rank + 1, 2))))
refused("scalar", lambda: hvd.allgather(1.0))
refused("splits", lambda: jax.jit(lambda x: hvd.alltoall(x, splits=splits)[0])(jnp.ones(rank + size)))
refused("vmap", lambda: jax.vmap(hvd.allgather)(jnp.ones((2, 2))))
refused("maximum", lambda: jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum())(jnp.ones(2)))
refused("trees", lambda: hvd.broadcast_parameters({"a": 1.0} if rank else {"b": 1.0}))
check("afterwards", jax.jit(hvd.allreduce)(jnp.ones(2)), np.ones(2))

# Where the device is no CPU, arrays are copied: JAX's way for all devices, here from the CPU.
from collective_core.jax import host_calls  # noqa: E402

host_calls.jax.default_backend = lambda: "another"
check("copied", jax.jit(lambda t: hvd.allreduce(t, op=hvd.Sum))([jnp.full(3, weight), jnp.ones(2)])[0], np.full(3, weights.sum()))
common.report(checked=checked, errors=errors)
