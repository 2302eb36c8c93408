"""A tensor of more than 2^31 bytes: what lies around that boundary, at both ends and between them arrives, and arrives once."""

import collective_core.torch as hvd
import common
import torch

LENGTH = (1 << 31) + 17
#: Where every element has a value of its own: the beginning, and from before the boundary to the end.
EDGES = (slice(0, 100), slice((1 << 31) - 100, LENGTH))

hvd.init()
rank, size = hvd.rank(), hvd.size()
x = torch.full((LENGTH,), 1 + rank, dtype=torch.uint8)


def edge(part, seed):
    return (torch.arange(part.start, part.stop) * 7 + seed).to(torch.uint8)


def check(between, edges):
    assert (x[100 : (1 << 31) - 100 : 1021] == between).all()  # a few in every page
    for part, want in zip(EDGES, edges, strict=False):
        assert torch.equal(x[part], want), (part, x[part], want)


for part in EDGES:
    x[part] = edge(part, rank)
hvd.allreduce_(x, op=hvd.Sum, name="large")
check(sum(range(1, size + 1)), [sum(edge(part, r) for r in range(size)) for part in EDGES])
if rank == 0:
    x.fill_(5)
    for part in EDGES:
        x[part] = edge(part, 50)
hvd.broadcast_(x, 0, name="large")
check(5, [edge(part, 50) for part in EDGES])
common.report(bytes=x.numel())
hvd.shutdown()
