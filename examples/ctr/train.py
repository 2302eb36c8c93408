"""Trains a click-through-rate model, in one way or in several ways in turn.

    python -m collective_core.launch -np 2 python examples/ctr/train.py --model dlrm --mode sharded
    python -m collective_core.launch -np 2 python examples/ctr/train.py --model wide_deep --mode sharded sparse alone
    python -m collective_core.launch -np 3 --servers 1 python examples/ctr/train.py --mode ps

README.md says what the ways are, and how fast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import collective_core.torch as hvd
import torch
from data import TOGETHER, Clicks, Records
from model import MODELS
from modes import MODES, Job, build, bytes_calculated, bytes_counted
from torch.nn.functional import binary_cross_entropy_with_logits

#: Steps of one mode before it is the next one's turn.
TURN = 10
#: Held-out records begin here: after all that a program may train on.
HELD_OUT = 1 << 36


class Training:
    """A model in one of the modes, and what its steps have cost."""

    def __init__(self, mode: str, model: str, job: Job) -> None:
        self.mode, self.ranks = mode, job.ranks
        self.model, self.trained, self.optimizer = build(mode, model, job)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # of a step, in each turn
        self.bytes = 0.0  # of a step of this rank

    def turn(self, batches: list[Records]) -> None:
        hvd.barrier(process_set=self.ranks)
        before, begin = bytes_counted(self.ranks.size()), time.perf_counter()
        losses = [self.step(batch) for batch in batches]
        mine = (time.perf_counter() - begin) / len(batches)
        self.bytes = (bytes_counted(self.ranks.size()) - before) / len(batches)
        if self.mode in ("ddp", "ps"):
            used = sum(len(batch.ids.unique()) for batch in batches) / len(batches)
            self.bytes = bytes_calculated(self.mode, self.model, self.ranks.size(), used)
        self.losses.append(self.mean(torch.stack(losses).mean()))
        # The ranks' mean speed where none waits for another, the slowest's where each step waits for all.
        waits = self.mode not in ("alone", "ps")
        self.seconds.append(max(self.all(torch.tensor([mine])).tolist()) if waits else 1 / self.mean(torch.tensor(1 / mine)))

    def mean(self, value: torch.Tensor) -> float:
        return self.all(value.view(1)).mean().item()

    def all(self, values: torch.Tensor) -> torch.Tensor:
        return hvd.allgather(values, process_set=self.ranks)

    def step(self, batch: Records) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.trained(batch.numbers, batch.ids), batch.clicks)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def result(self, records: int, alone: Training | None) -> str:
        """What the steps of so many records have led to. ``alone``: which took turns with this one."""
        counted = slice(1 if len(self.seconds) > 1 else 0, None)  # the first turn makes states and buffers
        seconds = statistics.median(self.seconds[counted])
        text = f"loss {self.losses[0]:.6f} at first, {self.losses[-1]:.6f} at last, {records / seconds:.0f} samples/s, "
        text += f"{1000 * seconds:.1f} ms/step, {self.bytes / 1e6:.2f} MB/step sent by rank 0"
        if alone:
            ratios = [theirs / mine for theirs, mine in zip(alone.seconds[counted], self.seconds[counted], strict=True)]
            text += f", {statistics.median(ratios):.2f} of the speed of alone"
        return text

    def auc(self, held_out: Records) -> float:
        """Over the held-out records of all ranks. The ranks of ``alone`` have different models: each scores its own records."""
        with torch.no_grad():
            scores = self.model(held_out.numbers, held_out.ids)
        return hvd.data.auc(self.all(held_out.clicks), self.all(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="dlrm")
    parser.add_argument("--mode", choices=MODES, nargs="+", default=["sharded"], help="several train in turn, on the same records")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2048, help=f"records per rank and step, a multiple of {TOGETHER}")
    parser.add_argument("--most-ids", type=int, default=100_000, help="values of a category; Criteo's largest has 10 million")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--held-out", type=int, default=16_384, help="records per rank for the AUC")
    parser.add_argument("--staleness", type=int, help="steps that a worker of mode ps may be ahead of others; without it, any number")
    parser.add_argument("--seed", type=int, default=0, help="of the records")
    options = parser.parse_args()
    if {"ps", "ddp"} <= set(options.mode):
        parser.error("ddp needs all ranks, of which servers train nothing: measure it without ps")
    if "ps" not in options.mode and int(os.environ.get("COLLECTIVE_SERVERS", "0")):
        parser.error("only mode ps has use for parameter servers: start it without --servers")

    hvd.init()
    if hvd.ps.is_server():
        hvd.ps.serve()
        return
    ranks = hvd.ps.workers() if "ps" in options.mode else hvd.global_process_set
    rank, size, batch = ranks.rank(), ranks.size(), options.batch_size
    clicks = Clicks(options.most_ids, options.seed)
    job = Job(ranks, clicks.rows, options.lr, options.staleness)
    trainings = [Training(mode, options.model, job) for mode in options.mode]
    if rank == 0:
        print(f"{options.model}: {clicks.rows} rows, {size} ranks that train, {batch} records per rank and step", flush=True)
    for first in range(0, options.steps, TURN):
        steps = range(first, min(first + TURN, options.steps))
        batches = [clicks.records((step * size + rank) * batch, batch) for step in steps]
        for training in trainings[first // TURN % len(trainings) :] + trainings[: first // TURN % len(trainings)]:
            training.turn(batches)
            if rank == 0:
                print(f"{training.mode}, step {steps[-1] + 1}: loss {training.losses[-1]:.4f}", flush=True)
    held_out = clicks.records(HELD_OUT + rank * options.held_out, options.held_out)
    alone = next((training for training in trainings if training.mode == "alone"), None)
    for training in trainings:
        auc = training.auc(held_out)
        if rank == 0:
            print(f"{training.mode}: {training.result(batch * size, alone)}, AUC {auc:.4f}", flush=True)


if __name__ == "__main__":
    main()
