"""A PyTorch training on the executors of Spark: one rank per task of a barrier stage, all at once.

    pip install pyspark cloudpickle
    python examples/spark_pytorch.py                                # a Spark with two executors on this machine
    python examples/spark_pytorch.py --master spark://host:7077     # yours, with a --folder that all of its executors have

Spark makes a table; each rank trains on its part of it, and the trained model comes back to the driver.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from pyspark.sql import SparkSession, functions

from collective_core import Runner


def make_table(spark: SparkSession, rows: int, folder: str) -> None:
    """Two inputs and a target, y = 3 x0 - 2 x1 + 1 and a little noise, as CSV."""
    table = spark.range(rows).select(functions.rand(1).alias("x0"), functions.rand(2).alias("x1"), functions.randn(3).alias("noise"))
    target = (3 * table.x0 - 2 * table.x1 + 1 + 0.05 * table.noise).alias("y")
    table.select(table.x0, table.x1, target).write.csv(folder, mode="overwrite")


def train(folder: str, epochs: int) -> tuple[list[float], list[float]]:
    """Runs on every rank, in a process of its own beside an executor; returns losses and weights. What it needs is imported here."""
    import pathlib

    import collective_core.torch as hvd
    import numpy
    import torch

    hvd.init()
    table = numpy.concatenate([numpy.loadtxt(part, delimiter=",", ndmin=2) for part in sorted(pathlib.Path(folder).glob("*.csv"))])
    own = torch.tensor(table[hvd.rank() :: hvd.size()], dtype=torch.float32)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all begin with the same model
    losses = []
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(own[:, :2]), own[:, 2:])
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        if hvd.rank() == 0 and epoch % 50 == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)  # shown by the driver when the job has ended
    return losses, [*model.weight.flatten().tolist(), model.bias.item()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", default="local-cluster[2,1,512]")
    parser.add_argument("--folder", help="for the table: one that all executors have")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the executors need this engine and PyTorch, too
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master(options.master).appName("training").config("spark.executor.memory", "512m")
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
        folder = options.folder or f"{temporary}/table"
        make_table(spark, 1000, folder)
        results = Runner(np=options.ranks, spark=spark).run(train, folder, epochs=options.epochs)
        spark.stop()
    losses, weights = results[0]
    if any(result != results[0] for result in results):
        raise SystemExit("the ranks have trained apart")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; y = {weights[0]:.2f} x0 + {weights[1]:.2f} x1 + {weights[2]:.2f}")


if __name__ == "__main__":
    main()
