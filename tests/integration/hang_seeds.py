"""Jobs that hang, and jobs that do not: those that ``tests/data/hangs/seeds.yaml`` describes, and programs of another author next to it.

A seed is (shape, framework, ranks, hosts); `seeds` draws the same ones each time. The line at which the rank at fault has to be found ends
with `MARK`.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MARK = "# HANGS HERE"
DATA = Path(__file__).parents[1] / "data/hangs"
_GIVEN: dict[str, Any] = yaml.safe_load((DATA / "seeds.yaml").read_text(encoding="utf-8"))

_DIST = 'dist.init_process_group("{}")\nrank, ranks = dist.get_rank(), dist.get_world_size()'
_SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.001)"
_DDP = f"model = DistributedDataParallel(model)\n{_SGD}"
_FSDP = f"from torch.distributed.fsdp import fully_shard\nfor layer in (model[0], model[2], model):\n    fully_shard(layer)\n{_SGD}"
_HVD = f"""hvd.broadcast_parameters(model.state_dict(), root_rank=0)
{_SGD}
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"""
_INIT_HVD = "import collective_core.torch as hvd\nhvd.init()\nrank, ranks = hvd.rank(), hvd.size()"
#: Framework → its program, and what stands for words in it.
FRAMEWORKS = {
    "ddp": ("torch", {"#INIT": _DIST.format("gloo"), "#MODEL": _DDP}),
    "collective": ("torch", {"#INIT": _DIST.format("collective"), "#MODEL": _DDP}),
    "hvd": ("torch", {"#INIT": _INIT_HVD, "#MODEL": _HVD}),
    "fsdp2": ("torch", {"#INIT": _DIST.format("gloo"), "#MODEL": _FSDP}),
    "mpi": ("mpi", {}),
    "jax": ("jax", {}),
    "keras": ("keras", {"WHICH": "torch"}),
    "keras-tf": ("keras", {"WHICH": "tensorflow"}),
    "lightning": ("lightning", {}),
}


@dataclass(frozen=True)
class Shape:
    """A shape as ``seeds.yaml`` has it, where its words are explained."""

    hook: str = ""
    item: str = ""
    setup: str = ""
    after: str = ""
    kind: str = ""
    act: str = ""
    alarms: bool = True
    frameworks: tuple[str, ...] = tuple(FRAMEWORKS)
    hosts: tuple[int, ...] = (1, 2)
    ranks: int = 2
    workers: int = 0


SHAPES, HEALTHY = ({name: Shape(**each) for name, each in _GIVEN[kind].items()} for kind in ("shapes", "healthy"))


@dataclass(frozen=True)
class Seed:
    """A job that hangs, or where ``shape`` is one of `HEALTHY`, does not. ``file``, ``guilty``: of `by_another_author`."""

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
        return 0 if self.shape == "evaluation" else 1 + sum(map(ord, self.shape + self.framework)) % (self.ranks - 1)

    def program(self, **values: object) -> str:
        """Its program. ``values``: words in it, such as ports, and what stands for them."""
        if self.file:
            return (DATA / self.file).read_text(encoding="utf-8")
        program, of_framework = FRAMEWORKS[self.framework]
        shape, lines = self.what, []
        parts = {**of_framework, "#SETUP": shape.setup, "#HOOK": shape.hook, "#ITEM": shape.item, "#AFTER": shape.after}
        for line in _GIVEN["programs"][program].splitlines():
            lines.append(textwrap.indent(parts.get(line.strip(), line.strip()).rstrip(), line[: len(line) - len(line.lstrip())]))
        text = "\n".join(line for line in lines if line.strip()) + "\n"
        words = {**_GIVEN["operations"]["mpi" if program == "mpi" else "torch"], **of_framework, **values}
        for word, value in {**words, "VICTIM": self.victim, "WORKERS": shape.workers, "HOSTS": self.hosts}.items():
            text = text.replace(word, str(value))
        group = "comm.Dup()" if program == "mpi" else "dist.new_group()"
        return text.replace("def train():", f"groups = [{group} for _ in range(2)]\ndef train():", 1) if "groups[" in text else text


def seeds() -> Iterator[Seed]:
    """The hangs: each shape with five frameworks, in turn, and with changing ranks and hosts."""
    sizes = itertools.cycle((2, 3, 4, 2, 3, 6, 2, 4, 3, 8))
    for turn, (name, shape) in enumerate(SHAPES.items()):
        for at in range(3 * turn, 3 * turn + min(5, len(shape.frameworks))):
            framework, hosts = shape.frameworks[at % len(shape.frameworks)], shape.hosts[at % len(shape.hosts)]
            ranks = max(next(sizes), shape.ranks)
            ranks = min(ranks, 4) if framework in ("keras-tf", "jax", "lightning", "keras") else ranks
            yield Seed(name, framework, ranks + ranks % hosts, hosts)


def healthy_seeds() -> Iterator[Seed]:
    sizes = itertools.cycle((2, 3, 2, 4, 2))
    for at, (name, framework) in enumerate(itertools.product(HEALTHY, FRAMEWORKS)):
        if framework != "keras-tf":
            ranks, hosts = next(sizes), 1 + (at % 4 == 3)
            yield Seed(name, framework, ranks + ranks % hosts, hosts)
    yield from (Seed(name, framework, 8, 1 + (framework == "hvd")) for name in HEALTHY for framework in ("ddp", "hvd"))


def by_another_author(*, is_healthy: bool) -> list[Seed]:
    """Programs by an author who had not seen what examines them."""
    found = []
    for each in yaml.safe_load((DATA / "MANIFEST.yaml").read_text(encoding="utf-8")):
        framework = each["framework"] if each["launcher"] != "mpi" else f"mpi {each['framework']}".replace("mpi mpi", "mpi")
        if each["healthy"] is is_healthy:
            found.append(Seed(each["shape"], framework, each["ranks"], each["hosts"], each["file"], tuple(each["guilty"])))
    return found
