"""Models of what hosts measure, within bounds that no honest host leaves, and of the certificate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PlainSerializer, model_validator

from provision.base.problems import Problem
from provision.base.validation import Answer

_Figure = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Text = Annotated[str, Field(max_length=300)]
_Problem = Annotated[Problem, PlainSerializer(Problem.as_dict, return_type=dict[str, str | None])]


class Part(Answer):
    """Matrix products on a core, by second, or on a GPU, in GFLOPS of TF32, with copies in its memory and over PCI Express, in GB/s.

    ``kind``: the same for cores that are as fast, and a GPU's model; ``made``, ``wrong``: how many products; ``error``: what ended it.
    """

    kind: _Text = ""
    core: _Count = 0
    speed: _Figure = 0.0
    wrong: _Count = 0
    made: _Count = 0
    memory_gbs: _Figure = 0.0
    to_gbs: _Figure = 0.0
    from_gbs: _Figure = 0.0
    error: _Text | None = None


class HostMeasured(Answer):
    """A host's answer. ``memory_gbs``: copied by one core; ``error``: instead of figures."""

    memory_gbs: _Figure = 0.0
    cores: Annotated[tuple[Part, ...], Field(max_length=4096)] = ()
    devices: Annotated[tuple[Part, ...], Field(max_length=256)] = ()
    error: _Text | None = None

    @property
    def parts(self) -> Iterator[tuple[str, Part, dict[str, float]]]:
        """(name, part, its figures by name)."""
        yield "memory", Part(kind=" ".join(sorted({each.kind for each in self.cores}))[:300]), {"copied_gbs": self.memory_gbs}
        for core in self.cores:
            yield f"core {core.core}", core, {"core": core.speed}
        for number, gpu in enumerate(self.devices):
            figures = {"tf32_tflops": gpu.speed / 1e3, "memory_gbs": gpu.memory_gbs, "pcie_gbs": min(gpu.to_gbs, gpu.from_gbs)}
            yield f"GPU {number}", gpu, {} if gpu.error else figures


class PairMeasured(Answer):
    """The answer of the side that called. ``big``: pings as long as the MTU; ``up``: from it to its peer; ``error``: instead of figures."""

    latency_us: _Figure = 0.0
    sent: _Count = 0
    lost: _Count = 0
    big_sent: _Count = 0
    big_lost: _Count = 0
    up_mbps: _Figure = 0.0
    down_mbps: _Figure = 0.0
    error: _Text | None = None

    @model_validator(mode="after")
    def _counts(self) -> PairMeasured:
        if self.lost > self.sent or self.big_lost > self.big_sent or (self.error is None and not self.sent):
            raise ValueError("must not have lost more than was sent")
        return self

    @property
    def mbps(self) -> float:
        """Of the slower direction."""
        return min(self.up_mbps, self.down_mbps)


class Pair(BaseModel, frozen=True):
    """A measurement of two hosts, in a round from 1 on."""

    round: int
    caller: str
    answerer: str
    measured: PairMeasured

    @property
    def hosts(self) -> tuple[str, ...]:
        """Both, in order."""
        return tuple(sorted((self.caller, self.answerer)))


class Group(BaseModel, frozen=True):
    """An allreduce of some hosts, one rank on each: its best time, and how many results were wrong."""

    hosts: tuple[str, ...]
    us: float
    wrong: int


class Target(BaseModel, frozen=True):
    """How a host is measured: the interface and address at which others reach it, with its MTU and Mbit/s (0: unknown), and a Python.
    ``torch``: whether that has PyTorch."""

    address: str
    interface: str = ""
    mtu: int = 0
    mbps: float = 0
    python: str = "python3"
    torch: bool = False


class Certificate(BaseModel):
    """The whole document. ``when`` is in ISO 8601; ``notes``: what was not measured, and why; ``quarantined``: hosts to leave out. What is
    found names in ``where`` a host, the ends of a link or the cluster, and in ``host`` who is to be left out because of it."""

    schema_number: Literal[1] = Field(1, alias="schema")
    when: str
    ok: bool
    seconds: float
    rounds: int
    hosts: tuple[str, ...]
    quarantined: tuple[str, ...]
    found: tuple[_Problem, ...]
    notes: tuple[str, ...]
    targets: dict[str, Target]
    measured: dict[str, HostMeasured]
    pairs: tuple[Pair, ...]
    groups: tuple[Group, ...]
