"""Models of what a host's tools say about its GPUs, its kernel's log and its RDMA ports.

``None`` is what a tool does not know of this GPU, such as ECC counters of one without ECC.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from provision.base.validation import Answer

Test = Literal["dcgm", "nvbandwidth", "allreduce"]


class Output(Answer):
    """What one command printed. ``found``: the program is installed; ``code``: None where it did not end by itself."""

    found: bool
    code: int | None
    timed_out: bool
    text: str


class KernelLog(Answer):
    readable: bool
    lines: Annotated[tuple[str, ...], Field(max_length=200)]


class RdmaPort(Answer):
    """A port as /sys/class/infiniband has it: ``state`` is `4: ACTIVE`, ``rate`` is `100 Gb/sec (4X EDR)`."""

    device: str
    port: str
    state: str
    phys_state: str
    rate: str
    link_layer: str
    counters: dict[str, str]


class HostAnswer(Answer):
    """The document of `hostside/gpu_health.py`. ``gpus``: NVIDIA's devices on the PCI bus that nvidia-smi should show."""

    gpus: int
    outputs: dict[str, Output]
    kernel_log: KernelLog
    rdma: Annotated[tuple[RdmaPort, ...], Field(max_length=256)]


class Gpu(Answer):
    """One GPU of `nvidia-smi -q -x`. Temperatures in degrees Celsius, power in watts, clocks in MHz.

    Attributes:
        recovery: what the driver asks for, such as `Reset`; None where it asks for nothing, or does not say.
        throttled: the active reasons that are a fault of the hardware or its cooling, as nvidia-smi calls them.
        margin: degrees until the GPU slows down, where it counts in those.
    """

    bus_id: str
    name: str
    lost: bool = False
    recovery: str | None = None
    persistence: bool | None = None
    virtual: bool = False
    busy: bool = False
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_replays: int | None = None
    throttled: tuple[str, ...] = ()
    ecc: str | None = None
    ecc_pending: str | None = None
    uncorrectable: int | None = None
    uncorrectable_ever: int | None = None
    sram_threshold_exceeded: bool = False
    repair_pending: bool = False
    unrepairable: bool = False
    remap_pending: bool = False
    remap_failed: bool = False
    retirement_pending: bool = False
    temperature: int | None = None
    highest_temperature: int | None = None
    memory_temperature: int | None = None
    highest_memory_temperature: int | None = None
    margin: int | None = None
    power_limit: float | None = None
    default_power_limit: float | None = None
    clock_setting: int | None = None
    default_clock_setting: int | None = None
    fabric: str | None = None
    fabric_status: str | None = None
    fabric_faults: tuple[str, ...] = ()


class Gpus(Answer):
    """What `nvidia-smi -q -x` says. ``attached``: how many GPUs the driver counts."""

    attached: int
    gpus: tuple[Gpu, ...]


class NvlinkOf(Answer):
    """The NVLinks of one GPU. ``errors``: counter → sum over its links."""

    gpu: int
    name: str
    active: int = 0
    inactive: int = 0
    errors: dict[str, int] = Field(default_factory=dict)


class Xid(Answer):
    """One Xid of the kernel's log.

    Attributes:
        device: its address on the PCI bus.
        nonfatal: the driver itself calls it that.
        switch: it is an SXid, of an NVSwitch.
    """

    number: int
    device: str
    text: str
    nonfatal: bool = False
    switch: bool = False


class DcgmResult(Answer):
    """One failed or doubtful test of `dcgmi diag`. ``severity``: DCGM's own number, from version 4 on."""

    test: str
    status: Literal["fail", "warn"]
    gpus: str
    text: str
    severity: int | None = None


class AllReduce(Answer):
    """nccl-tests' all_reduce_perf. ``busbw``: the largest bus bandwidth of all sizes, in GB/s; ``wrong``: wrong results."""

    gpus: int
    busbw: float
    wrong: int


class Unreadable(Answer):
    """An output that is none of the kind. ``why``: one sentence."""

    what: str
    why: str


class FailedTest(Answer):
    """A test that ran and did not end well. ``code``: its exit code; ``said``: the last line of its output."""

    test: Test
    code: int
    said: str


class Health(Answer):
    """What is known of one host's health.

    Attributes:
        devices: NVIDIA's devices on the PCI bus that nvidia-smi should show.
        gpus: None where nvidia-smi said nothing that can be read.
        topology: of `nvidia-smi topo -m`: (GPU, GPU) → kind of connection, such as NV18 or SYS.
        bandwidths: of nvbandwidth: test → GB/s of each GPU.
        missing: tests that were asked for and whose program is not installed.
        failed: tests whose program says that they failed; DCGM says it in its document.
        unreadable: what could not be read, and why.
        xids: None where the kernel's log could not be read.
    """

    devices: int = 0
    gpus: Gpus | None = None
    nvlinks: tuple[NvlinkOf, ...] = ()
    topology: dict[tuple[int, int], str] = Field(default_factory=dict)
    xids: tuple[Xid, ...] | None = ()
    rdma: tuple[RdmaPort, ...] = ()
    dcgm: tuple[DcgmResult, ...] = ()
    bandwidths: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    allreduce: AllReduce | None = None
    missing: tuple[Test, ...] = ()
    failed: tuple[FailedTest, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
