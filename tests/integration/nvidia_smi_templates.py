"""Makes templates of what the real nvidia-smi prints for many hosts (``provision/sandbox/gpus/nvidia-smi.txt``).

A line is kept once where it differs between hosts only by words of the host or GPU, else with what the hosts have in common that show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Arguments that the survey, the doctor and the roles give it, and ``-L``.
ARGUMENTS = (
    "", "-L", "-q -x", "nvlink -s", "nvlink -e", "topo -m",
    "--query-gpu=name,uuid,memory.total,driver_version,pci.bus_id,compute_cap --format=csv,noheader,nounits",
    "--query-gpu=index,uuid,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw --format=csv,noheader,nounits",
    "--query-gpu=name,compute_cap --format=csv,noheader", "--query-gpu=driver_version --format=csv,noheader",
)  # fmt: skip
TIME = re.compile(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}")
_A_TIME = "Mon Nov 30 12:00:00 2026"
#: The first line of what it prints for each GPU, and of what comes after all GPUs.
_PARTS = {
    "": (r"\|\s+\d+  \S", r" +$"),
    "-q -x": (r"\t<gpu id=", "</nvidia_smi_log>"),
    "topo -m": (r"GPU\d+\t", "$"),
}
#: Of several that fit: what most fields of nvidia-smi are about.
_FEATURES = ("ecc", "mig", "memory", "rows", "pages", "nvlink", "fabric", "fan", "gsp", "clocks", "power", "pcie")
_OF_HOST = ("{version:<12}", "{version}", "{cuda:<8}", "{cuda}", "{gpus}", "\x1b[4m{columns}", "{nvml}")
_OF_GPU = (
    "{index}", "GPU{index}", "{index:>3}", "{number}", "{name}", "{name:<27}", "{uuid}", "{serial}", "{bus}", "0x{slot}", "{slot}",
    "0x{pci}10DE", "{pci}10DE", "{pcie}", "{fan}", "{total}", "{total:>5}MiB", "{free}", "{bar1}", "{power}", "{power:>3}W",
    "{least_power}", "{most_power}", "{shutdown}", "{slowdown}", "{hottest}", "{clock}", "{memory_clock}",
    "{gbps}", "{ways}", "{major}.{minor}",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One host: what ``host._recorded_of`` says of it, and (exit code, text) by arguments."""

    names: frozenset[str]
    host: Mapping[str, object]
    gpus: Sequence[Mapping[str, object]]
    outputs: Mapping[str, tuple[int, str]]


@dataclass
class _Line:
    level: str
    templates: frozenset[str]
    samples: frozenset[int]


def masked(text: str) -> str:
    return TIME.sub(_A_TIME, text)


def learn(samples: Sequence[Sample], program: str) -> str:
    """The file of templates. ``program``: whose outputs they are, in words."""
    said = [f"# Recorded from {program} with nvml.c, by tests/integration/test_gpu_hosts.py --update. Format: recorded.py."]
    for sample in samples:
        state = next((each for each in ("unloaded", "mismatched", "no-gpu") if each in sample.names), None)
        seen: set[tuple[int, str]] = set()
        usual = max(sample.outputs.values(), key=list(sample.outputs.values()).count)
        for arguments, output in [*sample.outputs.items(), ("*", usual)] if state else []:
            if output not in seen and (arguments == "*" or output != usual):
                seen.add(output)
                said.append(f"= {state} {output[0]} {arguments}")
                said += ["|" + sorted(_templates(line, _OF_HOST, sample.host))[-1] for line in output[1].splitlines()]
    working = [each for each in samples if not each.names & {"unloaded", "mismatched", "no-gpu"}]
    everyone = frozenset(range(len(working)))
    for arguments in ARGUMENTS:
        assert {each.outputs[arguments][0] for each in working} == {0}, arguments
        said.append(f"= - 0 {arguments}")
        split = [_parts(arguments, masked(each.outputs[arguments][1]).splitlines(), len(each.gpus)) for each in working]
        for part in ("head", "gpus", "tail"):
            merged: list[_Line] = []
            for number, (sample, parts) in enumerate(zip(working, split, strict=True)):
                blocks = parts[1] if part == "gpus" else [parts[0] if part == "head" else parts[2]]
                words = sample.gpus if part == "gpus" else [sample.host]
                for lines, own in zip(blocks, words, strict=True):
                    merged = _merge(merged, list(_levels(lines, own, number, in_gpu=part == "gpus")))
            for line in merged:
                when = _condition(min(line.templates), line.samples, everyone, [each.names for each in working])
                text = sorted(line.templates, key=lambda each: (each.count("{"), len(each), each))[0]
                said.append(f"{line.level}{' ' if when else ''}{when}|{text}")
    return "\n".join([*said, ""])


def _parts(arguments: str, lines: list[str], count: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Head, what is printed for each GPU, tail."""
    first, last = _PARTS.get(arguments, (r"GPU \d+:" if arguments.startswith("nvlink") else "", "(?!)"))
    starts = [at for at, line in enumerate(lines) if re.match(first, line)]
    if not starts:
        return lines, [[] for _ in range(count)], []
    end = next((at for at in range(starts[-1], len(lines)) if re.match(last, lines[at])), len(lines))
    return lines[: starts[0]], [lines[at:to] for at, to in zip(starts, [*starts[1:], end], strict=True)], lines[end:]


def _levels(lines: list[str], words: Mapping[str, object], sample: int, *, in_gpu: bool) -> Iterator[_Line]:
    """With the NVLinks' lines once: those of the first."""
    link = ""
    for line in lines:
        found = re.match(r"\t Link (\d+):", line)
        link = found[1] if found else link
        if link in ("", "0"):
            text = line.replace("Link 0:", "Link {link}:")
            templates = _templates(text, (*_OF_HOST, *_OF_GPU) if in_gpu else _OF_HOST, words)
            yield _Line("l" if link else "g" if in_gpu else "", templates, frozenset([sample]))


def _templates(text: str, placeholders: Sequence[str], words: Mapping[str, object]) -> frozenset[str]:
    """Every template that has this text with these words."""
    found = []
    for each in placeholders:
        value = each.format(**words)
        if value in text and re.search(r"\w", value):
            found += [(one.start(), one.end(), each) for one in re.finditer(rf"(?<![\w.]){re.escape(value)}(?![\w.])", text)]

    def filled(at: int) -> Iterator[str]:
        yield text[at:]
        for start, end, each in found:
            if start >= at:
                for rest in filled(end):
                    yield text[at:start] + each + rest

    return frozenset(filled(0))


def _merge(one: list[_Line], other: list[_Line]) -> list[_Line]:
    """Both in their order, with lines that have a template in common once (the longest common subsequence)."""
    best = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    alike = [[bool(a.level == b.level and a.templates & b.templates) for b in other] for a in one]
    for i in reversed(range(len(one))):
        for j in reversed(range(len(other))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], best[i + 1][j + 1] + 1 if alike[i][j] else 0)
    merged, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        if alike[i][j] and best[i][j] == best[i + 1][j + 1] + 1:
            merged.append(_Line(one[i].level, one[i].templates & other[j].templates, one[i].samples | other[j].samples))
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            merged.append(one[i])
            i += 1
        else:
            merged.append(other[j])
            j += 1
    return merged + one[i:] + other[j:]


def _condition(what: str, wanted: frozenset[int], everyone: frozenset[int], names: Sequence[frozenset[str]]) -> str:
    """What the hosts that show a line have in common, in the fewest names."""
    if wanted == everyone:
        return ""
    having = {name: frozenset(at for at, each in enumerate(names) if name in each) for name in sorted(set().union(*names), key=_preferred)}
    found = []
    for sign, target in (("", wanted), ("!", everyone - wanted)):
        within = {name: has for name, has in having.items() if has <= target}
        chosen: list[str] = []
        while left := target - frozenset().union(*(within[name] for name in chosen)):
            most = max(within, key=lambda name: len(within[name] & left), default="")
            if not most or not within[most] & left:
                break
            chosen.append(most)
        else:
            found.append((len(chosen), _preferred(chosen[0]), sign, ",".join(chosen)))
    if not found:
        raise ValueError(f"{what}: hosts {sorted(wanted)} have nothing in common")
    return "".join(min(found)[2:])


def _preferred(name: str) -> tuple[int, str]:
    """Features before names of profiles."""
    return (_FEATURES.index(name) if name in _FEATURES else len(_FEATURES), name)
