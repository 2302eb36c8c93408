#!/usr/bin/env python3
"""What the death of a rank costs an elastic job: one of four is killed (SIGKILL) at a random moment, in so many jobs one after the other.

    .venv-engine/bin/python benchmarks/elastic.py [--kills 50] [--np 4] [--seed 1]

A job takes some ten seconds on two processors, most of them for starting PyTorch. Printed is how many jobs went on to their end, the
longest time without a step from the kill on, and how many steps that were committed were lost or done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from collective_core import Runner

#: Seconds within which the others must have gone on.
BAR = 5.0
STEPS = 250


def train(folder: str, steps: int) -> int:
    import json
    import os
    import time

    import collective_core.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())

    @hvd.elastic.run
    def go(state: object) -> int:
        with open(f"{folder}/{os.getpid()}", "a", buffering=1) as log:
            while state.step < steps:
                optimizer.zero_grad()
                model(torch.ones(8, 64)).square().mean().backward()
                optimizer.step()
                state.step += 1
                state.commit()
                log.write(json.dumps({"pid": os.getpid(), "time": time.time(), "step": state.step}) + "\n")
                time.sleep(0.02)
        return state.step

    return go(hvd.elastic.TorchState(model, optimizer, step=0))


def notes(folder: Path) -> list[dict]:
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(map(json.loads, lines), key=lambda note: note["time"])


def kill_one(folder: Path, dice: random.Random, np: int, killed: list[float]) -> None:
    while len({note["pid"] for note in notes(folder)}) < np:
        time.sleep(0.05)
    time.sleep(dice.uniform(0.0, 2.0))
    victim = dice.choice(sorted({note["pid"] for note in notes(folder)}))
    killed.append(time.time())
    os.kill(victim, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    dice = random.Random(wanted.seed)  # noqa: S311  no secret
    pauses, again, failed = [], 0, 0
    for number in range(wanted.kills):
        killed: list[float] = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            killer = threading.Thread(target=kill_one, args=(folder, dice, wanted.np, killed), daemon=True)
            killer.start()
            try:
                found = Runner(np=wanted.np, min_np=wanted.np // 2).run(train, name, STEPS)
            except Exception as error:  # noqa: BLE001 - it is counted
                print(f"kill {number}: {error}", file=sys.stderr)
                failed += 1
                continue
            steps = notes(folder)
        before = [note for note in steps if note["time"] <= killed[0]]
        times = [before[-1]["time"], *(note["time"] for note in steps if note["time"] > killed[0])]
        pauses.append(max(later - earlier for earlier, later in itertools.pairwise(times)))
        own: dict[int, int] = {}
        newest = 0
        for note in steps:
            again += note["step"] <= own.get(note["pid"], 0) or note["step"] < newest
            own[note["pid"]] = newest = note["step"]
        failed += any(step != STEPS for step in found)
    went_on = wanted.kills - failed
    print(f"{went_on} of {wanted.kills} jobs went on; {again} committed steps lost or done again (aim: all, none)")
    if pauses:
        print(f"pause: median {statistics.median(pauses):.2f} s, longest {max(pauses):.2f} s (aim: {BAR:g} s)")
    return 0 if went_on == wanted.kills and not again and max(pauses) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
