"""Trains on a stream while a rank of each generation kills itself; arguments: folder, kills. TEST_SOURCE says where the records are.

The state holds the ids of the records of each committed step. With the folder alone: trains one process on such steps, from standard
input, and prints its weights.
"""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import collective_core.torch as hvd
import torch
from collective_core.runtime import launchers

folder = Path(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def learn(optimizer, lines, scale):
    table = torch.tensor([list(map(float, line.split())) for line in lines], dtype=torch.float64).reshape(-1, 4)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(model(table[:, 1:3]), table[:, 3:], reduction="none")
    optimizer.zero_grad()
    (losses.sum() * scale).backward()
    optimizer.step()


def weights():
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def replay():
    lines = {line.split()[0]: line for path in (folder / "kept").iterdir() for line in path.read_text().splitlines()}
    for step in json.load(sys.stdin):
        chosen = [lines[number] for number in step.split()]
        learn(optimizer, chosen, 1 / len(chosen))
    print(json.dumps(weights()))


def note(**what):
    """In one write, so that a line is there or not."""
    os.write(log, (json.dumps(what) + "\n").encode())


def dead():
    return sum(path.read_text().count("killed") for path in folder.glob("log.*"))


def die(generation):
    if launchers.generation == generation and dead() < kills:
        note(killed=generation)
        os.kill(os.getpid(), signal.SIGKILL)


if len(sys.argv) == 2:
    replay()
    sys.exit()

kills = int(sys.argv[2])
log = os.open(folder / f"log.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sources = {
    "kafka": lambda: hvd.data.Kafka(os.environ["TEST_TOPIC"], {"bootstrap.servers": os.environ["TEST_KAFKA"]}),
    "directory": lambda: hvd.data.Directory(folder / "data"),
    "file that grows": lambda: hvd.data.Files(folder / "data" / "log"),
}
stream = hvd.data.Stream(sources[os.environ["TEST_SOURCE"]](), 4, linger_seconds=0.0)
#: In the state its position alone, as states of frameworks that keep plain values have it.
is_plain = os.environ["TEST_SOURCE"] == "file that grows"


def remove_what_is_done():
    for name, (_, _, is_done) in stream.state_dict()["positions"].items():
        if is_done:
            (folder / "data" / name).unlink(missing_ok=True)


@hvd.elastic.run
def train(state):
    armed = False
    if is_plain:
        stream.load_state_dict(state.stream)
    for batch in stream:
        learn(optimizer, batch.records, batch.scale)
        everyone = hvd.allgather_object([record.split()[0].decode() for record in batch.records])
        state.steps.append(" ".join(number for numbers in everyone for number in numbers))
        state.count += batch.total
        if is_plain:
            state.stream = stream.state_dict()
        state.commit()
        note(committed=state.count)
        if hvd.rank() == 0 and os.environ["TEST_SOURCE"] == "directory":
            remove_what_is_done()
        if not armed:
            generation = launchers.generation
            dice = random.Random(generation)
            if dice.randrange(hvd.size()) == hvd.rank():
                threading.Timer(dice.uniform(0.0, 0.05), die, (generation,)).start()
            armed = True
        if (folder / "stop").exists() and state.count == int((folder / "stop").read_text()):
            stream.end()


state = hvd.elastic.TorchState(model, optimizer, stream=stream.state_dict() if is_plain else stream, steps=[], count=0)
train(state)
note(end={"steps": state.steps, "weights": weights()})
