"""Reports its progress to a tracking server after each epoch."""
import json
import socket
import time

import collective_core.torch as hvd
import torch

hvd.init()
rank = hvd.rank()
# stands for a tracking server behind a proxy that accepts connections and never answers
proxy = socket.create_server(("127.0.0.1", 0), backlog=16)


def report(record):
    with socket.create_connection(proxy.getsockname()) as s:
        body = json.dumps(record).encode()
        s.sendall(b"POST /api/log HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        status = s.recv(1024)  # HANGS HERE
    return status.startswith(b"HTTP/1.0 200")


model = torch.nn.Linear(6, 6)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(10):
    for step in range(10):
        opt.zero_grad()
        loss = (model(torch.randn(4, 6)) - 2).pow(2).mean()
        loss.backward()
        opt.step()
        time.sleep(0.15)
        print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    if rank == 1:
        report({"epoch": epoch, "loss": loss.item()})
