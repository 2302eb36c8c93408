"""Trains until the folder holds a file `stop`, or for so many steps; arguments: the folder, the steps, and the step at which rank 1 fails
(with TEST_FAILS=again at every step from there). With TEST_GPUS its tensors count as GPUs' (gpus_by_gloo.py).

Every rank notes each step after its commit. The data of a step are the same on all ranks, so that the result does not depend on who
was there; a step that was lost or done twice shows in it. With TEST_WRAP=inside every call of the function makes an optimizer of its own.
"""

import json
import os
import sys
import time
from pathlib import Path

import collective_core.torch as hvd
import torch


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def learn(model, optimizer, step):
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3).add(step).sin()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def values(model):
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def check_variables():
    """Our launcher says which rank this is now, as horovodrun and torchrun do; mpirun does not."""
    if "COLLECTIVE_ELASTIC" in os.environ:
        # The launcher takes two names of this machine for two hosts.
        of_host = [0, 1] if os.environ["HOROVOD_HOSTNAME"] in ("other", "third") else [hvd.local_rank(), hvd.local_size()]
        place = [hvd.rank(), hvd.size(), *of_host]
        for names in ("HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"):
            assert [int(os.environ[name]) for name in names.split()] == place
        assert os.environ["MASTER_ADDR"]
        assert int(os.environ["MASTER_PORT"]) > 0


if __name__ == "__main__":
    folder, steps, failing = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1
    if os.environ.get("TEST_GPUS"):
        import gpus_by_gloo

        gpus_by_gloo.use(gpu=f"GPU of {os.getpid()}")
    hvd.init()
    torch.set_num_threads(1)
    model, optimizer = make()
    outside = os.environ.get("TEST_WRAP") != "inside"
    if outside:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    log = (folder / f"log.{os.getpid()}").open("a", buffering=1)
    resets, counted = [], []

    def count():
        """What was counted goes on when the ranks change."""
        rows = [row for row in hvd.metrics()["operations"] if row["kind"] == "allreduce"]
        counted.append(sum(row["operations"] for row in rows))
        assert counted == sorted(counted), counted

    def note(**what):
        log.write(json.dumps({"pid": os.getpid(), "time": time.time(), **what}) + "\n")

    @hvd.elastic.run
    def train(state):
        distributed = optimizer if outside else hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        while state.step < steps and not hvd.broadcast_object((folder / "stop").exists(), 0):
            learn(model, distributed, state.step)
            state.step += 1
            if hvd.rank() == 1 and (state.step == failing or (0 < failing < state.step and os.environ.get("TEST_FAILS") == "again")):
                raise ValueError("the data of this step are broken")
            state.commit()
            check_variables()
            assert hvd.nccl_enabled() == bool(os.environ.get("TEST_GPUS"))
            note(step=state.step, rank=hvd.rank(), size=hvd.size())
            count()
            time.sleep(0.02)
        return state.step

    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    end = train(state)
    assert hvd.metrics()["elastic_resets"] == len(resets)
    note(end=end, values=values(model), resets=resets)
