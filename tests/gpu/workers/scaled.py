"""Mixed precision with GradScaler: a gradient overflows on one rank, and all ranks skip that step, also with a fused optimizer."""

import busy
import collective_core.torch as hvd
import torch

hvd.init()
busy.choose_gpu()
rank = hvd.rank()
for make, options in ((torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True}), (torch.optim.SGD, {"fused": True})):
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = hvd.DistributedOptimizer(make(model.parameters(), lr=0.01, **options), named_parameters=model.named_parameters())
    scaler = hvd.GradScaler()
    scales = []
    for step in range(4):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 256, device="cuda")).float().square().mean()
        if step == 2 and rank == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(before, model.weight) == (step == 2), (make, options, step)
    assert scales[2] == scales[1] / 2, scales
    weights = hvd.allgather_object(model.weight.double().sum().item())
    assert len(set(weights)) == 1, weights
print("REPORT", rank, flush=True)
