"""The plan on a run's page: which hosts get which versions, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from provision.plan.model import COMPONENTS, HostPlan, PlanDocument
from provision.plan.summary import TITLES, by_cause, groups_of, origin
from provision.report import runs
from provision.report.model import Report
from provision.survey import Facts


class _Version(NamedTuple):
    """A component of the plan with its reasons and the rejected candidates."""

    title: str
    version: str
    source: str
    why: Sequence[str]
    rejected: Sequence[tuple[str, str]]


class _Group(NamedTuple):
    """Hosts that get the same. ``held``: they have it, as the run left them."""

    hosts: Sequence[str]
    held: bool
    about: Sequence[tuple[str, str]]
    versions: Sequence[_Version]


def read(folder: Path) -> PlanDocument | None:
    """The run's plan, with equal components as one object, as the resolver makes it."""
    plan = runs.load(folder / "plan.json", PlanDocument)
    if plan is None:
        return None
    seen: dict[Any, Any] = {}
    same = {
        name: replace(host, **{each: seen.setdefault(component, component) for each in COMPONENTS if (component := getattr(host, each))})
        for name, host in plan.hosts.items()
    }
    return plan.model_copy(update={"hosts": same})


def groups(plan: PlanDocument | None, report: Report | None, facts: Mapping[str, Facts]) -> Iterator[_Group]:
    """What all hosts get, if they differ at all, and then each group what only it gets."""
    groups = groups_of(plan.hosts.values()) if plan else []
    holders = {line.host for line in report.hosts if line.state in ("ready", "installed", "unchanged")} if report else set()
    common = [name for name in COMPONENTS if len({id(getattr(hosts[0], name)) for hosts in groups}) == 1] if len(groups) > 1 else []
    if common and plan:
        yield _Group([f"all {len(plan.hosts)} hosts"], set(plan.hosts) <= holders, (), _components(groups[0][0], common))
    for hosts in groups:
        first = hosts[0]
        about = [("system", f"{first.system} on {first.arch}"), ("prefix", first.prefix + ("" if first.root else ", without root"))]
        about.append(("network", f"{first.network.address} on {first.network.interface}: {first.network.why}"))
        if kinds := dict.fromkeys(_gpus(facts[host.name]) for host in hosts if host.name in facts and facts[host.name].gpus):
            about.append(("GPUs", " or ".join(kinds)))
        if first.packages:
            about.append(("packages", ", ".join(first.packages)))
        names = [host.name for host in hosts]
        yield _Group(names, set(names) <= holders, about, _components(first, [name for name in COMPONENTS if name not in common]))


def _gpus(facts: Facts) -> str:
    """``8 × H100 80GB HBM3 behind NVSwitches``."""
    counted = Counter((gpu.name or "GPU").removeprefix("NVIDIA ") for gpu in facts.gpus)
    listed = " + ".join(f"{count} × {name}" for name, count in counted.items())
    return f"{listed} behind NVSwitches" if facts.nvidia.pci_switches else listed


def _components(host: HostPlan, names: Sequence[str]) -> list[_Version]:
    found = []
    for name in names:
        component = getattr(host, name)
        if component is not None:
            cuda = getattr(component, "cuda", None)
            version = (component.version or "-") + (f" for CUDA {cuda}" if cuda else "")
            found.append(_Version(TITLES.get(name, name), version, origin(component), component.why, list(by_cause(component.rejected))))
    return found
