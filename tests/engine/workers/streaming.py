"""Reads streams; arguments: what to do, and the folder that the test has made."""

import json
import os
import sys
from pathlib import Path

import collective_core.torch as hvd
import common
import torch

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
task, folder = sys.argv[1], Path(sys.argv[2])


def names(batch):
    return [record.decode() for record in batch.records]


def read(stream, steps=None):
    """This rank's records by step, and all ranks' numbers of them."""
    taken, totals = [], []
    for batch in stream:
        taken.append(names(batch))
        totals.append(batch.total)
        assert batch.scale == size / batch.total
        if len(taken) == steps:
            break
    return taken, totals


def said(call):
    try:
        call()
    except (hvd.CollectiveError, ValueError) as error:
        return f"{getattr(error, 'kind', 'value')}: {error}"
    return "nothing"


def sources():
    """Every way of dividing records, one after the other."""
    found = {}
    directory = hvd.data.Directory(folder / "files", "*.txt", follow=False)
    found["directory"] = read(hvd.data.Stream(directory, 3))
    found["dealt out"] = read(hvd.data.Stream(hvd.data.Directory(folder / "files", "*.txt", follow=False), 3, shard="record"))
    paths = sorted((folder / "files").glob("*.txt"))
    found["files"] = read(hvd.data.Stream(hvd.data.Files(*paths, follow=False), 3))
    found["own files"] = read(hvd.data.Stream(hvd.data.Files(*paths, follow=False), 3, shard="partition"))
    return found


def wrong():
    """Errors, each on every rank, after which the engine works."""
    growing = folder / "growing"
    stream = hvd.data.Stream(hvd.data.Files(growing), 2, linger_seconds=0.0)
    mixed = hvd.data.Stream(hvd.data.Files(growing), 2 + rank)
    behind = hvd.data.Stream(hvd.data.Files(growing), 2)
    if rank == size - 1:
        behind.load_state_dict({"schema": 1, "source": "files", "records": 1, "positions": {}})
    texts = [said(lambda: next(mixed)), said(lambda: next(behind))]
    first = names(next(stream))
    before = stream.state_dict()
    hvd.barrier()
    if rank == 0:
        growing.write_text("another\n")
    texts.append(said(lambda: next(stream)))
    if rank == 0:
        growing.write_text("0\n" * 2 * size + "not whole")
    stream.load_state_dict(before)
    if rank == size - 1:
        stream.end()
    texts.append("ended" if list(stream) == [] else "went on")
    own = hvd.data.Stream(hvd.data.Directory(folder / ("files" if rank == 0 else "empty"), "*.txt"), 2)
    texts.append(said(lambda: next(own)))
    evaluation = hvd.data.ProgressiveValidation()
    scores = torch.tensor([0.25, 0.5], dtype=torch.bfloat16, requires_grad=True)
    evaluation.update(torch.tensor([False, True]), scores, scores)
    assert (evaluation.auc(), evaluation.mean_loss()) == (1.0, 0.375)
    texts.append(said(lambda: evaluation.update([0, 1], [0.5] * (2 - rank % 2), [0.0, 0.0])))
    texts.append(said(lambda: evaluation.update([0, 1], ["high", "low"] if rank == 1 else [0.5, 0.5], [0.0, 0.0])))
    return {"texts": texts, "first": first, "sum": float(hvd.allreduce(torch.ones(1), op=hvd.Sum))}


def parsed(batch):
    rows = [list(map(float, record.split())) for record in batch.records]
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
    return table[:, 1:3], table[:, 3:]


def training(checkpoint=None, stop=None):
    """Progressive validation and training on records that rank 0 deals out. With ``checkpoint`` every third step is saved."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).double()
    stream = hvd.data.Stream(hvd.data.Directory(folder / "data", follow=False), int(os.environ["TEST_BATCH"]), os.environ.get("TEST_SHARD"))
    evaluation = hvd.data.ProgressiveValidation(window=150)
    taken, saved, found = [], [], {}
    if checkpoint is not None:
        checkpoints = hvd.Checkpoints(checkpoint, model=model, stream=stream, evaluation=evaluation)
        found = checkpoints.restore()
        taken = list(found.get("taken", []))
    for steps, batch in enumerate(stream, 1):
        x, y = parsed(batch)
        scores = model(x)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(scores, y, reduction="none")
        evaluation.update(y, scores.detach(), losses.detach())
        model.zero_grad()
        (losses.sum() * batch.scale).backward()
        with torch.no_grad():  # no optimizer: importing what those of PyTorch import takes each rank seconds
            for parameter in model.parameters():
                parameter -= 2.0 * hvd.allreduce(parameter.grad)
        taken += [record.split()[0] for records in hvd.allgather_object(names(batch)) for record in records]
        if checkpoint is not None and steps % 3 == 0:
            checkpoints.save(len(taken), taken=taken)
            saved = list(taken)
        if steps == stop:
            break  # as if it were killed
    if checkpoint is not None:
        checkpoints.wait()
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return {"weights": weights, "auc": evaluation.auc(), "loss": evaluation.mean_loss(), "taken": taken, "saved": saved, "began": found}


def kafka():
    """To the end of a topic, from the state that is in a file, if it is; ``stop``: after so many steps, with the state in a file."""
    config = {"bootstrap.servers": os.environ["TEST_KAFKA"]}
    stream = hvd.data.Stream(hvd.data.Kafka(os.environ["TEST_TOPIC"], config, follow=False), 4)
    state = folder / "state"
    if state.exists():
        stream.load_state_dict(json.loads(state.read_text()))
    taken, totals = read(stream, int(os.environ.get("TEST_STOP", "0")) or None)
    hvd.barrier()
    if rank == 0:
        state.write_text(json.dumps(stream.state_dict()))
    beyond = stream.state_dict()
    beyond["positions"] = dict.fromkeys(beyond["positions"], 10_000)
    stream.load_state_dict(beyond)
    text = said(lambda: next(stream))
    stream.close()
    return {"taken": taken, "totals": totals, "beyond": text}


def latest():
    """Reads nothing, then what has come, and that again from the first state: of rank 1 in a new stream, as of a rank that is new."""
    config = {"bootstrap.servers": os.environ["TEST_KAFKA"]}

    def make():
        return hvd.data.Stream(hvd.data.Kafka(os.environ["TEST_TOPIC"], config, start="latest", follow=False), 4)

    def rest(stream):
        taken = [names(batch) for batch in stream]
        stream.close()
        return sorted(record for records in hvd.allgather_object(taken) for part in records for record in part)

    stream = make()
    state = stream.state_dict()
    first = rest(stream)
    if rank == 0:
        from confluent_kafka import Producer

        producer = Producer(config)
        for number in range(3):
            producer.produce(os.environ["TEST_TOPIC"], str(number).encode(), partition=number)
        assert producer.flush(10) == 0
    hvd.barrier()
    second = rest(stream)
    if rank == 1:
        stream = make()
    stream.load_state_dict(state)
    return {"first": first, "second": second, "again": rest(stream)}


def standard_input():
    stream = hvd.data.Stream(hvd.data.StandardInput(), 4, linger_seconds=0.0)
    taken, totals = read(stream, 3)
    state = stream.state_dict()
    not_committed, _ = read(stream, 1)
    stream.state_dict()  # for a log, say: no commit
    stream.load_state_dict(state)
    rest, more = read(stream)
    begin = {**state, "positions": {"standard input": 0}}
    stream.load_state_dict(begin)
    too_early = [said(lambda: next(stream))]
    stream.load_state_dict(state)
    hvd.elastic.TorchState(stream=stream).save()
    stream.load_state_dict(begin)
    too_early.append(said(lambda: next(stream)))
    return {"taken": taken + rest, "totals": totals + more, "again": not_committed + rest[:1], "too early": too_early}


class Late(hvd.data.Source):
    """Two partitions of a record each; the second comes while the first step waits for another record, and is not looked for later."""

    kind = "late"
    discovery_interval = 0.0

    def __init__(self):
        self._there, self._idle = ["a"], 0

    def discover(self, known):
        if known and "b" not in self._there:
            self._there.append("b")
            self.discovery_interval = 1e9
        return dict.fromkeys((name for name in self._there if name not in known), 0), ()

    def read(self, positions, most):
        left = [name for name, position in positions.items() if not position][:most]
        self._idle = 0 if left else self._idle + 1
        if self._idle > 100:
            raise ValueError("no more records come")
        return hvd.data.Read([name.encode() for name in left], dict.fromkeys(left, 1), False)


def found_while_waiting():
    return read(hvd.data.Stream(Late(), 2, shard="record", linger_seconds=0.05), 2)[0]


tasks = {
    "sources": sources,
    "wrong": wrong,
    "training": training,
    "stopped": lambda: training(folder / "checkpoints", int(sys.argv[3])),
    "continued": lambda: training(folder / "checkpoints"),
    "kafka": kafka,
    "latest": latest,
    "standard input": standard_input,
    "found while waiting": found_while_waiting,
}
common.report(found=tasks[task]())
