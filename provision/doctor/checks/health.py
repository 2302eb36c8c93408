"""Checks of the health of one host's GPUs and RDMA ports. Pure; the limits are data (`catalog/gpu_health.yaml`).

An error makes the host unfit for a job, a warning degraded, a note neither.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator

from provision.base.problems import Severity
from provision.base.text import few, joined
from provision.catalog import Catalog
from provision.doctor.checks.gpus import fabric_observations
from provision.doctor.checks.registry import Observation, Observations, check
from provision.doctor.health.model import Gpu, Health, RdmaPort, Test


def _gpus(health: Health) -> Iterator[tuple[str, Gpu]]:
    """The GPUs that still answer, each with its name for messages."""
    for number, gpu in enumerate(health.gpus.gpus if health.gpus else ()):
        if not gpu.lost:
            yield f"GPU {number}", gpu


@check("gpu-health-unreadable")
def _unreadable(health: Health) -> Observations:
    for each in health.unreadable:
        unfit = each.what == "nvidia-smi"  # without the others, less is known; without this one, nothing is
        yield Observation(f"{each.what}: {each.why}", "an output that can be read", severity=None if unfit else "warning")
    if health.xids is None and health.devices:
        what = "the kernel's log cannot be read, so that Xids are unknown"
        yield Observation(what, "dmesg for this user, or sudo without a password", ("sudo usermod -aG adm $USER",), severity="note")


@check("gpu-lost")
def _lost(health: Health) -> Observations:
    if health.gpus is None:
        return
    for number, gpu in enumerate(health.gpus.gpus):
        if gpu.lost:
            yield Observation(f"GPU {number} ({gpu.bus_id}) does not answer", "a GPU that answers")
        elif gpu.recovery:
            yield Observation(f"the driver asks for `{gpu.recovery}` of GPU {number} ({gpu.bus_id})", "nothing to recover")
    if len(health.gpus.gpus) < max(health.devices, health.gpus.attached):
        counted = max(health.devices, health.gpus.attached)
        yield Observation(f"{counted} NVIDIA devices, of which nvidia-smi shows {len(health.gpus.gpus)}", "all of them")


@check("gpu-xid")
def _xids(health: Health, catalog: Catalog) -> Observations:
    known, switches = catalog.gpu_health().xids.of, catalog.gpu_health().sxids
    for xid in health.xids or ():
        entry = (switches.other if xid.nonfatal else switches.fatal) if xid.switch else known.get(str(xid.number))
        name = f"{'SXid' if xid.switch else 'Xid'} {xid.number}"
        if entry is None:
            link = "https://docs.nvidia.com/deploy/xid-errors"
            yield Observation(f"{name} on {xid.device}: {xid.text}", "no Xid", (f"look it up: {link}",), severity="warning")
        else:
            severity: Severity = "warning" if xid.nonfatal and entry.severity == "error" else entry.severity
            what = f"{name} on {xid.device}: {entry.meaning}" + (f" ({xid.text})" if xid.switch else "")
            yield Observation(what, "no Xid", (f"{name}: {entry.remedy}",), severity=severity)


@check("gpu-ecc")
def _memory(health: Health) -> Observations:
    for name, gpu in _gpus(health):
        for wrong, what in (
            (gpu.uncorrectable, f"{gpu.uncorrectable} uncorrectable errors since its last reset"),
            (gpu.remap_failed, "remapping a row of its memory failed: replace it"),
            (gpu.sram_threshold_exceeded, "its SRAM has more errors than allowed: replace it"),
            (gpu.unrepairable, "its memory cannot be repaired: replace it"),
        ):
            if wrong:
                yield Observation(f"{name}: {what}", "none")
        for waits, what in (
            (gpu.remap_pending, "rows of its memory wait for a reset to be remapped"),
            (gpu.retirement_pending, "pages of its memory wait for a reset to be retired"),
            (gpu.repair_pending, "a repair of its memory waits for a reset"),
            (gpu.ecc_pending and gpu.ecc != gpu.ecc_pending, f"ECC is {gpu.ecc}, and {gpu.ecc_pending} after a reboot"),
        ):
            if waits:
                yield Observation(f"{name}: {what}", "nothing that waits", severity="warning")
        if gpu.uncorrectable_ever and not gpu.uncorrectable:
            yield Observation(f"{name}: {gpu.uncorrectable_ever} uncorrectable errors in its life", "none", severity="note")


@check("gpu-nvlink")
def _nvlinks(health: Health, catalog: Catalog) -> Observations:
    counters = catalog.gpu_health().nvlink_errors.of
    most = {link.name: max(each.active for each in health.nvlinks if each.name == link.name) for link in health.nvlinks}
    for link in health.nvlinks:
        # Boards leave links unconnected, all GPUs of a kind the same ones.
        if link.active < most[link.name]:
            yield Observation(f"GPU {link.gpu} has {link.active} active NVLinks ({link.inactive} inactive)", f"{most[link.name]}")
        for counter, limit in counters.items():
            if (count := link.errors.get(counter, 0)) > limit.above:
                yield Observation(f"GPU {link.gpu}: {counter}: {count}", f"{limit.above} or fewer", severity=limit.severity)
    for name, gpu in _gpus(health):
        if gpu.fabric == "Completed" and gpu.fabric_faults:
            yield Observation(f"{name}: its NVLink fabric has {joined(gpu.fabric_faults)}", "a fabric without faults")


@check("nvlink-fabric-state")
def _fabric(health: Health) -> Observations:
    yield from fabric_observations((gpu.fabric, gpu.fabric_status) for _, gpu in _gpus(health))


@check("gpu-pcie")
def _pcie(health: Health, catalog: Catalog) -> Observations:
    allowed = catalog.gpu_health().limits.pcie_replays
    for name, gpu in _gpus(health):
        severity: Severity = "note" if gpu.virtual else "warning"  # what a virtual machine sees of the link may not be so
        # From PCI Express 6.0 on, an idle link switches lanes off (L0p).
        idle = not gpu.busy and (gpu.pcie_generation or 0) >= 6
        if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width and not idle:
            yield Observation(f"{name} has {gpu.pcie_width} lanes", f"{gpu.pcie_max_width} lanes", severity=severity)
        # An idle GPU lowers its link's speed.
        if gpu.busy and gpu.pcie_generation and gpu.pcie_max_generation and gpu.pcie_generation < gpu.pcie_max_generation:
            what = f"{name} runs PCI Express {gpu.pcie_generation}.0 at full clocks"
            yield Observation(what, f"{gpu.pcie_max_generation}.0", severity=severity)
        if (gpu.pcie_replays or 0) > allowed:
            yield Observation(f"{name} repeated {gpu.pcie_replays} packets", f"{allowed} or fewer")


@check("gpu-throttled")
def _throttled(health: Health) -> Observations:
    for name, gpu in _gpus(health):
        if gpu.throttled:
            yield Observation(f"{name} is slowed down: {joined(gpu.throttled)}", "full speed")
        for degrees, limit, part in (
            (gpu.temperature, gpu.highest_temperature, ""),
            (gpu.memory_temperature, gpu.highest_memory_temperature, "'s memory"),
        ):
            if degrees is not None and limit and degrees >= limit:
                yield Observation(f"{name}{part} has {degrees} °C", f"less than {limit} °C")
        if gpu.margin is not None and gpu.margin <= 0:
            yield Observation(f"{name} is {-gpu.margin} °C above the temperature at which it slows down", "cooler")


@check("gpu-power-limit")
def _power(health: Health, catalog: Catalog) -> Observations:
    share = catalog.gpu_health().limits.power_limit_share
    for name, gpu in _gpus(health):
        if gpu.power_limit and gpu.default_power_limit and gpu.power_limit < share * gpu.default_power_limit:
            yield Observation(f"{name} may use {gpu.power_limit:g} W", f"{gpu.default_power_limit:g} W, its default")
        if gpu.clock_setting and gpu.default_clock_setting and gpu.clock_setting < gpu.default_clock_setting:
            yield Observation(f"{name} is set to {gpu.clock_setting} MHz", f"{gpu.default_clock_setting} MHz, its default")


@check("gpu-persistence")
def _persistence(health: Health) -> Observations:
    off = [name for name, gpu in _gpus(health) if gpu.persistence is False]
    if off:
        yield Observation(f"persistence mode is off on {joined(off)}", "on")


@check("gpu-topology")
def _topology(health: Health) -> Observations:
    pairs = health.topology
    if not pairs:
        return
    usual, count = Counter(pairs.values()).most_common(1)[0]
    if usual.startswith("NV") and count > len(pairs) / 2:  # others are built so: bridges over pairs, the cube mesh of eight V100
        odd = [f"GPU {one} and {other}: {kind}" for (one, other), kind in pairs.items() if kind != usual]
        if odd:
            yield Observation(few(odd, 4, "; "), f"{usual}, as the other pairs")


@check("gpu-dcgm")
def _dcgm(health: Health, catalog: Catalog) -> Observations:
    harmless = catalog.gpu_health().dcgm.of
    for each in health.dcgm:
        severity: Severity = "warning" if each.status == "warn" or each.severity in harmless else "error"
        where = f" on GPU {each.gpus}" if each.gpus else ""
        yield Observation(f"{each.test}{where}: {each.text or each.status}", "pass", severity=severity)


def _failed(health: Health, test: Test) -> Observations:
    for each in health.failed:
        if each.test == test:
            yield Observation(f"{test} failed (exit code {each.code}): {each.said}", "exit code 0", severity="error")


@check("gpu-bandwidth")
def _bandwidth(health: Health, catalog: Catalog) -> Observations:
    yield from _failed(health, "nvbandwidth")
    limits = catalog.gpu_health().limits
    gpus = list(health.gpus.gpus if health.gpus else ())
    for test, speeds in health.bandwidths.items():
        usual = statistics.median(speeds)
        for number, speed in enumerate(speeds):
            gpu = gpus[number] if len(gpus) == len(speeds) else None
            lane = limits.pcie_lane_gbs.get(str(gpu.pcie_max_generation)) if gpu else None
            # Of a link's lanes, those that it has: that it has too few is another finding. GPUs next to a Grace CPU are faster than PCIe.
            least = lane * (gpu.pcie_width or 0) * limits.pcie_share if lane and gpu and not gpu.virtual else 0.0
            if speed < max(least, usual * limits.slowest_gpu_share):
                yield Observation(
                    f"{test}: GPU {number} has {speed:g} GB/s", f"{max(least, usual * limits.slowest_gpu_share):.1f} GB/s or more"
                )


@check("gpu-allreduce")
def _all_reduce(health: Health, catalog: Catalog) -> Observations:
    yield from _failed(health, "allreduce")
    measured, known = health.allreduce, catalog.gpu_health().all_reduce
    if measured is None:
        return
    if measured.wrong:
        yield Observation(f"{measured.wrong} sizes with wrong results", "right results", severity="error")
    names = {gpu.name for gpu in (health.gpus.gpus if health.gpus else ())}
    name = names.pop() if len(names) == 1 else ""
    expected = next((each for each in known.expected if each.gpu == name and each.gpus == measured.gpus), None)
    if expected is None:
        what = f"{measured.busbw:g} GB/s of bus bandwidth; what {measured.gpus} × {name or 'different GPUs'} should have is not known"
        yield Observation(what, "", severity="note")
    elif measured.busbw < known.share * expected.busbw:
        severity: Severity = "error" if measured.busbw < known.unfit_share * expected.busbw else "warning"
        what = f"{measured.busbw:g} GB/s of bus bandwidth over {measured.gpus} GPUs"
        yield Observation(what, f"about {expected.busbw:g} GB/s ({expected.from_})", severity=severity)


@check("rdma-port")
def _rdma(health: Health, catalog: Catalog) -> Observations:
    limits = catalog.gpu_health().rdma_errors.of
    active = [port for port in health.rdma if _word(port.state) == "ACTIVE"]
    usual = {port.link_layer: statistics.mode(_gbits(each) for each in active if each.link_layer == port.link_layer) for port in active}
    for port in health.rdma:
        name = f"{port.device} port {port.port}"
        if _word(port.state) in ("INIT", "ARMED"):
            yield Observation(f"{name} is {_word(port.state)}", "ACTIVE", ("is the subnet manager running? sminfo",))
        elif port not in active:
            # Many hosts have unused ports.
            yield Observation(f"{name} is {_word(port.state) or '?'} ({_word(port.phys_state) or '?'})", "ACTIVE", severity="note")
        elif _gbits(port) < usual[port.link_layer]:
            yield Observation(f"{name} has {port.rate}", f"{usual[port.link_layer]:g} Gb/sec, as the others")
        for counter, limit in limits.items():
            text = port.counters.get(counter, "")
            if port in active and re.fullmatch(r"\d{1,20}", text) and int(text) > limit.above:
                yield Observation(f"{name}: {counter} is {text}", f"{limit.above} or fewer", severity=limit.severity)


def _word(text: str) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    return text.partition(":")[2].strip()[:20]


def _gbits(port: RdmaPort) -> float:
    found = re.match(r"\d{1,6}(\.\d{1,3})?", port.rate)
    return float(found[0]) if found else 0.0


@check("gpu-tool-missing")
def _missing(health: Health, catalog: Catalog) -> Observations:
    packages = catalog.gpu_health().tools.of
    for test in health.missing:
        yield Observation(f"the test {test} could not run: its program is not installed", "", (f"package for {test}: {packages[test]}",))
