"""What the watch of `provision run` over its job costs a training step while nothing is wrong.

    .venv/bin/python benchmarks/stall_watch.py         # needs `make setup`, and a machine that does nothing else
    .venv/bin/python benchmarks/stall_watch.py --np 4 --pairs 40

One job trains the network of Horovod's MNIST example, one the large MLP. Rank 0 stops the guard of this host, which looks at the ranks
every five seconds, by a signal and lets it continue, block after block: both kinds of blocks of a pair meet the same machine. A cost is the
median over the pairs of how much longer a step takes while the guard runs, with all that it did before there was a watch. Next to it the
guard's own processor time, of one core, which is the most that it can take from ranks that use every core and wait for each other.
The bars: 1 % of a step of MNIST, 0.2 % of one of the MLP.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
BARS = {"mnist": 0.01, "mlp": 0.002}
WARM_UP = 20
RESULT = "RESULT "


def guard() -> int:
    """The process that guards this rank's run on this host."""
    mark = f"PROVISION_RUN_ID={os.environ['PROVISION_RUN_ID']}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and b"'guard.py'" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    sys.exit("the guard of this host cannot be found")


def processor(pid: int) -> float:
    """Seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rank(task: str, pairs: int, seconds: float) -> None:
    """What each rank of the job does. All take the same number of steps."""
    sys.path.insert(0, str(CHECKOUT))
    import collective_core.torch as hvd

    from benchmarks.engine import training  # it loads PyTorch

    hvd.init()
    training.begin()
    step = training.training_step("collective_core", training.TASKS[task], training.TASKS[task].batch)

    def block(count: int) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count

    block(WARM_UP)
    count = hvd.broadcast_object(max(1, round(seconds / block(WARM_UP))), root_rank=0)
    watcher = guard() if hvd.rank() == 0 else 0
    costs, used, steps = [], 0.0, []
    for pair in range(pairs):
        times = {}
        for runs in (pair % 2 == 0, pair % 2 == 1):
            if watcher:
                os.kill(watcher, signal.SIGCONT if runs else signal.SIGSTOP)
            before = processor(watcher) if watcher else 0.0
            times[runs] = block(count)
            used += processor(watcher) - before if watcher else 0.0
        costs.append(times[True] / times[False] - 1)
        steps.append(times[False])
    if watcher:
        os.kill(watcher, signal.SIGCONT)
        share = used / (pairs * count * statistics.mean(steps))
        quartiles = statistics.quantiles(costs, n=4)
        found = {"task": task, "cost": statistics.median(costs), "from": quartiles[0], "to": quartiles[2], "guard": share}
        print(RESULT + json.dumps({**found, "step_ms": statistics.median(steps) * 1e3, "pairs": pairs}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks (30), of each network")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a block (10)")
    parser.add_argument("--rank", choices=BARS, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.rank:
        rank(wanted.rank, wanted.pairs, wanted.seconds)
        return
    python = str(CHECKOUT / ".venv-engine/bin/python")
    for task, bar in BARS.items():
        run = [sys.executable, "-m", "provision", "run", "--hosts", "localhost", "--python", python, "-np", str(wanted.np)]
        program = ["python", str(Path(__file__).resolve()), "--rank", task, "--pairs", str(wanted.pairs), "--seconds", str(wanted.seconds)]
        done = subprocess.run([*run, *program], cwd=CHECKOUT, capture_output=True, text=True, check=False)
        results = [line.partition(RESULT)[2] for line in done.stdout.splitlines() if RESULT in line]
        if done.returncode != 0 or not results:
            sys.exit(f"the job ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found = json.loads(results[0])
        found = {name: value if name in ("task", "pairs", "step_ms") else 100 * value for name, value in json.loads(results[0]).items()}
        print(
            "{task}: a step of {step_ms:.2f} ms takes {cost:+.2f} % with the guard (quartiles {from:+.2f} to {to:+.2f} %, {pairs} pairs); "
            "the guard uses {guard:.3f} % of one core; ".format(**found)
            + f"bar {100 * bar:g} %"
        )


main()
