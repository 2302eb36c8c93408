"""What `provision run --tune` brings to a program for processors that is not changed: four models under torchrun and under `provision run`.

    .venv-engine/bin/python benchmarks/cpu_training.py [--np 2] [--rounds 5] [--models mlp,cnn] [--json]

The program is this file, too: DDP over Gloo as many scripts write it. Every round starts each side once, in turn, with a seed of its
own, so that the accuracies of the sides can be compared. A launch's figure is the median of its steps; a side's the fastest launch's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WORDS = 10, 1000
WARM_UP, LEARNING_RATE = 5, 0.02
STEPS = 30
SIDES = ("torchrun", "off", "memory", "engine", "bf16")
LAUNCH_S = 600
NOISE = 0.1  # of the words that do not follow from the one before


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.short(x))


class Words(nn.Module):
    """The next word of each position of a sequence, by a network over them."""

    def __init__(self, network: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.embedding, self.network, self.out = nn.Embedding(WORDS, width), network, nn.Linear(out, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        found = self.network(self.embedding(words))
        return self.out(found[0] if isinstance(found, tuple) else found).flatten(0, -2)  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 2048),
        nn.ReLU(),
        *[layer for _ in range(2) for layer in (nn.Linear(2048, 2048), nn.ReLU())],
        nn.Linear(2048, CLASSES),
    )


def cnn() -> nn.Module:
    blocks = [Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return Words(nn.TransformerEncoder(layer, 2), 256, 256)


def lstm() -> nn.Module:
    return Words(nn.LSTM(128, 256, 2, batch_first=True), 128, 256)


#: The model, the shape of a batch, and its optimizer.
MODELS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "mlp": (mlp, (64, 1024), torch.optim.SGD),
    "cnn": (cnn, (32, 3, 32, 32), torch.optim.SGD),
    "transformer": (transformer, (32, 32), torch.optim.Adam),
    "lstm": (lstm, (32, 32), torch.optim.Adam),
}


class Data:
    """Invented batches that can be learned: noisy images of ten kinds, or words that follow each other by a rule, mostly."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self._shape, self._of_words = shape, len(shape) == 2 and shape[1] < WORDS
        coarse = (3, 4, 4) if len(shape) > 2 else shape[1:]  # images' kinds differ in large areas
        kinds = torch.randn(CLASSES, *coarse, generator=torch.Generator().manual_seed(seed))
        self._kinds = F.interpolate(kinds, shape[2:]) if len(shape) > 2 else kinds
        self._rule = torch.randperm(WORDS, generator=torch.Generator().manual_seed(seed))

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self._of_words:
            words = torch.randint(WORDS, self._shape, generator=generator)
            wrong = torch.rand(self._shape, generator=generator) < NOISE
            after = torch.where(wrong, torch.randint(WORDS, self._shape, generator=generator), self._rule[words])
            return words, after.flatten()
        labels = torch.randint(CLASSES, self._shape[:1], generator=generator)
        return self._kinds[labels] * 0.2 + torch.randn(self._shape, generator=generator), labels


def train(name: str, seed: int, steps: int) -> None:
    """The program: trains, and prints the median time of a step in ms and the accuracy on other batches, as JSON, on rank 0."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    make, shape, kind = MODELS[name]
    model = nn.parallel.DistributedDataParallel(make())
    optimizer = kind(model.parameters(), **({"lr": LEARNING_RATE, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.003}))
    data, own, spent = Data(shape, seed), torch.Generator().manual_seed(1000 * seed + dist.get_rank()), []
    for _ in range(WARM_UP + steps):
        x, y = data.batch(own)
        begin = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
        spent.append(time.perf_counter() - begin)
    model.eval()
    others = torch.Generator().manual_seed(seed + 77)
    with torch.no_grad():
        right = [float((model(x).argmax(1) == y).float().mean()) for x, y in (data.batch(others) for _ in range(8))]
    if dist.get_rank() == 0:
        print(json.dumps({"ms": 1e3 * statistics.median(spent[WARM_UP:]), "accuracy": statistics.mean(right)}), flush=True)
    dist.destroy_process_group()


def launch(side: str, ranks: int, name: str, seed: int, steps: int) -> dict[str, float]:
    """What one launch printed. Raises SystemExit for one that failed."""
    program = [str(Path(__file__).resolve()), "--train", name, "--seed", str(seed), "--steps", str(steps)]
    if side == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    else:
        ours = str(Path(__file__).resolve().parents[1] / ".venv/bin/provision")
        command = [ours, "run", "-H", f"localhost:{ranks}", "--python", sys.executable, "--tune", side, *program]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PROVISION_HOME": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LAUNCH_S)
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"ms"' in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    made: dict[str, float] = json.loads(lines[-1])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Unchanged programs under torchrun and under provision run --tune.")
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--rounds", type=int, default=5, help="launches of each side, each with another seed (5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a launch ({STEPS})")
    parser.add_argument("--models", default=",".join(MODELS), help=",".join(MODELS))
    parser.add_argument("--sides", default=",".join(SIDES), help=",".join(SIDES))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.train:
        train(wanted.train, wanted.seed, wanted.steps)
        return
    rows = []
    for name in wanted.models.split(","):
        found: dict[str, list[dict[str, float]]] = {side: [] for side in wanted.sides.split(",")}
        for seed in range(wanted.rounds):
            for side in found:
                found[side].append(launch(side, wanted.np, name, seed, wanted.steps))
                print(f"{name}, seed {seed}, {side}: {found[side][-1]}", file=sys.stderr)
        for side, made in found.items():
            ms, accuracy = [each["ms"] for each in made], [each["accuracy"] for each in made]
            row = {"model": name, "side": side, "fastest_ms": round(min(ms), 2), "median_ms": round(statistics.median(ms), 2)}
            row["times_first"] = round(min(each["ms"] for each in found[next(iter(found))]) / min(ms), 2)
            rows.append({**row, "accuracy": [round(each, 4) for each in accuracy]})
    document = {"schema": 1, "np": wanted.np, "rounds": wanted.rounds, "results": rows}
    if wanted.json:
        print(json.dumps(document, indent=1))
        return
    print(f"{'model':12} {'side':9} {'fastest ms':>10} {'median ms':>10} {'× first':>8}  accuracy: mean (lowest to highest)")
    for row in rows:
        low, mean, high = min(row["accuracy"]), statistics.mean(row["accuracy"]), max(row["accuracy"])
        figures = f"{row['fastest_ms']:10.1f} {row['median_ms']:10.1f} {row['times_first']:8.2f}"
        print(f"{row['model']:12} {row['side']:9} {figures}  {mean:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
