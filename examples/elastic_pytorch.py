"""A training whose ranks come and go: one that dies costs nothing that was committed, and another takes its place.

    python -m collective_core.launch --min-np 1 -np 2 examples/elastic_pytorch.py
    provision run --hosts hosts.ini --min-np 2 python examples/elastic_pytorch.py

Kill a rank while it trains, and watch the others go on. The data are made here: two spirals that a small network tells apart.
"""

from __future__ import annotations

import argparse
import math
import os
import time

import collective_core.torch as hvd
import torch
from torch import nn


def make_spirals(points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points (n, 2) and which of two spirals each is on (n)."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(points) % 2
    turn = torch.rand(points, generator=generator).sqrt() * 2 * math.pi
    angle = turn + labels * math.pi
    where = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / math.pi
    return where + 0.05 * torch.randn(points, 2, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each epoch, to have time to kill a rank")
    options = parser.parse_args()

    hvd.init()
    print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()}", flush=True)
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # The optimizer averages the gradients over the ranks that there are in that step.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.utils.data.TensorDataset(*make_spirals(1000))
    sampler = hvd.elastic.ElasticSampler(data)  # deals out again, among those who are there, what of an epoch is left

    def train_epoch() -> float:
        """The mean loss of the points of all ranks, as far as they were not done before the ranks changed."""
        total = torch.zeros(2)
        for batch, (points, labels) in enumerate(torch.utils.data.DataLoader(data, batch_size=50, sampler=sampler)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
            sampler.record_batch(batch, len(labels))
        summed, points_seen = hvd.allreduce(total, op=hvd.Sum, name="loss").tolist()
        return summed / points_seen

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        """Begins again from the last commit when the ranks have changed."""
        while state.epoch < options.epochs:
            loss = train_epoch()
            if hvd.rank() == 0 and state.epoch % 5 == 0:
                print(f"epoch {state.epoch}: loss {loss:.4f} on {hvd.size()} ranks", flush=True)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            time.sleep(options.pause)
            state.commit()  # what others would lose with this rank is what came after it

    train(hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler))
    points, labels = data.tensors
    with torch.no_grad():
        accuracy = (model(points.to(device)).argmax(dim=1) == labels.to(device)).float().mean().item()
        weights = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)


if __name__ == "__main__":
    main()
