"""Training with autotune: argv: steps. Reports the final parameters' digest and the bucket size in use."""

import hashlib
import sys

import collective_core.torch as hvd
import common
import torch

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(6)])  # 3.8 MB
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
generator = torch.Generator().manual_seed(hvd.rank())
sizes = []
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(2, 400, generator=generator)).pow(2).mean().backward()
    optimizer.step()
    sizes.append(len(optimizer._reducer.buckets))
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
tuner = optimizer._reducer.tuner
chosen = tuner.size if tuner else None
common.report(digest=digest, buckets=sorted(set(sizes)), size=chosen, is_final=bool(tuner and tuner._tuner.chosen))
