"""Complex tensors: every collective, gradients, and a model that trains like one process with the whole batch."""
# ruff: noqa: PT017 - worker scripts run without pytest

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(7)  # every rank knows all ranks' values


def refused(call, *texts):
    try:
        call()
    except hvd.HorovodInternalError as error:
        assert error.kind in ("invalid", "mismatch"), error.kind
        assert all(text in str(error) for text in texts), (texts, str(error))
        return
    raise AssertionError(f"accepted, where {texts} was expected")


def check(got, want):
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


for dtype in (torch.complex64, torch.complex128):
    for shape in ((2 * size, 3), (1031 * size,), (4 * size, 2, 1, 2, 1, 2, 1, 2), (0,), ()):
        everyone = [torch.randn(shape, dtype=dtype) for _ in range(size)]
        total, mine = sum(everyone), everyone[rank]
        check(hvd.allreduce(mine), total / size)
        check(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 2 * total)
        check(hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum)), total)
        check(hvd.synchronize(hvd.allreduce_async_(mine.clone(), op=hvd.Sum)), total)
        repeated = mine.clone()
        for _ in range(4):  # prepared from the third call on
            check(hvd.allreduce_(repeated.copy_(mine), op=hvd.Sum), total)
        check(hvd.broadcast(mine, size - 1), everyone[-1])
        check(hvd.broadcast_(mine.clone(), 0), everyone[0])
        if shape:
            check(hvd.allgather(mine), torch.cat(everyone))
            check(hvd.alltoall(mine), torch.cat([each.tensor_split(size)[rank] for each in everyone]))
            check(hvd.reducescatter(mine, op=hvd.Sum), total.tensor_split(size)[rank])
        if len(shape) == 2:
            sparse = hvd.sparse_allreduce_async(mine.to_sparse(1), None, hvd.Sum)
            check(hvd.synchronize(sparse).to_dense(), total)
            # Conjugates and transposed ones, whose memory holds other numbers or another order.
            some = [each.conj() if r % 2 else each for r, each in enumerate(everyone)]
            check(hvd.allreduce(some[rank], op=hvd.Sum), sum(some))
            check(hvd.allgather(mine.mH), torch.cat([each.mH for each in everyone]))
            for function, want in ((hvd.allreduce_, total / size), (lambda x: hvd.broadcast_(x, 0), everyone[0])):
                memory = mine.conj().resolve_conj() if rank % 2 else mine.clone()
                function(memory.conj() if rank % 2 else memory)
                check(memory, want.conj() if rank % 2 else want)
        if size == 1:
            continue
        for op in (hvd.Min, hvd.Max, hvd.Product):
            refused(lambda op=op, mine=mine: hvd.allreduce(mine, op=op), f"op='{op}' is not defined for complex", "use Sum or Average")
        refused(lambda mine=mine: hvd.allreduce(mine, op=hvd.Adasum), "Adasum needs a floating-point tensor", str(dtype))
        for function in (hvd.allreduce, lambda x, name: hvd.broadcast(x, 0, name)):
            pairs = torch.view_as_real(mine)
            refused(lambda f=function, p=pairs, mine=mine: f(p if rank else mine, name="pairs"), "the ranks ask for different things")

mixed = [torch.full((3,), complex(rank, r)) if r % 2 else torch.full((3,), float(rank)) for r in range(8)]
of_ranks = float(sum(range(size)))
for number, got in enumerate(hvd.grouped_allreduce(mixed, op=hvd.Sum)):
    check(got, torch.full((3,), complex(of_ranks, number * size)) if number % 2 else torch.full((3,), of_ranks))
for number, got in enumerate(hvd.grouped_allgather(mixed)):
    check(got, torch.cat([torch.full((3,), complex(r, number)) if number % 2 else torch.full((3,), float(r)) for r in range(size)]))

# Gradients: of the sum over ranks those of one process that has all ranks' tensors.
weights = [torch.randn(2 * size, dtype=torch.complex128) for _ in range(size)]
inputs = [torch.randn(2 * size, dtype=torch.complex128, requires_grad=True) for _ in range(size)]
for call, alone in (
    (lambda x: hvd.allreduce(x, op=hvd.Sum), sum),
    (hvd.alltoall, lambda xs: [torch.cat([x.tensor_split(size)[r] for x in xs]) for r in range(size)]),
):
    (got,) = torch.autograd.grad((weights[rank].conj() * call(inputs[rank])).real.square().sum(), inputs[rank])
    results = alone(inputs)
    results = results if isinstance(results, list) else [results] * size
    want = torch.autograd.grad(sum((w.conj() * y).real.square().sum() for w, y in zip(weights, results, strict=True)), inputs)[rank]
    check(got, want)


class Net(torch.nn.Module):
    """A complex part and a real one; gradients of the complex one that autograd leaves to be conjugated, one of over a megabyte."""

    def __init__(self, dtype):
        super().__init__()
        self.spectrum = torch.nn.Parameter(torch.randn(8, 4, dtype=dtype))
        self.phases = torch.nn.Parameter(torch.randn(150_000, dtype=dtype))
        self.last = torch.nn.Linear(4, 2).to(self.spectrum.real.dtype)

    def forward(self, x):
        turned = x.to(self.spectrum.dtype) @ self.spectrum.conj()
        shifts = torch.linspace(1, 2, len(self.phases)).to(self.phases.dtype) * 1j
        return self.last(turned.abs()) + 1e-3 * (self.phases.conj() * shifts).real.sum()


batch = 12
mine = slice(rank * batch // size, (rank + 1) * batch // size)
for dtype, options in (
    (torch.complex64, {}),
    (torch.complex128, {"backward_passes_per_step": 2, "gradient_as_bucket_view": False}),
    (torch.complex64, {"compression": hvd.Compression.bf16}),
    (torch.complex64, {"groups": 1}),
):
    models = []
    for share, seed in ((slice(None), 0), (mine, rank)):
        torch.manual_seed(seed)
        model = Net(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # Adam alone takes no gradient to be conjugated
        if share is mine:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
            hvd.broadcast_parameters(model.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(4):
            optimizer.zero_grad()
            for again in range(options.get("backward_passes_per_step", 1)):
                generator = torch.Generator().manual_seed(2 * step + again)
                x = torch.randn(batch, 8, generator=generator, dtype=model.last.weight.dtype)
                model(x[share]).square().mean().backward()
            optimizer.step()
        models.append(model)
    tolerance = 2e-2 if "compression" in options else 1e-4
    for want, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 10)
    for parameter in models[1].parameters():
        everyone = hvd.allgather(parameter.detach().unsqueeze(0))
        assert all(torch.equal(each, everyone[0]) for each in everyone), "the replicas differ"
common.report(done=True)
hvd.shutdown()
