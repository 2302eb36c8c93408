"""Models of what hosts measure, within bounds that no honest host leaves, and of the certificate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from provision.base.validation import Answer

_Figure = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Text = Annotated[str, Field(max_length=300)]


class Core(Answer):
    """Matrix products on a core. ``kind``: the same for cores that are as fast; ``speed``: compares with that kind alone; ``made``,
    ``wrong``, ``nan``: how many products."""

    speed: _Figure = 0.0
    wrong: _Count = 0
    nan: _Count = 0
    made: _Count = 0
    core: _Count = 0
    kind: _Text = ""


class Device(Core):
    """The same on a GPU, in GFLOPS of TF32; memory and PCI Express in GB/s. ``error``: what ended it."""

    name: _Text
    memory_gbs: _Figure = 0.0
    to_gbs: _Figure = 0.0
    from_gbs: _Figure = 0.0
    error: _Text | None = None


class HostMeasured(Answer):
    """A host's answer. ``mtu``, ``mbps``: of the interface with its address, 0 where unknown; ``memory_gbs``: copied by one core."""

    mtu: Annotated[int, Field(ge=0, le=1_000_000)]
    mbps: _Figure = 0.0
    memory_gbs: _Figure
    cores: Annotated[tuple[Core, ...], Field(max_length=4096)]
    devices: Annotated[tuple[Device, ...], Field(max_length=256)] = ()


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


class Pair(BaseModel):
    """A measurement of two hosts, in a round from 1 on."""

    round: int
    caller: str
    answerer: str
    measured: PairMeasured

    @property
    def link(self) -> tuple[str, str]:
        """Both hosts, in order."""
        return min(self.caller, self.answerer), max(self.caller, self.answerer)

    @property
    def figures(self) -> bool:
        """Whether the two have met."""
        return self.measured.error is None and self.measured.lost < self.measured.sent


class Group(BaseModel):
    """An allreduce of some hosts, one rank on each: its best time, and how many results were wrong."""

    hosts: tuple[str, ...]
    us: float
    wrong: int


class Found(BaseModel, frozen=True):
    """What is wrong. ``host``: whose fault it is, else ``link``: between which two; neither: of the cluster."""

    id: str
    what: str
    hint: str
    host: str | None = None
    link: tuple[str, str] | None = None

    @property
    def where(self) -> str:
        """In words."""
        return self.host or " – ".join(self.link or ("cluster",))


class Certificate(BaseModel):
    """The whole document. ``when`` is in ISO 8601; ``notes``: what was not measured, and why; ``quarantined``: hosts to leave out."""

    schema_number: Literal[1] = Field(1, alias="schema")
    when: str
    ok: bool
    seconds: float
    rounds: int
    hosts: tuple[str, ...]
    quarantined: tuple[str, ...]
    found: tuple[Found, ...]
    notes: tuple[str, ...]
    measured: dict[str, HostMeasured]
    pairs: tuple[Pair, ...]
    groups: tuple[Group, ...]
