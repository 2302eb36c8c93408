"""What a check is: an id, and a function that looks at facts and says what it saw. Its texts are data (signatures, conditions.yaml)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from provision.diagnosis.findings import Severity
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


@dataclass(frozen=True)
class Answer:
    """What one host saw of the others when all looked at each other.

    Args:
        port: where it listened; None if it could not, and ``problem`` says why.
        tcp: peer → port → what a call met; no ports where one got through.
        ssh: peer → what ssh said, None where the login works; only where it was tried.
        mbit: peer → megabits a second on the way to it; only where it was measured.
    """

    port: int | None
    problem: str | None = None
    tcp: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    ssh: Mapping[str, str | None] = field(default_factory=dict)
    mbit: Mapping[str, float] = field(default_factory=dict)


OneHost = Callable[[Facts], Iterator[Seen]]
AllHosts = Callable[[Mapping[str, Facts]], Iterator[Seen]]
Between = Callable[[Mapping[str, Answer]], Iterator[Seen]]


@dataclass(frozen=True)
class Check:
    """One look. ``severity`` replaces the entry's own: what is an error in a log may only be a warning before it bites."""

    id: str
    one: OneHost | None = None
    all: AllHosts | None = None
    between: Between | None = None
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


def check_between(name: str) -> Callable[[Between], Between]:
    """Register a look at what hosts saw of each other."""

    def register(look: Between) -> Between:
        CHECKS.append(Check(name, between=look))
        return look

    return register
