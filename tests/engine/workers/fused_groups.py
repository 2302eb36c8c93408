"""Groups of tensors, of which the small ones travel as one: the sums are those of the tensors alone, and what differs is found."""

import os
import warnings

import collective_core.torch as hvd
import common
import torch

from collective_core import _native

if common.RANK == 0 and "FUSION_OF_THE_FIRST" in os.environ:
    os.environ["COLLECTIVE_FUSION_MB"] = os.environ["FUSION_OF_THE_FIRST"]
hvd.init()
rank, size = hvd.rank(), hvd.size()
submitted, submit = [], _native.submit


def counted(operation, *way):
    submitted.append(operation.name.decode())
    return submit(operation, *way)


_native.submit = counted


def group(seed=0):
    torch.manual_seed(100 * seed + rank)
    shapes = [(3,), (), (0,), (2, 5), (300, 400), (7,), (1,)]  # the fifth is too large
    return [torch.randn(shape) for shape in shapes] + [torch.arange(4) + rank, torch.randn(4, 6).t()]


alone = [hvd.allreduce(tensor, op=hvd.Sum) for tensor in group()]
report = {"warned": ""}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    submitted.clear()
    together = hvd.grouped_allreduce(group(), op=hvd.Sum, name="g")
    report["submitted"] = list(submitted)
    in_place = group()
    kept = [tensor.data_ptr() for tensor in in_place]
    assert [t.data_ptr() for t in hvd.grouped_allreduce_(in_place, op=hvd.Sum)] == kept, "not the tensors themselves"
    handle = hvd.grouped_allreduce_async(group(), op=hvd.Sum)
    later = hvd.synchronize(handle)
    report["warned"] = " ".join(str(one.message) for one in caught)
for results in (together, in_place, later):
    for result, want in zip(results, alone, strict=True):
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        assert torch.equal(result, want), (result, want)

# As many elements, otherwise divided: on their own they would not fit either, and nothing may be summed across their borders.
shapes = [(2,), (3,)] if rank == 0 else [(3,), (2,)]
try:
    hvd.grouped_allreduce([torch.ones(shape) for shape in shapes], name="d")
except hvd.HorovodInternalError as error:
    report["disagreement"] = str(error)

# Another operation altogether on one rank: nothing of the group is left under way.
submitted.clear()
try:
    if rank == 0:
        hvd.barrier()
    else:
        hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="b")
except hvd.HorovodInternalError as error:
    report["apart"] = [error.kind, *submitted]
assert (hvd.allreduce(torch.ones(3), op=hvd.Sum) == size).all(), "the engine is out of order"

pair = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
sum((number + rank) * part.sum() for number, part in enumerate(hvd.grouped_allreduce(pair, op=hvd.Sum), 1)).backward()
for number, tensor in enumerate(pair, 1):
    assert (tensor.grad == sum(number + other for other in range(size))).all(), tensor.grad

# A rank without further data has no group.
if rank == size - 1:
    hvd.join()
else:
    ones = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Average, name="j")
    assert all((one == 1).all() for one in ones), ones
    hvd.join()
common.report(**report)
