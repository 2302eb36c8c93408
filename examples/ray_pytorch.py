"""A PyTorch training on a Ray cluster: one actor per rank, in a placement group, which Ray gives as a whole or not at all.

    pip install ray cloudpickle
    python examples/ray_pytorch.py                       # a Ray of its own on this machine
    python examples/ray_pytorch.py --address auto        # the cluster of this machine

Each rank trains a small network on its part of data that it makes, and the driver gets what every rank returned.
"""

from __future__ import annotations

import argparse

import ray

from collective_core import Runner


def train(epochs: int) -> tuple[list[float], list[float]]:
    """Runs on every rank, in a process of its own beside its actor; returns losses and parameters. What it needs is imported here."""
    import collective_core.torch as hvd
    import torch

    hvd.init()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(1024, 1, generator=generator) * 6 - 3
    own = torch.utils.data.TensorDataset(inputs[hvd.rank() :: hvd.size()], inputs[hvd.rank() :: hvd.size()].sin())
    loader = torch.utils.data.DataLoader(own, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(hvd.rank()))

    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all begin with the same model
    losses = []
    for epoch in range(epochs):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        if hvd.rank() == 0 and epoch % 10 == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    return losses, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a Ray cluster, or auto; without it a Ray of its own is started")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()

    own = {} if options.address else {"num_cpus": options.ranks, "include_dashboard": False}
    ray.init(address=options.address, log_to_driver=False, **own)
    results = Runner(np=options.ranks, ray={"CPU": 1.0}).run(train, epochs=options.epochs)
    ray.shutdown()
    losses, parameters = results[0]
    if any(result != (losses, parameters) for result in results):
        raise SystemExit("the ranks have trained apart")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.4f} at last, on {len(results)} ranks")


if __name__ == "__main__":
    main()
