"""Parsers of what NVIDIA's tools print, from driver 470 to 615. Pure: a text in, a model out, or a `ValueError` with one sentence.

The texts come from other machines: they are bounded, and XML with entities of its own is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar
from xml.etree import ElementTree

from pydantic import ValidationError

from provision.doctor.health.model import (
    AllReduce,
    DcgmResult,
    FailedTest,
    Gpu,
    Gpus,
    Health,
    HostAnswer,
    NvlinkOf,
    Output,
    Test,
    Unreadable,
    Xid,
)

_Parsed = TypeVar("_Parsed")

LARGEST = 2 << 20  # characters of one output
MAX_GPUS = 64  # of one host
SHOWN = 160  # characters of an output that a finding quotes
_LARGEST_COUNT = 10**15

# A fault of cooling, power supply or board; the others (idle, a set clock, the power cap) are how GPUs work.
_FAULTS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_NOTHING = frozenset(
    {"", "n/a", "[n/a]", "none", "not supported", "[not supported]", "requested functionality has been deprecated", "gpu is lost"}
)
_LOST = re.compile(r"GPU is lost|GPU requires reset", re.IGNORECASE)
_UNKNOWN = re.compile(r"Unknown Error", re.IGNORECASE)
_ALWAYS_KNOWN = ("uuid", "pci/pci_bus_id", "fb_memory_usage/total")  # of a GPU that answers; fans and sensors fail without it
BANDWIDTH_TESTS = ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce")  # as hostside/gpu_health.py asks for them
_FAIL_BY_CODE = ("nvbandwidth", "allreduce")  # dcgmi also ends with its own codes where tests passed with a warning
_NOT_STARTED = 127  # of the dynamic linker: a library is missing, which says nothing about the GPUs


def health(answer: HostAnswer, asked: tuple[Test, ...] = ()) -> Health:
    """Everything of a host's answer that can be read. ``asked``: the tests that should have run."""
    unreadable: list[Unreadable] = []
    missing: list[Test] = []
    failed: list[FailedTest] = []

    def parsed(name: str, parse: Callable[[str], _Parsed], test: Test | None = None) -> _Parsed | None:
        output = answer.outputs.get(name)
        if output is None or not output.found:
            if output is not None and test:
                missing.append(test)
            return None
        if test and test in _FAIL_BY_CODE and output.code and output.code != _NOT_STARTED:
            failed.append(FailedTest(test=test, code=output.code, said=_last_line(output)))
        try:
            if output.timed_out:
                raise ValueError("it did not end in time")
            if len(output.text) > LARGEST:
                raise ValueError("it is too large")
            return parse(output.text)
        except (ValueError, ValidationError, RecursionError, OverflowError) as error:
            if any(each.test == test for each in failed):
                return None
            why = "it has invalid values" if isinstance(error, ValidationError) else str(error)
            unreadable.append(Unreadable(what=name, why=why + _quote(output)))
            return None

    gpus = parsed("nvidia-smi", nvidia_smi)
    if "nvidia-smi" not in {each.what for each in unreadable} and gpus is None and answer.gpus:
        unreadable.append(Unreadable(what="nvidia-smi", why="it is not installed"))
    status = parsed("nvlink-status", nvlink_status) if gpus else None
    errors = parsed("nvlink-errors", nvlink_errors) if gpus else None
    pairs = parsed("topology", topology) if gpus and not any(gpu.lost for gpu in gpus.gpus) else None  # one that is lost fails it
    bandwidths = parsed("nvbandwidth", nvbandwidth, "nvbandwidth") if "nvbandwidth" in asked else None
    if bandwidths and (without := [each for each in BANDWIDTH_TESTS if each not in bandwidths]) and not failed:
        unreadable.append(Unreadable(what="nvbandwidth", why=f"it has no result of {' and '.join(without)}"))
    return Health(
        devices=answer.gpus,
        gpus=gpus,
        nvlinks=tuple(each.model_copy(update={"errors": (errors or {}).get(each.gpu, {})}) for each in status or ()),
        topology=pairs or {},
        xids=tuple(xids(answer.kernel_log.lines)) if answer.kernel_log.readable else None,
        rdma=answer.rdma,
        dcgm=(parsed("dcgm", dcgm, "dcgm") or ()) if "dcgm" in asked else (),
        bandwidths=bandwidths or {},
        allreduce=parsed("allreduce", all_reduce, "allreduce") if "allreduce" in asked else None,
        missing=tuple(missing),
        failed=tuple(failed),
        unreadable=tuple(unreadable),
    )


def _quote(output: Output) -> str:
    """The end of the first line that says something, for a finding."""
    line = next((line.strip() for line in output.text[:LARGEST].splitlines() if line.strip()), "")
    ended = f" (exit code {output.code})" if output.code else ""
    return f"{ended}: {line[:SHOWN]}" if line else ended


def _last_line(output: Output) -> str:
    """The last line that has a word."""
    return next(
        (line.strip()[:SHOWN] for line in reversed(output.text[:LARGEST].splitlines()) if re.search(r"\w", line)), "it printed nothing"
    )


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"invalid count: {text[:20]}")
    return value


def nvidia_smi(text: str) -> Gpus:
    """`nvidia-smi -q -x` of any driver."""
    begin = text.find("<?xml")
    if begin < 0:
        raise ValueError("invalid answer: expected XML")
    document = text[begin:]
    if "<!ENTITY" in document or re.search(r"<!DOCTYPE[^>]*\[", document):
        raise ValueError("it declares entities of its own, which nvidia-smi never does")
    try:
        root = ElementTree.fromstring(document.strip())  # noqa: S314  without entities nothing in it can grow
    except ElementTree.ParseError as error:
        raise ValueError(f"its XML is damaged: {error}") from error
    if root.tag != "nvidia_smi_log":
        raise ValueError("it is not nvidia-smi's XML")
    found = root.findall("gpu")
    if len(found) > MAX_GPUS:
        raise ValueError(f"it lists {len(found)} GPUs")
    return Gpus(attached=_number(root, "attached_gpus", int) or 0, gpus=tuple(_gpu(each) for each in found))


def _gpu(node: ElementTree.Element) -> Gpu:
    link, ecc = "pci/pci_gpu_link_info/", "ecc_errors/"
    power = node.find("gpu_power_readings") if node.find("gpu_power_readings") is not None else node.find("power_readings")
    words = [each.text or "" for each in node.iter()]
    return Gpu(
        bus_id=(_text(node, "pci/pci_bus_id") or node.get("id") or "")[:40],
        name=(_text(node, "product_name") or "GPU")[:100],
        lost=any(_LOST.search(word) for word in words) or any(_UNKNOWN.search(node.findtext(path) or "") for path in _ALWAYS_KNOWN),
        recovery=_recovery(node),
        persistence={"enabled": True, "disabled": False}.get((_text(node, "persistence_mode") or "").lower()),
        virtual=_text(node, "gpu_virtualization_mode/virtualization_mode") is not None,
        busy=_text(node, "performance_state") == "P0",
        pcie_width=_number(node, link + "link_widths/current_link_width", int),
        pcie_max_width=_number(node, link + "link_widths/max_link_width", int),
        pcie_generation=_number(node, link + "pcie_gen/current_link_gen", int),
        pcie_max_generation=_number(node, link + "pcie_gen/max_link_gen", int),
        pcie_replays=_number(node, "pci/replay_counter", int),
        throttled=tuple(_throttled(node)),
        ecc=_text(node, "ecc_mode/current_ecc"),
        ecc_pending=_text(node, "ecc_mode/pending_ecc"),
        uncorrectable=_uncorrectable(node.find(ecc + "volatile")),
        uncorrectable_ever=_uncorrectable(node.find(ecc + "aggregate")),
        sram_threshold_exceeded=_yes(node, ecc + "aggregate/sram_threshold_exceeded"),
        repair_pending=_yes(node, ecc + "channel_repair_pending") or _yes(node, ecc + "tpc_repair_pending"),
        unrepairable=_yes(node, ecc + "unrepairable_memory"),
        remap_pending=_yes(node, "remapped_rows/remapped_row_pending") or _yes(node, "remapped_banks/bank_remapper_pending"),
        remap_failed=_yes(node, "remapped_rows/remapped_row_failure"),
        retirement_pending=_yes(node, "retired_pages/pending_retirement") or _yes(node, "retired_pages/pending_blacklist"),
        temperature=_number(node, "temperature/gpu_temp", int),
        highest_temperature=_number(node, "temperature/gpu_temp_max_gpu_threshold", int),
        memory_temperature=_number(node, "temperature/memory_temp", int),
        highest_memory_temperature=_number(node, "temperature/gpu_temp_max_mem_threshold", int),
        margin=_number(node, "temperature/gpu_temp_tlimit", int),
        power_limit=None if power is None else _number(power, "current_power_limit", float) or _number(power, "power_limit", float),
        default_power_limit=None if power is None else _number(power, "default_power_limit", float),
        clock_setting=_number(node, "applications_clocks/graphics_clock", int),
        default_clock_setting=_number(node, "default_applications_clocks/graphics_clock", int),
        fabric=_text(node, "fabric/state"),
        fabric_status=_text(node, "fabric/status"),
        fabric_faults=tuple(_fabric_faults(node)),
    )


def _text(node: ElementTree.Element, path: str) -> str | None:
    """The text of an element; None where the tool says in one of its ways that there is none."""
    text = (node.findtext(path) or "").strip()
    return None if text.lower() in _NOTHING else text[:200]


def _number(node: ElementTree.Element, path: str, kind: Callable[[float], _Parsed]) -> _Parsed | None:
    """The number at the beginning of an element's text: of `16x`, `85 C`, `70.00 W`, `1410 MHz`."""
    found = re.match(r"-?\d{1,15}(\.\d{1,6})?", _text(node, path) or "")
    return kind(float(found[0])) if found else None


def _yes(node: ElementTree.Element, path: str) -> bool:
    return (_text(node, path) or "").lower() in ("yes", "true")


def _uncorrectable(node: ElementTree.Element | None) -> int | None:
    """Since driver 545 the SRAM's errors are counted by kind; before Ampere, `double_bit` has all of them."""
    names = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable", "double_bit/total")
    counts = [count for name in names if node is not None and (count := _number(node, name, int)) is not None]
    return sum(counts) if counts else None


def _recovery(node: ElementTree.Element) -> str | None:
    if action := _text(node, "gpu_recovery_action"):
        return action
    for name, action in (("reset_required", "Reset"), ("drain_and_reset_recommended", "Drain and Reset")):
        if _yes(node, f"gpu_reset_status/{name}"):
            return action
    return None


def _throttled(node: ElementTree.Element) -> Iterator[str]:
    for group in ("clocks_event_reason", "clocks_throttle_reason"):
        for name in _FAULTS:
            if _text(node, f"{group}s/{group}_{name}") == "Active":
                yield name


def _fabric_faults(node: ElementTree.Element) -> Iterator[str]:
    """What is wrong with a fabric that has accepted the GPU; drivers below 580 have no ``summary``."""
    for name, well in (("summary", "Healthy"), ("bandwidth", "Full"), ("incorrect_configuration", "None")):
        if (value := _text(node, f"fabric/health/{name}")) and value != well:
            yield f"{name} {value}"
    for name in ("route_recovery_in_progress", "route_unhealthy", "access_timeout_recovery"):
        if _yes(node, f"fabric/health/{name}"):
            yield name


_GPU_LINE = re.compile(r"GPU (\d{1,3}): (.{0,100}?)(?: \(UUID|$)")


def _by_gpu(text: str) -> Iterator[tuple[int, str, str]]:
    """(GPU, its name, a line about it)."""
    number, name = -1, ""
    for line in text.splitlines():
        stripped = line.strip()
        if found := _GPU_LINE.match(stripped):
            number, name = int(found[1]), found[2]
        elif number >= 0:
            yield number, name, stripped[:SHOWN]


def nvlink_status(text: str) -> list[NvlinkOf]:
    """`nvidia-smi nvlink -s`; nothing where no GPU has NVLinks."""
    counts: dict[int, tuple[str, int, int]] = {}
    for gpu, name, line in _by_gpu(text):
        if found := re.match(r"Link \d+: (?:(<inactive>|inactive)|[\d.]+ GB/s)", line, re.IGNORECASE):
            _, active, inactive = counts.get(gpu, (name, 0, 0))
            counts[gpu] = (name, active + (found[1] is None), inactive + (found[1] is not None))
    return [NvlinkOf(gpu=gpu, name=name, active=active, inactive=inactive) for gpu, (name, active, inactive) in counts.items()]


def nvlink_errors(text: str) -> dict[int, dict[str, int]]:
    """`nvidia-smi nvlink -e`: GPU → counter → sum over its links."""
    sums: dict[int, dict[str, int]] = {}
    for gpu, _, line in _by_gpu(text):
        if found := re.match(r"Link \d+: ([A-Za-z ]{1,60}): (\d{1,15})$", line):
            of_gpu = sums.setdefault(gpu, {})
            of_gpu[found[1]] = of_gpu.get(found[1], 0) + _count(found[2])
    return sums


def topology(text: str) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m`, with or without network cards; terminals' colours are ignored."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words and words[0] == "GPU0"), None)
    if header is None:
        raise ValueError("it has no row of GPUs")
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d{1,3}", word)]
    pairs: dict[tuple[int, int], str] = {}
    for words in lines:
        if words and words is not header and re.fullmatch(r"GPU\d{1,3}", words[0]) and len(words) > len(columns):
            row = int(words[0][3:])
            pairs |= {(row, column): word[:8] for column, word in zip(columns, words[1:], strict=False) if column > row}
    return pairs


_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,20})\): (\d{1,4})\b[, ]*(.*)")
_SXID = re.compile(r"\bSXid \(PCI:([0-9a-fA-F:.]{1,20})\): (\d{1,6})\b[, ]*(.*)")
_OFF_THE_BUS = re.compile(r"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]{4,20}?):? .*fallen off the bus")
FALLEN_OFF_THE_BUS = 79  # some drivers print its sentence without its number


def xids(lines: tuple[str, ...]) -> Iterator[Xid]:
    """The Xids in lines of the kernel's log, each once per GPU or NVSwitch with its last line."""
    found: dict[tuple[int, str], Xid] = {}
    for line in lines:
        switch = _SXID.search(line)
        if seen := switch or _XID.search(line):
            device, number, text = seen[1], int(seen[2]), seen[3]
        elif seen := _OFF_THE_BUS.search(line):
            device, number, text = seen[1], FALLEN_OFF_THE_BUS, "GPU has fallen off the bus"
        else:
            continue
        device = device.rpartition(".")[0] or device
        same = found.get((number, device))
        nonfatal = bool(re.search(r"\bNon-?fatal\b", text)) and (same is None or same.nonfatal)
        found[number, device] = Xid(number=number, device=device, text=text[:SHOWN], nonfatal=nonfatal, switch=switch is not None)
    yield from found.values()


def dcgm(text: str) -> tuple[DcgmResult, ...]:
    """`dcgmi diag -j` of DCGM 2 to 4: the latter names entities, and its warnings are objects."""
    begin = text.find("{")
    if begin < 0:
        raise ValueError("invalid answer: expected JSON")
    try:
        document = json.JSONDecoder().raw_decode(text[begin:])[0]
    except ValueError as error:
        raise ValueError(f"its JSON is damaged: {error}") from error
    root = next((_mapping(document[name]) for name in ("DCGM GPU Diagnostic", "DCGM Diagnostic") if name in document), None)
    if root is None or not isinstance(root.get("test_categories"), list):
        message = (root or _mapping(document)).get("runtime_error")
        raise ValueError(f"it ran no test: {str(message)[:SHOWN]}" if message else "it ran no test")
    results: list[DcgmResult] = []
    for category in root["test_categories"]:
        for test in _list(_mapping(category).get("tests")):
            if test is not None:  # DCGM 3 writes nulls between tests
                results += list(_dcgm_results(_mapping(test)))
    return tuple(results[:200])


def _dcgm_results(test: Mapping[str, Any]) -> Iterator[DcgmResult]:
    for each in _list(test.get("results")):
        result = _mapping(each)
        status: Literal["fail", "warn"] | None = {"fail": "fail", "warn": "warn"}.get(str(result.get("status", "")).lower())  # type: ignore[assignment]
        if status:
            warnings = result.get("warnings")
            first = warnings[0] if isinstance(warnings, list) and warnings else warnings
            text = first.get("warning") if isinstance(first, dict) else first
            severity = first.get("error_severity") if isinstance(first, dict) else None
            gpus = result.get("gpu_ids", result.get("entity_id", ""))
            yield DcgmResult(
                test=str(test.get("name", "?"))[:60],
                status=status,
                gpus=str(gpus)[:60],
                text=str(text or "")[:SHOWN],
                severity=severity if isinstance(severity, int) else None,
            )


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not a document of dcgmi diag")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("it is not a document of dcgmi diag")
    return value


def nvbandwidth(text: str) -> dict[str, tuple[float, ...]]:
    """The tests of nvbandwidth that have one row, with a number for each GPU."""
    tests: dict[str, tuple[float, ...]] = {}
    name = ""
    for line in text.splitlines():
        if found := re.match(r"\s*Running (\w{1,80})\.", line):
            name = found[1]
        elif name and name not in tests and re.match(r"\s*0(\s+(\d+\.\d+|N/A))+\s*$", line) and "." in line:
            tests[name] = tuple(_finite(word) for word in line.split()[1:] if word != "N/A")[:MAX_GPUS]
    if not tests:
        raise ValueError("it has no result")
    return tests


def all_reduce(text: str) -> AllReduce:
    """all_reduce_perf of nccl-tests, old and new; lines may begin with mpirun's tags."""
    lines = [re.sub(r"^\[\d+,\d+\]<std\w+>:", "", line) for line in text.splitlines()]
    ranks = sum(bool(re.match(r"\s*#\s+Rank\s+\d+\b", line)) for line in lines)
    best, wrong = 0.0, 0
    for words in (line.split() for line in lines):
        # size count type [redop [root]] time algbw busbw #wrong [time algbw busbw #wrong]
        if len(words) >= 7 and words[0].isdigit() and words[1].isdigit() and words[2].isalnum():
            numbers = words[3:]
            while numbers and not re.fullmatch(r"\d+(\.\d+)?", numbers[0]):
                numbers = numbers[1:]  # redop, and a root of -1
            groups = [numbers[start : start + 4] for start in range(0, len(numbers), 4)]
            for group in groups:
                if len(group) == 4:
                    best = max(best, _finite(group[2]))
                    wrong += group[3] not in ("N/A",) and _finite(group[3]) > (0 if group[3].isdigit() else 1e-3)
    if not best:
        raise ValueError("it has no result")
    return AllReduce(gpus=ranks, busbw=best, wrong=wrong)


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"invalid bandwidth: {word[:20]}")
    return value
