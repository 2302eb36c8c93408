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
    """One check of all hosts. ``severity`` replaces the entry's own: an error in a log may only be a warning before it happens.
    ``of_health``: of GPUs' health."""

    id: str
    observe: Callable[[Hosts, Connections, Healths, Catalog], Observations]
    severity: Severity | None = None
    of_health: bool = False


CHECKS: list[Check] = []


def _observed(check: Callable[..., Observations], *known: object) -> Observations:
    """What a check observes, which has as many parameters as it needs of ``known``."""
    return check(*known[: len(inspect.signature(check).parameters)])


def host_check(name: str, severity: Severity | None = None) -> Callable[[Callable[..., Observations]], None]:
    """Register a check of one host's facts, by the catalogue where the check takes it, too."""

    def register(check: Callable[..., Observations]) -> None:
        def observe(hosts: Hosts, _: Connections, __: Healths, catalog: Catalog) -> Observations:
            for host, facts in hosts.items():
                yield from (replace(observation, host=host) for observation in _observed(check, facts, catalog))

        CHECKS.append(Check(name, observe, severity))

    return register


def cluster_check(name: str, severity: Severity | None = None) -> Callable[[Callable[[Hosts], Observations]], None]:
    """Register a check that compares the facts of all hosts."""
    return lambda check: CHECKS.append(Check(name, lambda hosts, _, __, ___: check(hosts), severity))


def connection_check(name: str) -> Callable[[Callable[[Connections], Observations]], None]:
    """Register a check of the connections between hosts."""
    return lambda check: CHECKS.append(Check(name, lambda _, connections, __, ___: check(connections)))


def health_check(name: str) -> Callable[[Callable[..., Observations]], None]:
    """Register a check of the health of one host's GPUs, which is known with `--gpu` only, by the catalogue where the check takes it, too.
    It counts for the host's verdict."""

    def register(check: Callable[..., Observations]) -> None:
        def observe(_: Hosts, __: Connections, healths: Healths, catalog: Catalog) -> Observations:
            for host, health in healths.items():
                try:
                    yield from [replace(observation, host=host) for observation in _observed(check, health, catalog)]
                except Exception as error:  # noqa: BLE001  what one host's tools print must not end the examination of the others
                    what = f"the check {name} cannot read this host's outputs: {type(error).__name__}: {str(error)[:160]}"
                    yield Observation(what, "outputs that can be read", host=host, severity="warning", id="gpu-health-unreadable")

        CHECKS.append(Check(name, observe, of_health=True))

    return register
