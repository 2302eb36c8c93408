import time

import collective_core.torch as hvd
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

validators = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[validators])
x = torch.randn(450, 5)
data = TensorDataset(x, x @ torch.arange(1.0, 6.0))
mine = Subset(data, range(hvd.rank(), len(data), hvd.size()))
keep = [i for i in range(len(mine)) if hvd.rank() != 1 or i % 8]  # rank 1's host has a few bad files
loader = DataLoader(Subset(mine, keep), batch_size=10, shuffle=True)

model = torch.nn.Linear(5, 1)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(opt, root_rank=0)

for epoch in range(3):
    total = 0.0
    for step, (a, b) in enumerate(loader):
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(a).squeeze(1), b)
        loss.backward()
        opt.step()
        total += loss.item()
        time.sleep(0.2)
        print(f"rank {hvd.rank()} epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
    if validators.included():
        mean = torch.tensor(total / len(loader))
        mean = hvd.allreduce(mean, name="epoch_loss", process_set=validators)  # HANGS HERE
        print(f"epoch {epoch} mean loss {mean.item():.3f}", flush=True)
