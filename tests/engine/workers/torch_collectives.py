"""Every collective × element type × size against NumPy in float64 (integers: in their own arithmetic)."""

import collective_core.torch as hvd
import common
import numpy as np
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
checked = 0
EXACT = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
#: Relative error of one rounding, times the ranks' additions.
PRECISION = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-7, torch.float64: 1e-15}
REDUCE = {hvd.Sum: np.add, hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}
BOOLEAN = {hvd.Sum: np.logical_or, hvd.Max: np.logical_or, hvd.Min: np.logical_and, hvd.Product: np.logical_and}


def values(r, shape, dtype):
    generator = torch.Generator().manual_seed(1000 * r + int(np.prod(shape)))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype) * torch.randint(-1, 2, shape, generator=generator)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, shape, generator=generator).to(dtype)


def wide(tensor):
    return tensor.to(torch.float64).numpy() if tensor.dtype.is_floating_point else tensor.numpy()


def reduced(parts, op, dtype):
    """The reduction in float64, or in the integers' own wrapping arithmetic."""
    function = BOOLEAN[op] if dtype is torch.bool else REDUCE[hvd.Sum if op == hvd.Average else op]
    total = wide(parts[0])
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            total = function(total, wide(part))
    if op == hvd.Average:
        return total / size if dtype.is_floating_point else np.trunc(total / size)
    return total


def check(label, got, want, dtype):
    global checked
    checked += 1
    assert got.dtype == dtype, (label, got.dtype, dtype)
    assert tuple(got.shape) == want.shape, (label, got.shape, want.shape)
    if dtype in EXACT:
        assert np.array_equal(got.numpy(), want), label
    else:
        scale = np.abs(want) + size  # summands are of size 1: an error relative to them where they cancel
        assert (np.abs(wide(got) - want) <= PRECISION[dtype] * size * scale).all(), (label, np.abs(wide(got) - want).max())


def split_rows(rows):
    return [rows // size + (1 if r < rows % size else 0) for r in range(size)]


DTYPES = (*EXACT, *PRECISION)
SHAPES = [(0, 3), (1,), (size, 2), (7, 5), (1031,), (4 * size + 1, 700)]
for dtype in DTYPES:
    large = [(600_001 // size * size + 1, 2)] if dtype in (torch.float32, torch.bfloat16, torch.uint8) else []
    for shape in SHAPES + large:
        everyone = [values(r, shape, dtype) for r in range(size)]
        mine = everyone[rank]
        keep = mine.clone()
        label = f"{dtype}{shape}"
        ops = [hvd.Sum, hvd.Min, hvd.Max, hvd.Product] + ([] if dtype is torch.bool else [hvd.Average])
        for op in [hvd.Sum] if shape in large else ops:
            want = reduced(everyone, op, dtype)
            check(f"allreduce {op} {label}", hvd.allreduce(mine, op=op), want, dtype)
            rows = split_rows(shape[0])
            part = want[sum(rows[:rank]) : sum(rows[: rank + 1])]
            check(f"reducescatter {op} {label}", hvd.reducescatter(mine, op=op), part, dtype)
            if op == hvd.Sum:
                check(f"allreduce_ {label}", hvd.allreduce_(mine.clone(), op=op), want, dtype)
                both = hvd.synchronize(hvd.grouped_allreduce_async([mine, mine[:1]], op=op, name=f"g {label}"))
                check(f"grouped {label}", both[0], want, dtype)
                check(f"grouped {label}", both[1], want[:1], dtype)
                handle = hvd.grouped_reducescatter_async([mine, mine], op=op, name=f"rs {label}")
                for result in hvd.synchronize(handle):
                    check(f"grouped reducescatter {label}", result, part, dtype)
                for result in hvd.grouped_reducescatter([mine, mine], op=op):
                    check(f"grouped reducescatter {label}", result, part, dtype)
        root = shape[0] % size
        check(f"broadcast {label}", hvd.broadcast(mine, root), wide(everyone[root]), dtype)
        check(f"broadcast_ {label}", hvd.broadcast_(mine.clone(), root), wide(everyone[root]), dtype)

        def rows_of(r, s=shape):
            return min(s[0], s[0] * (r + 1) // size)

        gathered = np.concatenate([wide(everyone[r][: rows_of(r)]) for r in range(size)])
        check(f"allgather {label}", hvd.allgather(mine[: rows_of(rank)]), gathered, dtype)
        for result in hvd.grouped_allgather([mine[: rows_of(rank)]] * 2, name=f"ga {label}"):
            check(f"grouped allgather {label}", result, gathered, dtype)

        # Rank r sends uneven parts, some of them empty: what it has is dealt out starting at rank r.
        def splits_of(r, s=shape):
            dealt = [s[0] * (k + 1) // (size + 1) - s[0] * k // (size + 1) for k in range(size - 1)]
            dealt.append(s[0] - sum(dealt))
            return [dealt[(k + r) % size] for k in range(size)]

        pieces = [wide(everyone[r])[sum(splits_of(r)[:rank]) : sum(splits_of(r)[: rank + 1])] for r in range(size)]
        got, rows = hvd.alltoall(mine, splits=torch.tensor(splits_of(rank), dtype=torch.int32))
        check(f"alltoall splits {label}", got, np.concatenate(pieces), dtype)
        assert rows.tolist() == [splits_of(r)[rank] for r in range(size)], label
        even = [part[: shape[0] // size * size] for part in everyone]
        share = shape[0] // size
        pieces = [wide(part)[rank * share : (rank + 1) * share] for part in even]
        check(f"alltoall {label}", hvd.synchronize(hvd.alltoall_async(even[rank]))[0], np.concatenate(pieces), dtype)
        assert torch.equal(mine, keep), f"{label}: an input was changed"

# Scaling, of integers too: each input before the sum, the sum after it, rounded towards zero.
for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8):
    everyone = [values(r, (50,), dtype) for r in range(size)]
    for before, after in ((0.5, 1.0), (1.0, 2.5), (1.5, 0.25)):
        parts = [wide(part) * before for part in everyone]
        if dtype in EXACT:
            parts = [np.trunc(part).astype(wide(everyone[0]).dtype) for part in parts]
        total = sum(parts[1:], parts[0])
        want = total * after
        want = np.trunc(want).astype(total.dtype) if dtype in EXACT else want
        got = hvd.allreduce(everyone[rank], op=hvd.Sum, prescale_factor=before, postscale_factor=after)
        check(f"scaled {dtype} {before} {after}", got, want, dtype)
        handle = hvd.reducescatter_async(everyone[rank], op=hvd.Sum, prescale_factor=before, postscale_factor=after)
        rows = split_rows(50)
        check(f"scaled {dtype}", hvd.synchronize(handle), want[sum(rows[:rank]) : sum(rows[: rank + 1])], dtype)

# Gradients.
x = torch.ones(5 * size, 2, requires_grad=True)
(hvd.reducescatter(x, op=hvd.Sum) * float(rank + 1)).sum().backward()
assert torch.equal(x.grad, torch.arange(1.0, size + 1).repeat_interleave(5).unsqueeze(1).expand(-1, 2) * size)
x = torch.ones(size * 3, 2, requires_grad=True)
(hvd.alltoall(x) * float(rank + 1)).sum().backward()
assert torch.equal(x.grad, torch.arange(1.0, size + 1).repeat_interleave(3).unsqueeze(1).expand(-1, 2))
x = torch.ones(rank + size, requires_grad=True)
received, _ = hvd.alltoall(x, splits=[rank + 1] + [1] * (size - 1))
(received * 2.0).sum().backward()
assert torch.equal(x.grad, torch.full((rank + size,), 2.0))
pair = [torch.full((2,), float(rank), requires_grad=True), torch.ones(3, requires_grad=True)]
sum(part.sum() for part in hvd.grouped_allreduce(pair)).backward()
assert torch.equal(pair[0].grad, torch.ones(2))
assert torch.equal(pair[1].grad, torch.ones(3))
common.report(checked=checked)
hvd.shutdown()
