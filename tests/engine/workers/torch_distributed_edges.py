"""Where the backend `collective` has to refuse, to wait or to go on. Two ranks; reports what went wrong."""

import time
from datetime import timedelta

import common
import torch
import torch.distributed as dist
from collective_core.runtime import membership
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

dist.init_process_group("collective", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.group.WORLD
operations = group.operations
wrong = []


def expect(what, text, call):
    """`call` raises an error with this text on every rank, and the group goes on."""
    try:
        call()
    except RuntimeError as error:
        if text not in str(error):
            wrong.append(f"{what}: {error}")
    else:
        wrong.append(f"{what}: no error")
    total = torch.ones(2)
    dist.all_reduce(total)
    if total.tolist() != [float(size)] * 2:
        wrong.append(f"after {what}: {total}")


both = torch.zeros(8, dtype=torch.float16)
output = torch.zeros(4 + (rank == 0))
few = [[torch.zeros(1)]] if rank == 0 else []
expect("another type", "cannot be scattered into", lambda: dist.reduce_scatter_tensor(both[:4], torch.ones(4 * size)))
if both.any():
    wrong.append(f"a reduce_scatter has written {both}")
expect("another size on rank 0", "cannot be scattered into", lambda: dist.reduce_scatter_tensor(output, torch.ones(4 * size)))
expect("too few parts", "are not one for each of", lambda: group.scatter([torch.zeros(1)], few, 0).wait())
expect("too few outputs", "cannot take what", lambda: dist.all_gather([torch.zeros(1)], torch.zeros(1)))
expect("bits of floats", "has no BAND", lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND))
expect("more of one rank", "bytes, and", lambda: dist.all_gather_into_tensor(torch.zeros(4), torch.zeros(1 if rank == 0 else 3)))

# A future with an error does not hold up the next ones, and a message that does not come no operation.
other = 1 - rank
late = torch.zeros(1)
message = dist.irecv(late, other)
pending = message.get_future()
bad, good = dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR, async_op=True).get_future(), torch.ones(2)
done = dist.all_reduce(good, async_op=True).get_future()
done.wait()
try:
    bad.wait()
    wrong.append("bits of floats: no error in the future")
except RuntimeError as error:
    if "has no BXOR" not in str(error):
        wrong.append(str(error))
try:
    dist.all_reduce(torch.ones(2 + rank, dtype=torch.float16), async_op=True).get_future().wait()
    wrong.append("halves of other shapes: no error in the future")
except RuntimeError as error:
    if "the ranks ask for different things" not in str(error):
        wrong.append(str(error))
if pending.done():
    wrong.append("a message came from nowhere")
dist.barrier()
dist.send(torch.tensor([7.0 + rank]), other)
pending.wait()
if late.item() != 7.0 + other:
    wrong.append(f"the message: {late}")

# A message of another length is an error of whoever receives it, and gone.
works = [dist.isend(torch.ones(3), other), dist.isend(torch.full((4,), 2.0), other)]
four = torch.zeros(4)
try:
    dist.recv(four, other)
    wrong.append("another length: no error")
except RuntimeError as error:
    if "sent 12 bytes" not in str(error):
        wrong.append(str(error))
dist.recv(four, other)
if four.tolist() != [2.0] * 4:
    wrong.append(f"after another length: {four}")
for work in works:
    work.wait()

# Autograd is told of tensors that were changed in place (but see broadcast in torch_distributed_as_gloo.py).
for what, call in (
    ("all_reduce", dist.all_reduce),
    ("all_reduce, async", lambda tensor: dist.all_reduce(tensor, async_op=True).wait()),
    ("reduce_scatter", lambda tensor: dist.reduce_scatter_tensor(tensor, torch.ones(2 * size))),
    ("recv", lambda tensor: [work.wait() for work in (dist.isend(torch.ones(2), other), dist.irecv(tensor, other))]),
):
    tensor = torch.ones(2)
    call(tensor)
    if not tensor._version:
        wrong.append(f"{what} does not raise a tensor's version")
negative = torch.tensor([3 + 4j], dtype=torch.complex64).conj().imag
dist.all_reduce(negative)
if negative.tolist() != [-4.0 * size]:
    wrong.append(f"a view that is negated when it is read: {negative}")

# A hook that waits for a future inside the callback of another one.
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
model.register_comm_hook(powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powersgd.powerSGD_hook)
for _ in range(4):
    model(torch.randn(4, 64)).sum().backward()

# A message that does not come in time ends no engine.
impatient = dist.new_group(timeout=timedelta(seconds=5))
try:
    dist.recv(torch.zeros(1), other, group=impatient)
    wrong.append("a message from nowhere: no error")
except RuntimeError as error:
    if "was not taken within 5 s" not in str(error):
        wrong.append(str(error))
dist.barrier()
dist.all_reduce(torch.ones(1), group=impatient)
if not membership.is_healthy():
    wrong.append("a message that does not come has ended the engine")

# Whoever comes late to one monitored barrier is not early for the next.
dist.barrier()
begin = time.monotonic()
if rank == 0:
    try:
        group.monitored_barrier(0.3)
        wrong.append("a monitored barrier: no error")
    except RuntimeError as error:
        if "Rank 1 failed to pass monitoredBarrier" not in str(error):
            wrong.append(str(error))
    common.tell("rank 0 has left the barrier")
    group.monitored_barrier(30)
    if time.monotonic() - begin < 1.5:
        wrong.append("a monitored barrier has not waited")
else:
    common.wait_to_be_told("rank 0 has left the barrier")
    try:
        group.monitored_barrier(0.3)
        wrong.append("a monitored barrier on rank 1: no error")
    except RuntimeError as error:
        if "Rank 1 successfully reached monitoredBarrier" not in str(error):
            wrong.append(str(error))
    time.sleep(1.5)
    group.monitored_barrier(30)

# Calls that are repeated are prepared from the third on, and see what has changed.
repeated = torch.zeros(6)


def sum_again(want, **how):
    """One call, on this rank's number everywhere."""
    repeated.fill_(rank)
    version, number = repeated._version, group._get_sequence_number_for_group()
    dist.all_reduce(repeated, **how)
    if not repeated.eq(want).all() or repeated._version <= version or group._get_sequence_number_for_group() != number + 1:
        wrong.append(f"a repeated call: {repeated}, {want}, version {repeated._version}")


total = float(sum(range(size)))
for _ in range(5):
    sum_again(total)
sum_again(size - 1.0, op=dist.ReduceOp.MAX)
for _ in range(4):
    sum_again(total, group=group)
if operations.run_prepared(torch.zeros(6), 0) or not operations.run_prepared(repeated, 0):
    wrong.append("the call is not prepared")
repeated.resize_(3)
sum_again(total)
asynchronous = dist.all_reduce(repeated.fill_(rank), async_op=True)
asynchronous.wait()
sum_again(total)
expect("a repeated call with another size", "ask for different things", lambda: dist.all_reduce(repeated if rank == 0 else torch.zeros(9)))
sum_again(total)
pair = dist.new_group()
for _ in range(4):
    sum_again(total)
    repeated.fill_(rank)
    dist.all_reduce(repeated, group=pair)
    if not repeated.eq(total).all():
        wrong.append(f"a repeated call of another group: {repeated}")
dist.destroy_process_group(pair)
sum_again(total)

# Groups may go in any order.
first, second = dist.new_group(), dist.new_group()
dist.destroy_process_group(first)
total = torch.ones(1)
dist.all_reduce(total, group=second)
if total.item() != size:
    wrong.append(f"after another group has gone: {total}")
dist.destroy_process_group()
common.report(wrong=wrong)
