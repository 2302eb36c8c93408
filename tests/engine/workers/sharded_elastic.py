"""An elastic job with a sharded table, whose rows come from the last checkpoint when ranks have changed.

Arguments: a folder, the number of steps, the step in which rank 1 dies (once), and "file" where the table lies in one.
"""

import os
import signal
import sys
from pathlib import Path

import collective_core.torch as hvd
import torch

ROWS, COLUMNS = 17, 3


def learn(model, optimizer, step, rank, size):
    """The data of a step are the same whatever the number of ranks."""
    ids = torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(ids[rank * 12 // size : (rank + 1) * 12 // size]).square().sum().div(12 / size).backward()
    optimizer.step()


def initial():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def report(path, **facts):
    import json

    path.write_text(json.dumps(facts))


if __name__ == "__main__":
    folder, steps, dies = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    torch.set_num_threads(1)
    sizes = []
    place = {"storage": str(folder), "cache_bytes": 256} if sys.argv[4:] == ["file"] else {}

    @hvd.elastic.run
    def train(state):
        model = hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.Adagrad(0.1), dtype=torch.float64, **place)
        model.load_weight(initial())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        checkpoints = hvd.Checkpoints(folder / "checkpoints", model=model)
        state.step = checkpoints.restore().get("step", 0)
        sizes.append(hvd.size())
        while state.step < steps:
            learn(model, optimizer, state.step, hvd.rank(), hvd.size())
            state.step += 1
            if hvd.rank() == 1 and state.step == dies and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step % 2 == 0:
                checkpoints.save(state.step)
                state.commit()
        checkpoints.wait()
        return model.gather_weight()

    weight = train(hvd.elastic.ObjectState(step=0))
    report(folder / f"end.{hvd.rank()}", weight=weight.tolist(), sizes=sizes)
