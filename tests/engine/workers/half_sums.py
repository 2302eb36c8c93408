"""Sums of half types among hosts: the bits of hosts' sums in their order, and within the bound that the documentation states.

Several ranks per host. Tensors that travel with their headers, in few steps, and over the mesh.
"""

import hashlib
import math

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size, hosts = hvd.rank(), hvd.size(), common.HOSTS
each = size // hosts
rounded = 0
digest = hashlib.sha256()


def added(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def expected(parts, op):
    """Hosts' means, each rounded once (in units of a power of two), added in float32, and rounded."""
    divisor = size if op == hvd.Average else 1
    if hosts == 1:
        return (added(parts) / divisor).to(parts[0].dtype)
    scale = 0.5 ** math.ceil(math.log2(each))
    of_hosts = [(added(parts[first : first + each]) * scale).to(parts[0].dtype) for first in range(0, size, each)]
    return (added(of_hosts) / divisor * (1 / scale)).to(parts[0].dtype)


def bound(parts, op):
    """u (|sum| + (1 + u) |sums of hosts|), float32's own errors and the type's smallest number; of an average a part of it."""
    u = torch.finfo(parts[0].dtype).eps / 2
    wide = [part.double() for part in parts]
    of_hosts = sum(abs(sum(wide[first : first + each])) for first in range(0, size, each))
    most = u * (abs(sum(wide)) + (1 + u) * of_hosts) + size * 2.0**-23 * sum(abs(part) for part in wide)
    most += size * 1.5 * torch.finfo(parts[0].dtype).smallest_normal * 2 * u
    return most / size if op == hvd.Average else most


def reduced(value, **how):
    """The same for small and large tensors: of this rank's number, as float16."""
    results = {hvd.allreduce(torch.full((count,), value, dtype=torch.float16), **how)[-1].item() for count in (200, 40_001)}
    assert len(results) == 1, (results, how)
    return results.pop()


for dtype in (torch.bfloat16, torch.float16):
    for count in (200, 20_001, 1_400_003):
        everyone = [torch.from_numpy(common.values(r, count, "float32")).to(dtype) for r in range(size)]
        for op in (hvd.Sum, hvd.Average):
            got = hvd.allreduce(everyone[rank], op=op)
            assert torch.equal(got, expected(everyone, op)), (dtype, count, op)
            exact = sum(part.double() for part in everyone) / (size if op == hvd.Average else 1)
            assert bool((abs(got.double() - exact) <= bound(everyone, op)).all()), (dtype, count, op)
            rounded += int((got != exact.to(dtype)).sum())
            part = hvd.allreduce(everyone[rank][count // 3 : count // 2], op=op)
            assert torch.equal(part, got[count // 3 : count // 2]), "the bits depend on how a tensor is cut"
            digest.update(got.view(torch.uint8).numpy().tobytes())
    for count in (200, 20_001):
        everyone = [torch.from_numpy(common.values(r, count, "float32")).to(dtype) for r in range(size)]
        assert torch.equal(hvd.allreduce(everyone[rank], op=hvd.Min), torch.stack(everyone).min(0).values)
        for factor in (1 / 3, -1 / 3):
            most = torch.stack([part.float() * factor for part in everyone]).max(0).values.to(dtype)
            assert torch.equal(hvd.allreduce(everyone[rank], op=hvd.Max, prescale_factor=factor), most)
assert reduced(100.0, op=hvd.Average, prescale_factor=1000.0, postscale_factor=1 / 1000) == 100.0
assert reduced(40_000.0, op=hvd.Sum, postscale_factor=1 / size) == 40_000.0
assert abs(reduced(2e-6, op=hvd.Average, prescale_factor=1 / 64, postscale_factor=64.0) - 2e-6) < 2e-7
assert abs(reduced(1e-4 if rank < size // 2 else 1e4, op=hvd.Product) - 1) < 0.01 * size or size % 2
largest = torch.full((20_001,), torch.finfo(torch.float16).max, dtype=torch.float16)
assert torch.equal(hvd.allreduce(largest), largest), "a mean of large numbers is not finite"
common.report(digest=digest.hexdigest(), rounded=rounded)
hvd.shutdown()
