"""hvd.allreduce_ of the same tensor again and again: prepared calls give what the others give, and notice whatever has changed."""

import gc
import threading

import collective_core.torch as hvd
import common
import torch
from collective_core.runtime import membership, prepared
from collective_core.torch.ops import allreduce

hvd.init()
rank, size = hvd.rank(), hvd.size()
total = sum(range(size))
in_full = []  # tensors of the calls that were not prepared
own = allreduce._describe


def observed(tensor, *arguments, **options):
    in_full.append(tensor.shape)
    return own(tensor, *arguments, **options)


allreduce._describe = observed


def check(tensor, want, **how):
    """One call, on this rank's number everywhere."""
    with torch.no_grad():
        tensor.fill_(rank)
    assert hvd.allreduce_(tensor, **how) is tensor
    assert torch.equal(tensor.detach(), torch.full_like(tensor, want)), (tensor, want, how)


def repeat(tensor, want, **how):
    """After two calls, the others are prepared."""
    for number in range(5):
        in_full.clear()
        check(tensor, want, **how)
        assert not in_full or number < 2, (number, in_full)


def once_more(tensor, want, **how):
    """A call in full, because something has changed."""
    in_full.clear()
    check(tensor, want, **how)
    assert len(in_full) == 1, in_full


def failure_of(tensor, **how):
    try:
        hvd.allreduce_(tensor, **how)
    except hvd.CollectiveError as error:
        return error
    raise AssertionError("it has not failed")


def everything():
    for count in (24, 30_000):
        for tensor in (torch.empty(count), torch.nn.Parameter(torch.empty(count))):
            repeat(tensor, total, op=hvd.Sum)
            once_more(tensor, size - 1, op=hvd.Max)
            once_more(tensor, total, op=hvd.Sum, name="named")
            once_more(tensor, total, average=False)
            once_more(tensor, 2 * total, op=hvd.Sum, prescale_factor=2.0)
            once_more(tensor, 3 * total, op=hvd.Sum, postscale_factor=3.0)
            repeat(tensor, total, op=hvd.Sum, process_set=hvd.global_process_set)
            tensor.data = tensor.detach().view(2, -1)
            once_more(tensor, total, op=hvd.Sum, process_set=hvd.global_process_set)
            tensor.data = torch.empty(2, count // 2)
            once_more(tensor, total, op=hvd.Sum, process_set=hvd.global_process_set)
            if not tensor.requires_grad:
                tensor.data = tensor.view(torch.int32)
                once_more(tensor, total, op=hvd.Sum, process_set=hvd.global_process_set)
            tensor.data = tensor.detach().t()
            once_more(tensor, total, op=hvd.Sum, process_set=hvd.global_process_set)
    square = torch.empty(5, 5)
    repeat(square, total, op=hvd.Sum)
    square.t_()
    square.copy_(torch.arange(25.0).view(5, 5))
    hvd.allreduce_(square, op=hvd.Sum)
    assert torch.equal(square, size * torch.arange(25.0).view(5, 5))
    grown = torch.empty(4)
    repeat(grown, total, op=hvd.Sum)
    grown.resize_(100_000)
    once_more(grown, total, op=hvd.Sum)

    # A factor that is a tensor, as scales of gradients are: its value counts, which the program changes in place.
    scaled, scale = torch.empty(4), torch.tensor(0.5)
    for _ in range(3):
        once_more(scaled, total / 2, op=hvd.Sum, prescale_factor=scale)
    scale.mul_(4)
    once_more(scaled, 2 * total, op=hvd.Sum, prescale_factor=scale)

    # Its form counts, too: the same by name and by position are two calls, of which the last one is prepared.
    formed = torch.empty(4)
    repeat(formed, total, op=hvd.Sum)
    in_full.clear()
    for number in range(4):
        in_full.clear()
        formed.fill_(rank)
        hvd.allreduce_(formed, None, None, hvd.Sum)
        assert formed.eq(total).all()
        assert not in_full or number < 2, number
    for number in range(4):
        in_full.clear()
        formed.fill_(rank)
        hvd.allreduce_(tensor=formed, op=hvd.Sum)
        assert formed.eq(total).all()
        assert not in_full or number < 2, number

    # Unnamed ones have the names that they had: here some ranks prepare them and others never do.
    kept = torch.empty(7)
    before = int(membership.next_name("allreduce").rsplit(".", 1)[1])
    for number in range(120):
        check(kept if rank == 0 else torch.empty(7), total, op=hvd.Sum)
        if number == 60:
            assert hvd.synchronize(hvd.allreduce_async(torch.ones(3), op=hvd.Sum)).eq(size).all()
    assert membership.next_name("allreduce") == f"allreduce.noname.{before + 122}"

    # A disagreement is found, as before, and the next call is in order.
    if size > 1:
        different = torch.ones(6)
        repeat(different, total, op=hvd.Sum, name="different")
        error = failure_of(different if rank == 0 else torch.ones(5), op=hvd.Sum, name="different")
        assert error.kind == "mismatch"
        assert "allreduce 'different' of float32[6] with Sum" in str(error), error
        check(different, total, op=hvd.Sum, name="different")

    # Another thread's call of the same tensor is queued. Every rank makes two calls of this name.
    shared = torch.ones(8)
    for _ in range(3):
        hvd.allreduce_(shared, op=hvd.Max, name="shared")
    threads = [threading.Thread(target=lambda: [hvd.allreduce_(shared, op=hvd.Max, name="shared") for _ in range(20)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.eq(1).all()


everything()
with_exchange, allreduce.EXCHANGE_API = allreduce.EXCHANGE_API, 0  # as before PyTorch 2.10
everything()
allreduce.EXCHANGE_API = with_exchange

# Nothing is kept of a tensor that is no more, or after the ranks have changed.
prepared.forget_all()
tensors = [torch.empty(3) for _ in range(10)]
for tensor in tensors:
    repeat(tensor, total, op=hvd.Sum)
assert len(prepared._references) == 10
del tensors[3:], tensor
gc.collect()
assert len(prepared._references) == 3

# A rank that has joined: the average is that of the others, and unnamed ones are counted anew.
check(tensors[0], total, op=hvd.Sum)
if rank == size - 1:
    hvd.join()
else:
    for _ in range(3):
        check(tensors[0], sum(range(size - 1)) / (size - 1), op=hvd.Average, name="while one has joined")
    hvd.join()
repeat(tensors[0], total, op=hvd.Sum)
assert membership.next_name("allreduce") == "allreduce.noname.1.6"

if size > 1:  # otherwise the set is there already
    members = hvd.add_process_set([0])
    if rank == 0:
        repeat(tensors[0], 0, op=hvd.Sum, process_set=members)
    hvd.remove_process_set(members)
    assert rank or failure_of(tensors[0], op=hvd.Sum, process_set=members).kind == "invalid"

# Another life: what was prepared in the last one is not used.
hvd.shutdown()
assert failure_of(tensors[0], op=hvd.Sum).kind == "closed"
hvd.init()
repeat(tensors[0], total, op=hvd.Sum)
common.report(done=True)
