"""What a check is: an id, and a function that looks at facts and says what it saw. Its texts are data (signatures, conditions.yaml)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from provision.doctor.findings import Severity
from provision.facts import Facts


@dataclass(frozen=True)
class Seen:
    """What was seen on a host where something else was expected.

    Args:
        fix: commands with this host's own paths and names, instead of the entry's general ones.
        host: for looks across hosts, which one it is about.
    """

    what: str
    expected: str
    fix: tuple[str, ...] = ()
    host: str = ""


OneHost = Callable[[Facts], Iterator[Seen]]
AllHosts = Callable[[Mapping[str, Facts]], Iterator[Seen]]


@dataclass(frozen=True)
class Check:
    """One look. ``severity`` replaces the entry's own: what is an error in a log may only be a warning before it bites."""

    id: str
    one: OneHost | None = None
    all: AllHosts | None = None
    severity: Severity | None = None


CHECKS: list[Check] = []


def check(name: str, severity: Severity | None = None) -> Callable[[OneHost], OneHost]:
    """Register a look at one host's facts."""

    def register(look: OneHost) -> OneHost:
        CHECKS.append(Check(name, one=look, severity=severity))
        return look

    return register


def check_across(name: str, severity: Severity | None = None) -> Callable[[AllHosts], AllHosts]:
    """Register a look at all hosts' facts side by side."""

    def register(look: AllHosts) -> AllHosts:
        CHECKS.append(Check(name, all=look, severity=severity))
        return look

    return register
