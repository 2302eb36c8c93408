"""Jobs that hang, as ordinary training scripts: a program for each framework, into which a shape of a hang is put, and the list of them.

A seed is (shape, framework, ranks, hosts); `seeds` draws the same ones each time. The line at which the rank at fault has to be found ends
with ``# HANGS HERE``. Of a shape without it, the system says where the rank is: it is stopped, has ended, or its network is cut.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

MARK = "# HANGS HERE"
BLIND = Path(__file__).parents[1] / "data/hangs"

_TORCH = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
#SETUP
class Samples(Dataset):
    def __len__(self):
        return 10_000_000
    def __getitem__(self, index):
        #ITEM
        return torch.ones(64)
#INIT
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
#MODEL
def train():
    for step, batch in enumerate(DataLoader(Samples(), batch_size=8, num_workers=WORKERS)):
        #HOOK
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        if step == 2:
            print("ready", rank, flush=True)
if __name__ == "__main__":
    train()
    #AFTER
"""
_DIST = 'dist.init_process_group("{}")\nrank, ranks = dist.get_rank(), dist.get_world_size()'
_SGD = "\noptimizer = torch.optim.SGD(model.parameters(), lr=0.001)"
_HVD = "hvd.init()\nrank, ranks = hvd.rank(), hvd.size()"
_MPI = """
import os
import numpy
from mpi4py import MPI
#SETUP
comm = MPI.COMM_WORLD
rank, ranks = comm.rank, comm.size
gradients, weights = numpy.ones(1000), numpy.ones(1000)
def train():
    global weights
    for step in range(10_000_000):
        #HOOK
        total = numpy.empty_like(gradients)
        comm.Allreduce(gradients, total)
        weights -= 0.001 * total / ranks
        if step == 2:
            print("ready", rank, flush=True)
if __name__ == "__main__":
    train()
    #AFTER
"""
_JAX = """
import os
import jax
import jax.numpy as jnp
from functools import partial
#SETUP
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", ranks, rank)
@partial(jax.pmap, axis_name="ranks")
def update(weights, points):
    gradients = jax.grad(lambda weights: (jnp.tanh(points @ weights) ** 2).mean())(weights)
    return weights - 0.001 * jax.lax.pmean(gradients, "ranks")
def train():
    weights = jnp.ones((1, 64, 64))
    for step in range(10_000_000):
        #HOOK
        weights = update(weights, jnp.ones((1, 8, 64)))
        loss = float(weights[0].sum())
        if step == 2:
            print("ready", rank, loss, flush=True)
if __name__ == "__main__":
    train()
"""
_KERAS = """
import os
os.environ.setdefault("KERAS_BACKEND", "WHICH")
import collective_core.keras as hvd
import keras
import numpy
#SETUP
hvd.init()
rank, ranks = hvd.rank(), hvd.size()
class Watch(keras.callbacks.Callback):
    def on_train_batch_begin(self, step, logs=None):
        #HOOK
        if step == 2:
            print("ready", rank, flush=True)
def train():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)), loss="mse")
    points = numpy.ones((80_000, 64), "float32")
    model.fit(points, points[:, :1], 8, 1000, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Watch()])
if __name__ == "__main__":
    train()
"""
_LIGHTNING = """
import os
import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
#SETUP
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
class Samples(Dataset):
    def __len__(self):
        return 10_000_000
    def __getitem__(self, index):
        #ITEM
        return torch.ones(64)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)
    def training_step(self, batch, step):
        #HOOK
        if step == 2:
            print("ready", rank, flush=True)
        return self.layers(batch).mean()
def train():
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=HOSTS, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(Model(), DataLoader(Samples(), batch_size=8, num_workers=WORKERS))
if __name__ == "__main__":
    train()
"""

_DDP = "model = DistributedDataParallel(model)" + _SGD
_FSDP = "for layer in (model[0], model[2], model):\n    fully_shard(layer)" + _SGD
_OF_HVD = (
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
    + _SGD
    + "\noptimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
)
#: Framework → its program.
PROGRAMS = {
    "ddp": _TORCH.replace("#INIT", _DIST.format("gloo")).replace("#MODEL", _DDP),
    "collective": _TORCH.replace("#INIT", _DIST.format("collective")).replace("#MODEL", _DDP),
    "hvd": _TORCH.replace("#INIT", "import collective_core.torch as hvd\n" + _HVD).replace("#MODEL", _OF_HVD),
    "fsdp2": _TORCH.replace("#INIT", "from torch.distributed.fsdp import fully_shard\n" + _DIST.format("gloo")).replace("#MODEL", _FSDP),
    "mpi": _MPI,
    "jax": _JAX,
    "keras": _KERAS.replace("WHICH", "torch"),
    "keras-tf": _KERAS.replace("WHICH", "tensorflow"),
    "lightning": _LIGHTNING,
}
_OF_TORCH = ("ddp", "collective", "hvd", "fsdp2", "lightning")
_OF_GLOO = ("ddp", "fsdp2", "lightning")  # the engine says at once what its ranks disagree about


@dataclass(frozen=True)
class Shape:
    """What one rank does wrong.

    Attributes:
        hook, item, setup, after: code of the training loop, of its data set, of the module, and behind the training.
        kind: of `Kind`, where the rank must stand if no line of the program says it; ``missing``, ``network`` where it must be said.
        act: what the test does when all ranks are ready: ``stop``, ``cut``, ``cut one way``, ``memory``.
        alarms: whether `provision run` is to raise an alarm: what is at work is named only where `provision doctor --job` asks.
        frameworks, hosts, ranks: where it is possible; ``ranks``: at least as many.
    """

    hook: str = ""
    item: str = ""
    setup: str = ""
    after: str = ""
    kind: str = ""
    act: str = ""
    alarms: bool = True
    frameworks: tuple[str, ...] = tuple(PROGRAMS)
    hosts: tuple[int, ...] = (1, 2)
    ranks: int = 2
    workers: int = 0


def _once(code: str) -> str:
    return f"if rank == VICTIM and step == 3:\n{textwrap.indent(textwrap.dedent(code).strip(), '    ')}"


SHAPES = {
    # Files, locks, processes.
    "fifo": Shape(_once(f'open("shard", "rb").read()  {MARK}'), hosts=(1,)),
    "fuse": Shape(_once(f'open("fs/shard-17", "rb").read()  {MARK}'), hosts=(1,)),
    "full disk": Shape(
        _once(
            f"""
            while True:
                try:
                    with open("full/checkpoint", "wb") as file:
                        file.write(bytes(1 << 20))
                    break
                except OSError:
                    time.sleep(1)  {MARK}
            """
        ),
        setup="import time",
        hosts=(1,),
    ),
    "checkpoint lock": Shape(
        "if rank == 0 and step == 0:\n    held = open('checkpoint.lock', 'w')\n    fcntl.flock(held, fcntl.LOCK_EX)\n"
        "    globals()['held'] = held\n" + _once(f"lock = open('checkpoint.lock', 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)  {MARK}"),
        setup="import fcntl",
        hosts=(1,),
    ),
    "lock": Shape(
        _once(f"cache_lock.acquire()\nwith cache_lock:  {MARK}\n    pass"), setup="import threading\ncache_lock = threading.Lock()"
    ),
    "two locks": Shape(
        _once(
            "threading.Thread(target=save, daemon=True).start()\nwith weights_lock:\n    time.sleep(0.5)\n"
            f"    with log_lock:  {MARK}\n        pass"
        ),
        setup="""import threading, time
weights_lock, log_lock = threading.Lock(), threading.Lock()
def save():
    with log_lock:
        time.sleep(0.5)
        with weights_lock:
            print("saved")
""",
    ),
    "empty queue": Shape(_once(f"prefetched.get()  {MARK}"), setup="import queue\nprefetched = queue.Queue()"),
    "thread": Shape(
        _once(f"saver = threading.Thread(target=save, daemon=True)\nsaver.start()\nsaver.join()  {MARK}"),
        setup='import threading\ndef save():\n    open("shard", "wb").write(b"weights")',
        hosts=(1,),
    ),
    "child": Shape(_once(f'subprocess.run(["tail", "-f", "/dev/null"])  {MARK}'), setup="import subprocess"),
    "full pipe": Shape(
        _once(f'viewer = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)\nviewer.stdin.write(bytes(1 << 20))  {MARK}'),
        setup="import subprocess",
    ),
    "gil": Shape(_once(f"reads, writes = os.pipe()\nctypes.PyDLL(None).read(reads, bytes(1), 1)  {MARK}"), setup="import ctypes"),
    "sleep": Shape(_once(f'while not os.path.exists("vocabulary.done"):\n    time.sleep(0.5)  {MARK}'), setup="import time"),
    "pool worker exits": Shape(
        _once(f"pool = multiprocessing.get_context('spawn').Pool(1)\npool.map(os._exit, [0])  {MARK}"), setup="import multiprocessing"
    ),
    "loader fifo": Shape(
        item=f'if index >= 32 and int(os.environ["RANK"]) == VICTIM:\n    open("shard", "rb").read()  {MARK}',
        frameworks=_OF_TORCH,
        workers=1,
        hosts=(1,),
    ),
    "loader pipe": Shape(
        item=f'if index >= 32 and int(os.environ["RANK"]) == VICTIM:\n    os.write(log[1], bytes(1 << 20))  {MARK}',
        setup="log = os.pipe()",
        frameworks=_OF_TORCH,
        workers=2,
    ),
    # The network.
    "silent server": Shape(
        _once(f'urllib.request.urlopen("http://127.0.0.1:SILENT/metrics", b"step=3").read()  {MARK}'),
        setup="import urllib.request",
        hosts=(1,),
    ),
    "blackholed port": Shape(_once(f'socket.create_connection(("127.0.0.1", BLACK))  {MARK}'), setup="import socket", hosts=(1,)),
    "cut": Shape(kind="network", act="cut", hosts=(2,), frameworks=("ddp", "collective", "hvd", "fsdp2", "jax", "keras")),
    "cut one way": Shape(kind="network", act="cut one way", hosts=(2,), frameworks=("ddp", "collective", "hvd", "fsdp2", "lightning")),
    # The machine.
    "stopped": Shape(kind="stopped", act="stop"),
    "swap storm": Shape(
        _once(f"while table.sum() > 0:  {MARK}\n    pass"),
        setup="import numpy\nis_it = os.environ.get('RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == 'VICTIM'\n"
        "table = numpy.ones(25_000_000 if is_it else 1)",
        act="memory",
        alarms=False,
        hosts=(1,),
    ),
    # Loops.
    "python loop": Shape(_once(f'while not os.environ.get("DONE"): pass  {MARK}'), alarms=False),
    "c loop": Shape(_once(f're.match("(x+x+)+y", "x" * 64)  {MARK}'), setup="import re", alarms=False),
    # What ranks disagree about.
    "missing": Shape(
        setup="import sys\nif os.environ['RANK'] == 'VICTIM':\n    sys.exit(0)",
        kind="missing",
        frameworks=("ddp", "collective", "hvd", "fsdp2", "keras", "jax", "lightning"),
    ),
    "order": Shape(
        f"if step == 3 and rank == VICTIM:\n    BROADCAST  {MARK}\nelif step == 3:\n    REDUCE", frameworks=("ddp", "fsdp2", "mpi"), ranks=3
    ),
    "wrong shape": Shape(  # what Gloo and MPI do not refuse at once: another number of rows
        f"if step == 3:\n    for row in torch.ones(6 if rank == VICTIM else 5, 845):\n        dist.all_reduce(row)  {MARK}\n    BARRIER",
        frameworks=("ddp", "fsdp2"),
        ranks=3,
    ),
    "swallowed": Shape(
        f"""try:
    if rank == VICTIM and step == 3:
        raise ValueError("not a number")
except ValueError:
    BARRIER  {MARK}""",
        frameworks=(*_OF_GLOO, "mpi"),
        ranks=3,
    ),
    "evaluation": Shape(
        "if rank == VICTIM and step == 3:\n    evaluate()",
        setup=f"def evaluate():\n    REDUCE  {MARK}",
        frameworks=(*_OF_GLOO, "mpi"),
        ranks=3,
    ),
    "uneven data": Shape(
        "if rank == VICTIM and step == 3:\n    break", after=f"BARRIER  {MARK}", frameworks=("ddp", "fsdp2", "mpi"), ranks=3
    ),
    "two groups": Shape(
        f"if step == 3 and rank == VICTIM:\n    FIRST  {MARK}\n    SECOND\nelif step == 3:\n    SECOND\n    FIRST",
        frameworks=("ddp", "fsdp2", "mpi"),
        ranks=3,
    ),
}
#: Word in a program → the operation.
_OPERATIONS = {
    "torch": {
        "BROADCAST": "dist.broadcast(torch.ones(4225), (rank + 1) % ranks)",
        "REDUCE": "dist.all_reduce(torch.ones(4225))",
        "BARRIER": "dist.barrier()",
        "FIRST": "dist.all_reduce(torch.ones(9), group=groups[0])",
        "SECOND": "dist.all_reduce(torch.ones(9), group=groups[1])",
    },
    "mpi": {
        "BROADCAST": "comm.Bcast(weights, (rank + 1) % ranks)",
        "REDUCE": "comm.allreduce(1)",
        "BARRIER": "comm.recv(source=(rank + 1) % ranks)",
        "FIRST": "groups[0].allreduce(1)",
        "SECOND": "groups[1].allreduce(1)",
    },
}


@dataclass(frozen=True)
class Seed:
    """A job that hangs, or where ``shape`` is one of `HEALTHY`, does not. ``file``, ``guilty``: of `blind`."""

    shape: str
    framework: str
    ranks: int
    hosts: int
    file: str = ""
    guilty: tuple[int, ...] = ()

    @property
    def is_under_mpi(self) -> bool:
        """Whether mpirun starts it, and not `provision run`."""
        return self.framework.startswith("mpi")

    @property
    def what(self) -> Shape:
        return {**SHAPES, **HEALTHY}.get(self.shape, Shape())

    @property
    def victim(self) -> int:
        """The rank at fault: one that is neither always first nor always last."""
        if self.file:
            return self.guilty[0] if self.guilty else -1
        if self.shape == "evaluation":
            return 0
        return 1 + sum(map(ord, self.shape + self.framework)) % (self.ranks - 1)

    def program(self, **values: object) -> str:
        """Its program. ``values``: words in it, such as ports, and what stands for them."""
        if self.file:
            return (BLIND / self.file).read_text(encoding="utf-8")
        shape, is_mpi, lines = self.what, self.framework == "mpi", []
        parts = {"#SETUP": shape.setup, "#HOOK": shape.hook, "#ITEM": shape.item, "#AFTER": shape.after}
        for line in PROGRAMS[self.framework].strip().splitlines():
            part = parts.get(line.strip())
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(line if part is None else textwrap.indent(part, indent))
        words: dict[str, object] = {"VICTIM": self.victim, "WORKERS": shape.workers, "HOSTS": self.hosts}
        text = "\n".join(lines)
        for word, value in {**_OPERATIONS["mpi" if is_mpi else "torch"], **words, **values}.items():
            text = text.replace(word, str(value))
        if "groups[" in text:
            text = text.replace(
                "def train():", f"groups = [{'comm.Dup()' if is_mpi else 'dist.new_group()'} for _ in range(2)]\ndef train():", 1
            )
        return text + "\n"


def _healthy(hook: str, setup: str = "import time") -> Shape:
    return Shape(hook=hook, setup=setup, alarms=False)


_WORK = "import time\ndef work(seconds):\n    end = time.monotonic() + seconds\n    while time.monotonic() < end:\n        sum(range(1000))"
#: Jobs that do not hang.
HEALTHY = {
    "long steps": _healthy("if step > 2:\n    work(7)", _WORK),
    "long compilation": _healthy(
        "if rank == VICTIM and step == 3:\n    subprocess.run([sys.executable, '-c', compiler], check=True)",
        "import subprocess, sys\ncompiler = 'import time; end = time.monotonic() + 15\\nwhile time.monotonic() < end: sum(range(1000))'",
    ),
    "long evaluation": _healthy("if rank == 0 and step == 3:\n    work(15)", _WORK),
    "pauses": _healthy("if step > 2:\n    time.sleep(6)"),
    "uneven speed": _healthy("if step > 2:\n    work(0.2 + rank)", _WORK),
}


def seeds() -> Iterator[Seed]:
    """The hangs: each shape with five frameworks, in turn, and with changing ranks and hosts."""
    turn, sizes = itertools.count(), itertools.cycle((2, 3, 4, 2, 3, 6, 2, 4, 3, 8))
    for name, shape in SHAPES.items():
        count = min(5, len(shape.frameworks))
        first = next(turn) * 3
        for at in range(count):
            framework = shape.frameworks[(first + at) % len(shape.frameworks)]
            hosts = shape.hosts[(first + at) % len(shape.hosts)]
            ranks = max(next(sizes), shape.ranks)
            ranks = min(ranks, 4) if framework in ("keras-tf", "jax", "lightning", "keras") else ranks
            yield Seed(name, framework, ranks + ranks % hosts, hosts)


def healthy_seeds() -> Iterator[Seed]:
    sizes = itertools.cycle((2, 3, 2, 4, 2))
    for at, (name, framework) in enumerate(itertools.product(HEALTHY, PROGRAMS)):
        if framework != "keras-tf":
            yield Seed(name, framework, next(sizes), 1 + (at % 4 == 3))
    yield from (Seed(name, framework, 8, 1 + (framework == "hvd")) for name in HEALTHY for framework in ("ddp", "hvd"))


def blind(*, is_healthy: bool) -> list[Seed]:
    """Programs by an author who had not seen what examines them."""
    listed = yaml.safe_load((BLIND / "MANIFEST.yaml").read_text(encoding="utf-8"))
    found = []
    for each in listed:
        framework = each["framework"] if each["launcher"] != "mpi" else f"mpi {each['framework']}".replace("mpi mpi", "mpi")
        if each["healthy"] is is_healthy:
            found.append(Seed(each["shape"], framework, each["ranks"], each["hosts"], each["file"], tuple(each["guilty"])))
    return found
