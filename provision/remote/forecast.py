"""How long a run and its steps will take, as earlier runs of the same hosts took.

Only runs that did the same count: the same stages, on as many hosts that were new. Without one nothing is forecast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from provision.base import run_folders
from provision.remote import timeline
from provision.remote.timeline import NewHosts, StepTime, Timeline

_RUNS = 5  # the newest that count
_FOLDERS = 200  # the newest that are looked at


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
    folders: Path, hosts: Collection[str], stages: Collection[str], new_hosts: NewHosts | None, own: Path | None = None
) -> Forecast | None:
    """What to expect of a run with these stages on these hosts; None where no earlier run was like it.

    Args:
        folders: the folder of run folders.
        new_hosts: as timelines record it.
        own: the folder of the run itself.
    """
    likely = (found for found in _timelines(folders, own) if _is_like(found, hosts, stages, new_hosts))
    runs = list(islice(likely, _RUNS))
    if not runs:
        return None
    totals = [max(step.began + step.seconds for step in run.steps) for run in runs]
    return Forecast(len(runs), median(totals), _steps(step for run in runs for step in run.steps))


def _timelines(folders: Path, own: Path | None) -> Iterator[Timeline]:
    """Those of earlier runs, newest first."""
    for folder in run_folders.newest_first(folders)[:_FOLDERS]:
        if folder != own and (found := timeline.read(folder)) is not None and found.steps:
            yield found


def _is_like(found: Timeline, hosts: Collection[str], stages: Collection[str], new_hosts: NewHosts | None) -> bool:
    return (
        found.new_hosts == new_hosts
        and {step.host for step in found.steps} == set(hosts)
        and {step.stage for step in found.steps} == set(stages)
        and all(step.state in ("ok", "changed") for step in found.steps)
    )


def _steps(taken: Iterable[StepTime]) -> dict[tuple[str, str, str], float]:
    """What each step of each host took."""
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for step in taken:
        seconds.setdefault((step.stage, step.host, step.step), []).append(step.seconds)
    return {key: median(found) for key, found in seconds.items()}
