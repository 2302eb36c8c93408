"""What ranks can get wrong: every rank is told who asked for what, and the engine goes on working."""
# ruff: noqa: PT017 - worker scripts run without pytest

import collective_core.torch as hvd
import common
import numpy as np
import torch

import collective_core as cc
from collective_core import _native

hvd.init()
rank, size = hvd.rank(), hvd.size()
odd = rank == size - 1  # the one that gets it wrong
ODD = size - 1
cases = 0


def refused(case, call, *fragments, kinds=("mismatch",)):
    """The call fails on this rank, blames the odd one, and says all of `fragments`."""
    global cases
    cases += 1
    try:
        call()
    except hvd.HorovodInternalError as error:
        assert error.kind in kinds, (case, error.kind, str(error))
        assert isinstance(error, ValueError) == (error.kind == "invalid"), "what Horovod raises for impossible arguments"
        assert ODD in error.ranks, (case, error.ranks)
        for fragment in (*fragments, f"rank {ODD} (host ", "pid "):
            assert fragment in str(error), (case, fragment, str(error))
    else:
        raise RuntimeError(f"{case}: no error on rank {rank}")
    total = hvd.allreduce(torch.full((70_000,), float(rank)), op=hvd.Sum)
    assert (total == sum(range(size))).all(), f"{case}: the engine is out of order"


def asynchronous(function, *arguments, **options):
    return lambda: hvd.synchronize(function(*arguments, **options))


OBJECTS = ("mismatch", "invalid")  # on the odd rank its own mistake, on the others a disagreement
for count in (16 * size, 100_000 * size):  # with the header, and through the buffers
    shape = count + (size if odd else 0)
    kind = torch.float64 if odd else torch.float32
    shapes, kinds = (f"[{count}]", f"[{count + size}]"), ("float32", "float64")
    for name in ("allreduce", "reducescatter", "broadcast"):
        function, function_async = getattr(hvd, name), getattr(hvd, name + "_async")
        more = {"root_rank": 0} if name == "broadcast" else {}
        refused(f"{name} shape", lambda f=function, m=more, n=shape: f(torch.ones(n), name="w", **m), *shapes)
        refused(f"{name} shape", asynchronous(function_async, torch.ones(shape), name="w", **more), *shapes)
        refused(f"{name} type", lambda f=function, m=more, n=count, k=kind: f(torch.ones(n, dtype=k), name="w", **m), *kinds)
    for name in ("allgather", "alltoall"):
        function, function_async = getattr(hvd, name), getattr(hvd, name + "_async")
        columns = 3 if odd else 2
        refused(f"{name} columns", lambda f=function, n=count, c=columns: f(torch.ones(n, c), name="w"), f"{count}, 2]", f"{count}, 3]")
        refused(f"{name} columns", asynchronous(function_async, torch.ones(count, columns), name="w"), f"{count}, 2]")
        refused(f"{name} type", lambda f=function, n=count, k=kind: f(torch.ones(n, dtype=k), name="w"), *kinds)
        refused(f"{name} dimensions", lambda f=function, n=count: f(torch.ones(n, 1) if odd else torch.ones(n), name="w"), "1]")
refused("shape of as many elements", lambda: hvd.allreduce(torch.ones(2, 3) if odd else torch.ones(3, 2), name="w"), "[2, 3]", "[3, 2]")
refused("grouped", lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(3 + odd)], name="g"), "'g.1'", "[3]", "[4]")
refused("operation", lambda: hvd.allreduce(torch.ones(4), op=hvd.Max if odd else hvd.Min, name="w"), "Max", "Min")
refused("factor", lambda: hvd.allreduce(torch.ones(4), prescale_factor=2.0 if odd else 1.0, name="w"), "prescale 2")
refused("kind", lambda: hvd.allgather(torch.ones(4), name="w") if odd else hvd.allreduce(torch.ones(4), name="w"), "allgather", "allreduce")
refused("name", lambda: hvd.allreduce(torch.ones(4), name="hers" if odd else "his"), "'hers'", "'his'")
refused("name", asynchronous(hvd.allreduce_async, torch.ones(4), name="hers" if odd else "his"), "'hers'", "'his'")


def groups_of_different_lengths():
    hvd.grouped_allreduce([torch.ones(2)] * (3 if odd else 2), name="g")
    hvd.allreduce(torch.ones(2), name="after")  # where the others are meanwhile


refused("length of a group", groups_of_different_lengths, "'g.2'", "'after'")
models = {"common": torch.ones(3), "hers" if odd else "his": torch.ones(3)}
refused("models", lambda: hvd.broadcast_parameters(models, root_rank=0), "hers", "his")
refused("root", lambda: hvd.broadcast(torch.ones(4), 1 if odd else 0, name="w"), "root 0", "root 1")
refused(
    "no such root",
    lambda: hvd.broadcast(torch.ones(4), size if odd else 0, name="w"),
    f"root rank {size} is not in this job",
    kinds=OBJECTS,
)

# Splits may differ between ranks, so that they are wrong is found by the rank itself, which tells the others.
good, rows = [2] * size, torch.ones(2 * size)
for wrong, text in (
    ([2] * (size - 1) + [3], f"add up to {2 * size + 1}, but the first dimension is {2 * size}"),
    ([2] * (size - 1), f"has {size - 1} entries for {size} ranks"),
    ([2 * size + 1] + [0] * (size - 2) + [-1], "negative"),
    (torch.full((size,), 2.0), "int32"),
    (torch.full((size, 1), 2, dtype=torch.int32), "one dimension"),
):
    refused("splits", lambda w=wrong: hvd.alltoall(rows, splits=w if odd else good, name="w"), text, kinds=OBJECTS)
    refused("splits", asynchronous(hvd.alltoall_async, rows, splits=wrong if odd else good, name="w"), text, kinds=OBJECTS)
refused("uneven", lambda: hvd.alltoall(torch.ones(2 * size + odd), name="w"), f"is not divisible by {size} ranks", kinds=OBJECTS)
for function in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
    scalar = torch.tensor(1.0)
    refused("scalar", lambda f=function, s=scalar: f(s if odd else torch.ones(size), name="w"), "at least one dimension", kinds=OBJECTS)


# What the engine itself never sees: the rank's own mistake is told to all, and counts as an operation where it has no name.
wrong = torch.ones(4, dtype=torch.complex32)
for function in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
    for name in ("w", None):
        refused("type", lambda f=function, n=name: f(wrong if odd else torch.ones(2 * size), name=n), "torch.complex32", kinds=OBJECTS)
refused("type", lambda: hvd.broadcast(wrong if odd else torch.ones(4), 0, name="w"), "torch.complex32", kinds=OBJECTS)
refused("layout", lambda: hvd.allreduce_(wrong.to_sparse() if odd else torch.ones(4), name="w"), "sparse_coo", kinds=OBJECTS)
true = torch.ones(2, dtype=torch.bool)
refused("average", lambda: hvd.allreduce(true, op=hvd.Average if odd else hvd.Sum), "booleans", kinds=OBJECTS)
for function in (hvd.allreduce, hvd.reducescatter):
    refused("operation", lambda f=function: f(torch.ones(size), op="Median" if odd else hvd.Sum, name="w"), "Median", kinds=OBJECTS)
    asked = asynchronous(getattr(hvd, function.__name__ + "_async"), torch.ones(size), op="Median" if odd else hvd.Sum, name="w")
    refused("operation", asked, "Median", kinds=OBJECTS)
    asked = getattr(hvd, "grouped_" + function.__name__)
    refused("grouped", lambda f=asked: f([torch.ones(size), wrong if odd else torch.ones(4)], name="g"), "'g.1'", kinds=OBJECTS)
sparse, dense = torch.eye(3).to_sparse(), torch.eye(3)
for op in (hvd.Sum, hvd.Average):
    for case, mistake, text in (
        ("type", sparse.to(torch.complex32), "complex32"),
        ("layout", dense, "strided"),
        ("shape", torch.eye(4).to_sparse(), "4, 4]"),
    ):
        refused(f"sparse {case}", asynchronous(hvd.sparse_allreduce_async, mistake if odd else sparse, "s", op), text, kinds=OBJECTS)
    refused("sparse operation", asynchronous(hvd.sparse_allreduce_async, sparse, None, hvd.Max if odd else op), "op='Max'", kinds=OBJECTS)
refused("sparse operation", asynchronous(hvd.sparse_allreduce_async, sparse, "s", hvd.Sum if odd else hvd.Average), "Sum", "Average")
array = np.ones(2 * size, dtype=np.complex64 if odd else np.float32)
for function in (cc.allreduce, cc.allgather, cc.alltoall, cc.reducescatter, cc.broadcast):
    for name in ("w", None):
        refused("array", lambda f=function, n=name: f(array, name=n), "arrays of complex64", kinds=OBJECTS)
refused("array", lambda: cc.allreduce(np.ones(2), out=np.ones(2 + odd), op=cc.Sum), "out must be", kinds=OBJECTS)
for function in (cc.allreduce, cc.reducescatter):
    refused("operation", lambda f=function: f(np.ones(size), op="Adasum" if odd else cc.Sum), "Adasum", kinds=OBJECTS)

# Adasum is made of other operations, on vectors of one length.
for case, theirs, mine, fragments in (
    ("shape", torch.ones(2, 3), torch.ones(3, 2), ("2, 3]", "3, 2]")),
    ("length", torch.ones(5), torch.ones(6), ("5]", "6]")),
    ("type", torch.ones(5), torch.ones(5, dtype=torch.float16), ("float32", "float16")),
):
    asked = mine if odd else theirs
    refused(f"Adasum {case}", lambda a=asked: hvd.allreduce(a, op=hvd.Adasum, name="w"), *fragments)
    refused(f"Adasum {case}", asynchronous(hvd.allreduce_async, asked, op=hvd.Adasum), *fragments)
    parameter = torch.nn.Parameter(asked.clone())
    stepping = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), op=hvd.Adasum)
    parameter.sum().backward()
    refused(f"Adasum {case}", stepping.step, *fragments)
for factor in ("prescale", "postscale"):
    asked = {f"{factor}_factor": 2.0 if odd else 1.0}
    refused("Adasum factor", lambda a=asked: hvd.allreduce(torch.ones(4), op=hvd.Adasum, **a), f"{factor} 2")
whole = torch.ones(4, dtype=torch.int32)
refused("Adasum type", lambda: hvd.allreduce(whole if odd else torch.ones(4), op=hvd.Adasum), "floating-point", kinds=OBJECTS)
refused("Adasum", lambda: hvd.allreduce(torch.ones(4), op=hvd.Adasum if odd else hvd.Sum, name="w"), "'w.adasum'", "'w'")


# The place of the tensor: one rank's on a GPU. There need not be one for the engine to compare what it is told.
def reduce_on_device():
    source = torch.ones(4)
    _native.run(_native.operation(_native.ALLREDUCE, "w", "float32", (4,), 4, source.data_ptr(), source.data_ptr(), device=int(odd)))


refused("device", reduce_on_device, "on a GPU")

# One wrong operation among good ones in flight.
handles = [hvd.allreduce_async(torch.ones(5 + (odd and i == 2)), name=f"t{i}", op=hvd.Sum) for i in range(5)]
for i, handle in enumerate(handles):
    if i == 2:
        refused("in flight", lambda h=handle: hvd.synchronize(h), "'t2'")
    else:
        assert hvd.synchronize(handle).tolist() == [size] * 5
hvd.barrier()
common.report(cases=cases)
hvd.shutdown()
