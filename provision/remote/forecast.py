"""How long a run and its steps will take, as earlier runs of the same hosts took.

Only runs that did the same count: the same stages, and as the first installation of a host or not. Without one nothing is forecast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from provision.remote import timeline
from provision.remote.timeline import StepTime, Timeline

_RUNS = 5  # the newest that count
_FOLDERS = 200  # the newest that are looked at
_CHANGED = 1 / 3  # part of an installation's steps that change something where much is installed


@dataclass(frozen=True)
class Forecast:
    """What is expected of a run.

    Attributes:
        runs: how many earlier runs it comes from.
        seconds: of the whole run.
        steps: (stage, host, step) → seconds.
    """

    runs: int
    seconds: float
    steps: Mapping[tuple[str, str, str], float]

    def of(self, stage: str) -> dict[tuple[str, str], float]:
        """(host, step) → seconds."""
        return {(host, step): seconds for (its, host, step), seconds in self.steps.items() if its == stage}


def forecast(
    folders: Path, inventory: str, hosts: Collection[str], stages: Collection[str], *, installs_much: bool, own: Path | None = None
) -> Forecast | None:
    """What to expect of a run with these stages on these hosts; None where no earlier run was like it.

    Args:
        folders: the folder of run folders.
        inventory: as timelines record it.
        installs_much: whether the installation is the first one.
        own: the folder of the run itself.
    """
    likely = (found for found in _timelines(folders, own) if _is_like(found, inventory, hosts, stages, installs_much))
    runs = list(islice(likely, _RUNS))
    if not runs:
        return None
    totals = [max(step.began + step.seconds for step in run.steps) for run in runs]
    return Forecast(len(runs), median(totals), _steps([step for run in runs for step in run.steps], hosts))


def _timelines(folders: Path, own: Path | None) -> Iterator[Timeline]:
    """Those of earlier runs, newest first: the names of the folders begin with the time."""
    for folder in sorted(folders.glob("2*"), reverse=True)[:_FOLDERS]:
        if folder != own and (found := timeline.read(folder)) is not None and found.steps:
            yield found


def _is_like(found: Timeline, inventory: str, hosts: Collection[str], stages: Collection[str], installs_much: bool) -> bool:
    if found.inventory != inventory and {step.host for step in found.steps} != set(hosts):
        return False
    if {step.stage for step in found.steps} != set(stages) or any(step.state in ("failed", "unreachable") for step in found.steps):
        return False
    installed = [step.state for step in found.steps if step.stage == "install"]
    return (installed.count("changed") > len(installed) * _CHANGED) == installs_much


def _steps(taken: Iterable[StepTime], hosts: Collection[str]) -> dict[tuple[str, str, str], float]:
    """Of each host what it took itself, else what others took."""
    own: dict[tuple[str, str, str], list[float]] = {}
    others: dict[tuple[str, str], list[float]] = {}
    for step in taken:
        own.setdefault((step.stage, step.host, step.step), []).append(step.seconds)
        others.setdefault((step.stage, step.step), []).append(step.seconds)
    return {(stage, host, step): median(own.get((stage, host, step), every)) for (stage, step), every in others.items() for host in hosts}
