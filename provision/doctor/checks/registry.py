"""Checks: the id of a known error, and a function over facts that yields what it observes. All else about the error is in its entry
(`diagnosis`): the texts for hosts, what helps, and whether `--fix` does it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from provision.base.problems import Severity
from provision.catalog import Catalog
from provision.doctor.health.model import Health
from provision.survey import Facts
from provision.survey.reachability import Reachability


@dataclass(frozen=True)
class Observation:
    """What was observed on a host where something else was expected.

    Args:
        fix: commands with this host's own paths and names, instead of the entry's general ones.
        host: in checks of several hosts, the one that it is about.
        severity: where it depends on what was observed; otherwise the check's or the entry's.
        id: of another known error than the check's.
    """

    what: str
    expected: str
    fix: tuple[str, ...] = ()
    host: str = ""
    severity: Severity | None = None
    id: str = ""


Hosts = Mapping[str, Facts]
Connections = Mapping[str, Reachability]
Healths = Mapping[str, Health]
Observations = Iterator[Observation]


@dataclass(frozen=True)
class Check:
    """One check. Its function's parameters say what it looks at: the ``facts`` of each host, or with `--gpu` its ``health``; ``hosts``:
    the facts of all; their ``connections``; and the ``catalog``. ``severity`` replaces the entry's own: an error in a log may only be a
    warning before it happens."""

    id: str
    function: Callable[..., Observations]
    severity: Severity | None = None

    @property
    def of_health(self) -> bool:
        """Whether it counts for a host's verdict."""
        return "health" in inspect.signature(self.function).parameters

    def observe(self, hosts: Hosts, connections: Connections, healths: Healths, catalog: Catalog) -> Observations:
        """What it observes on all hosts."""
        wanted = inspect.signature(self.function).parameters
        of_all = {"hosts": hosts, "connections": connections, "catalog": catalog}
        shared = {name: known for name, known in of_all.items() if name in wanted}
        if "facts" in wanted:
            for host, facts in hosts.items():
                yield from (replace(each, host=host) for each in self.function(facts, **shared))
        elif self.of_health:
            for host, health in healths.items():
                try:
                    yield from [replace(each, host=host) for each in self.function(health, **shared)]
                except Exception as error:  # noqa: BLE001  what one host's tools print must not end the examination of the others
                    what = f"the check {self.id} cannot read this host's outputs: {type(error).__name__}: {str(error)[:160]}"
                    yield Observation(what, "outputs that can be read", host=host, severity="warning", id="gpu-health-unreadable")
        else:
            yield from self.function(**shared)


CHECKS: list[Check] = []


def check(name: str, severity: Severity | None = None) -> Callable[[Callable[..., Observations]], None]:
    """Register a function as the check for a known error."""
    return lambda function: CHECKS.append(Check(name, function, severity))
