"""Models of what hosts measure, within bounds that no honest host leaves, and of the certificate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from provision.base.validation import Answer

_Figure = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Text = Annotated[str, Field(max_length=300)]


class _Products(Answer):
    """Matrix products whose results are known. ``made``: how many; ``wrong``, ``nan``: of these; ``error``: what ended them."""

    speed: _Figure = 0.0
    wrong: _Count = 0
    nan: _Count = 0
    made: _Count = 0
    error: _Text | None = None


class Core(_Products):
    """A core. ``kind``: what is the same for cores that are as fast; ``speed``: compares with cores of that kind alone."""

    core: _Count
    kind: _Text


class Device(_Products):
    """A GPU. ``speed``: GFLOPS of TF32 at most, ``median``: usually; memory and PCI Express in GB/s."""

    name: _Text
    median: _Figure = 0.0
    memory_gbs: _Figure = 0.0
    to_gbs: _Figure = 0.0
    from_gbs: _Figure = 0.0


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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Found(_Part):
    """What is wrong. ``host``: whose fault it is, else ``link``: between which two; neither: of the cluster."""

    id: str
    what: str
    hint: str | None = None
    host: str | None = None
    link: tuple[str, str] | None = None

    @property
    def where(self) -> str:
        """In words."""
        return self.host or (" – ".join(self.link) if self.link else "cluster")


class Pair(_Part):
    """A measurement of two hosts, in a round from 1 on."""

    round: int
    caller: str
    answerer: str
    measured: PairMeasured

    @property
    def hosts(self) -> tuple[str, str]:
        return (self.caller, self.answerer)

    @property
    def link(self) -> tuple[str, str]:
        first, second = sorted(self.hosts)
        return (first, second)


class Group(_Part):
    """An allreduce of some hosts, one rank on each, in microseconds."""

    hosts: tuple[str, ...]
    us: float
    wrong: int


class Certificate(_Part):
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
