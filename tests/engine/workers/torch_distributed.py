"""Every collective of torch.distributed on the backend `collective`, held against the same on Gloo. Reports what differs."""

import datetime
import warnings

import common
import torch
import torch.distributed as dist

warnings.simplefilter("ignore", FutureWarning)  # names of older versions of PyTorch, which programs use
dist.init_process_group("collective", timeout=datetime.timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
everyone = list(range(size))
gloo = dist.new_group(everyone, backend="gloo")
ours = dist.new_group(everyone)
odd = [dist.new_group([each]) for each in everyone][rank]
ends = dist.new_group([0, size - 1])
different = []


def values(*shape, dtype=torch.float32, seed=0):
    """Whole numbers, so that the order of sums does not matter."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def compare(name, call):
    """`call(group)` returns tensors."""
    found = [[part.clone() for part in call(group)] for group in (ours, gloo)]
    if len(found[0]) != len(found[1]) or not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True)):
        different.append(f"{name}: {found}")


def reduced(op, dtype, *shape):
    def call(group):
        tensor = values(*shape, dtype=dtype)
        dist.all_reduce(tensor, op=op, group=group)
        return [tensor]

    return call


R = dist.ReduceOp
for op in (R.SUM, R.MIN, R.MAX, R.PRODUCT):
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16, torch.bfloat16):
        compare(f"all_reduce {op} {dtype}", reduced(op, dtype, 3, 5))
for op in (R.BAND, R.BOR, R.BXOR):
    compare(f"all_reduce {op}", reduced(op, torch.int32, 7))
for shape in ((), (0,), (1,), (1 << 18,)):
    compare(f"all_reduce of {shape}", reduced(R.SUM, torch.float32, *shape))


def complex_sum(group):
    tensor = torch.complex(values(4), values(4, seed=1))
    dist.all_reduce(tensor, group=group)
    return [tensor]


def transposed_sum(group):
    tensor = values(3, 4).t()
    dist.all_reduce(tensor, group=group)
    return [tensor]


def lazy_views(group):
    """Tensors whose bits are not their values, as inputs and outputs; what Gloo cannot sum is given to it plain."""

    def view():
        numbers = torch.complex(values(1), values(1, seed=1) + 1)
        return numbers.conj().imag

    summed, sent = (view() if group is ours else view().clone() for _ in range(2))
    dist.all_reduce(summed, group=group)
    dist.broadcast(sent, 1, group=group)
    gathered = [view() for _ in everyone]
    dist.all_gather(gathered, view().clone(), group=group)
    into = torch.zeros(size, dtype=torch.complex64).conj().imag if group is ours else torch.zeros(size)
    dist.all_gather_into_tensor(into, view().clone(), group=group)
    part = view() if group is ours else view().clone()
    dist.reduce_scatter_tensor(part, torch.cat([view()] * size), group=group)
    strided = values(4)[1::3][:1]
    dist.broadcast(strided, 0, group=group)
    return [summed, sent, *gathered, into, part, strided]


def several_together(group):
    """Collectives that _start_coalescing starts together, as CUDA's are; Gloo does not know that for CPU tensors."""
    tensors, message = [values(3), values(2, 2, seed=1)], torch.zeros(1)
    with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu") if group is ours else None, async_ops=True) as under_way:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    under_way.wait()
    if group is ours:
        group._start_coalescing(torch.device("cpu"))
        started = [dist.isend(torch.full((1,), float(rank)), (rank + 1) % size, group), dist.irecv(message, (rank - 1) % size, group)]
        started.append(dist.all_reduce(tensors[0].clone(), group=group, async_op=True))
        group._end_coalescing(torch.device("cpu")).wait()
        if not all(each.is_completed() for each in started) or message.item() != (rank - 1) % size:
            different.append(f"started together: {message}")
    return tensors


def sparse_sum(group):
    tensor = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def several_sums(group):
    tensors = [values(3), values(2, 2, seed=1)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def sum_on_one(group):
    tensor = values(5)
    dist.reduce(tensor, size - 1, group=group)
    return [tensor] if rank == size - 1 else []


def broadcasts(group):
    tensors = [values(4, dtype=torch.bool), torch.complex(values(2), values(2)), values(3).t()]
    for tensor in tensors:
        dist.broadcast(tensor, size - 1, group=group)
    return tensors


def gathers(group):
    equal = [torch.zeros(2, 3) for _ in everyone]
    dist.all_gather(equal, values(2, 3), group=group)
    flat = torch.zeros(size * 4, dtype=torch.int64)
    dist.all_gather_into_tensor(flat, values(4, dtype=torch.int64), group=group)
    on_one = [torch.zeros(3) for _ in everyone] if rank == 0 else None
    dist.gather(values(3), on_one, dst=0, group=group)
    return [*equal, flat, *(on_one or [])]


def large_gathers(group):
    """Into the output where it lies: from elsewhere, and where the input is this rank's part of it."""
    length, mine = 50_001, dist.get_rank(group)
    flat, in_place = torch.zeros(size * length), torch.zeros(size * length)
    dist.all_gather_into_tensor(flat, values(length), group=group)
    own_part = in_place[mine * length : (mine + 1) * length]
    own_part.copy_(values(length, seed=1))
    dist.all_gather_into_tensor(in_place, own_part, group=group)
    return [flat, in_place]


def scatters(group):
    part = torch.zeros(3)
    dist.scatter(part, [values(3, seed=each) for each in everyone] if rank == 1 else None, src=1, group=group)
    return [part]


def reduce_scatters(group):
    one, whole = torch.zeros(3), torch.zeros(2)
    dist.reduce_scatter(one, [values(3, seed=each) for each in everyone], group=group)
    dist.reduce_scatter_tensor(whole, values(2 * size), group=group)
    large = [torch.zeros(40_003, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    for part in large:
        dist.reduce_scatter_tensor(part, values(len(part) * size, dtype=part.dtype), group=group)
    return [one, whole, *large]


def exchanges(group):
    out = torch.zeros(size, 2)
    dist.all_to_all_single(out, values(size, 2), group=group)
    splits = [each + 1 for each in everyone]
    uneven = torch.zeros(sum([rank + 1] * size))
    dist.all_to_all_single(uneven, values(sum(splits)), [rank + 1] * size, splits, group=group)
    return [out, uneven]


def messages(group):
    right, left = (rank + 1) % size, (rank - 1) % size
    got, more = torch.zeros(1 << 16), torch.zeros(3, dtype=torch.int64)
    sent = [
        dist.isend(torch.full((1 << 16,), float(rank)), right, group=group, tag=1),
        dist.isend(torch.tensor([rank] * 3), right, group=group, tag=2),
    ]
    dist.recv(more, left, group=group, tag=2)  # the second one first
    dist.recv(got, left, group=group, tag=1)
    for work in sent:
        work.wait()
    both = [dist.P2POp(dist.isend, got, left, group), dist.P2POp(dist.irecv, torch.zeros(1 << 16), right, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return [got, more, both[1].tensor]


def from_anyone(group):
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, group=group)
        return []
    got, whom = [torch.zeros(2) for _ in everyone[1:]], []
    for tensor in got:
        whom.append(dist.recv(tensor, group=group))
    assert [float(tensor[0]) for tensor in got] == whom
    return [torch.tensor(sorted(whom))]


CALLS = (
    *(complex_sum, transposed_sum, sparse_sum, several_sums, sum_on_one, broadcasts, gathers, large_gathers, scatters, reduce_scatters),
    *(messages, from_anyone, lazy_views, several_together),
)
for call in CALLS:
    compare(call.__name__, call)
compare("exchanges", exchanges)

average = values(6)
dist.all_reduce(average, op=R.AVG)
total = values(6)
dist.all_reduce(total)
if not torch.equal(average, total / size):
    different.append(f"average: {average}")

# Operations that overlap, with a future each: they end in the order in which they began.
tensors, ended = [values(1000, seed=each) for each in range(8)], []
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
futures = [work.get_future().then(lambda _, number=number: ended.append(number)) for number, work in enumerate(works)]
torch.futures.wait_all(futures)
if ended != list(range(8)) or not all(work.is_completed() for work in works):
    different.append(f"futures: {ended}")

# A group of this rank alone, one of two, and objects.
alone = values(3)
dist.all_reduce(alone, group=odd)
if not torch.equal(alone, values(3)):
    different.append("a group of one")
if rank in (0, size - 1):
    two = torch.ones(2)
    dist.all_reduce(two, group=ends)
    if two.tolist() != [min(size, 2)] * 2:
        different.append(f"a group of the first and the last: {two}")
gathered, scattered = [None] * size, [None]
dist.all_gather_object(gathered, {"rank": rank})
dist.scatter_object_list(scattered, everyone if rank == 0 else None, src=0)
if gathered != [{"rank": each} for each in everyone] or scattered != [rank]:
    different.append(f"objects: {gathered} {scattered}")
dist.barrier()
dist.destroy_process_group()

dist.init_process_group("cpu:collective")  # once more, by another name
again = torch.ones(3)
dist.all_reduce(again)
dist.destroy_process_group()
common.report(different=different, again=again.tolist(), backend=dist.Backend.COLLECTIVE)
