"""What a change of the hosts would give: a newer driver, another Python, a host less. A change is a `Proposal`, as remedies are. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from pydantic import BaseModel, Field

from provision.base.documents import Document
from provision.base.errors import UsageError
from provision.base.text import joined
from provision.base.validation import did_you_mean
from provision.base.versions import key
from provision.catalog import Catalog
from provision.plan.model import SCHEMA, Plan, PlanDocument
from provision.plan.requirements import HostRequirements, Requirements
from provision.resolve import resolve
from provision.resolve.driver import known_branch, oldest_version
from provision.resolve.host_classes import HostClass, host_class_of, with_driver_for
from provision.resolve.remedies import Proposal, change_hosts, exclude, with_python
from provision.survey import Facts, gpus, hardware

Kind = Literal["driver", "python", "without"]
_FORM = re.compile(r"(?:(?P<hosts>[^=:]+):)?(?P<kind>[a-z]+)=(?P<value>[^=:]+)")
_HINT = "write driver=580, python=3.12 or without=HOST; for some hosts alone: HOST:driver=580"
_LIFTED = {"torch": "PyTorch", "nccl": "NCCL"}
_MAX_HOSTS = 500  # of an inventory for which a hint is looked for: each change is a whole plan


@dataclass(frozen=True)
class Change:
    """A change as the user typed it. ``hosts``: those that it changes."""

    text: str
    kind: Kind
    value: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Gain:
    """What a plan has, and what it would have; empty: nothing. ``what``: a component, ``known problem`` or ``conflict``."""

    what: str
    now: str
    then: str


@dataclass(frozen=True)
class WhatIf:
    """The plan after changes, and what differs from the plan without them."""

    changes: tuple[str, ...]
    gains: tuple[Gain, ...]
    plan: Plan

    def as_dict(self) -> Document:
        """As JSON (`WhatIfDocument`)."""
        return {
            "schema": SCHEMA,
            "changes": list(self.changes),
            "gains": [asdict(gain) for gain in self.gains],
            "plan": self.plan.as_dict(),
        }


class WhatIfDocument(BaseModel):
    """A plan after changes, and what it gains, as JSON."""

    schema_: Literal[1] = Field(alias="schema")
    changes: list[str]
    gains: list[Gain]
    plan: PlanDocument


def parse(texts: Collection[str], facts: Mapping[str, Facts], catalog: Catalog) -> list[Change]:
    """The changes of the command line. Raises UsageError for an invalid change, unknown hosts, and what the catalogue does not have."""
    changes = []
    for text in texts:
        match = _FORM.fullmatch(text)
        if not match or match["kind"] not in get_args(Kind):
            raise UsageError("invalid change", where=f"--what-if {text}", hint=_HINT)
        kind: Kind = match["kind"]  # type: ignore[assignment]  # one of the literals
        named = tuple((match["hosts"] or "").split(",")) if match["hosts"] else ()
        removed = tuple(match["value"].split(",")) if kind == "without" else ()
        for name in (*named, *removed):
            if name not in facts:
                raise UsageError(
                    f"no host {name}{did_you_mean(name, facts)}", where=f"--what-if {text}", hint=f"hosts are {joined(list(facts))}"
                )
        if kind == "without" and named:
            raise UsageError("a host is left out of all", where=f"--what-if {text}", hint=f"write without={match['value']}")
        changes.append(Change(text, kind, match["value"], removed or named or _concerned(kind, facts, text, catalog)))
    if not set(facts) - {name for change in changes if change.kind == "without" for name in change.hosts}:
        raise UsageError("no host is left", where="--what-if", hint="leave fewer out")
    for change in changes:
        if change.kind != "without":
            _proposal(change, catalog)
    return changes


def _concerned(kind: Kind, facts: Mapping[str, Facts], text: str, catalog: Catalog) -> tuple[str, ...]:
    found = tuple(facts) if kind != "driver" else tuple(name for name, host in facts.items() if gpus.has_gpu(host, catalog))
    if not found:
        raise UsageError("no host has a GPU", where=f"--what-if {text}", hint="leave it out")
    return found


def _proposal(change: Change, catalog: Catalog) -> Proposal:
    """The change as a change of the resolver's input."""
    if change.kind == "without":
        return exclude(change.hosts)
    if change.kind == "python":
        known = catalog.python_packages().numpy.of
        if change.value not in known:
            listed = ", ".join(sorted(known, key=key))
            raise UsageError(f"no Python {change.value} is known", where=f"--what-if {change.text}", hint=f"known are {listed}")
        text = f"Python {change.value} on {joined(change.hosts)}"
        return change_hosts(text, lambda host_class: with_python(host_class, change.value), hosts=change.hosts)
    branch = known_branch(change.value, f"--what-if {change.text}", catalog)
    if (cuda := catalog.cuda().toolkits.of_branch(branch)) is None:  # of the user's own catalogue
        raise UsageError(f"driver {change.value} is older than every CUDA in NVIDIA's table", where=f"--what-if {change.text}", hint=_HINT)
    text = f"driver {change.value} on {joined(change.hosts)}"
    return change_hosts(text, lambda host_class: _with_driver(host_class, cuda, branch), hosts=change.hosts)


def _with_driver(host_class: HostClass, cuda: str, branch: str) -> HostClass:
    """The same class with the oldest driver of the branch."""
    driver = oldest_version(branch, cuda, host_class.catalog)
    return replace(with_driver_for(host_class, cuda), driver=driver, cuda_why=f"driver {driver} runs CUDA {cuda} by NVIDIA's table")


def what_if(
    facts: Mapping[str, Facts], requirements: Requirements, hosts: Mapping[str, HostRequirements], changes: Sequence[Change]
) -> WhatIf:
    """The plan after the changes together, and what it has and the plan without them does not."""
    before = resolve(facts, requirements, hosts)
    after = resolve(facts, requirements, hosts, [_proposal(change, requirements.catalog) for change in changes])
    return WhatIf(tuple(change.text for change in changes), tuple(_gains(before, after, requirements.catalog)), after)


def hint(facts: Mapping[str, Facts], requirements: Requirements, hosts: Mapping[str, HostRequirements]) -> str | None:
    """A change that lifts all hosts: to a newer PyTorch release, else to an NCCL with fewer known problems; None without one.

    Of changes that lift it as far, the first in the order of their cost: the oldest driver, the newest Python, a host less.
    """
    if len(facts) > _MAX_HOSTS:
        return None
    plan = resolve(facts, requirements, hosts)
    if plan.conflicts:
        return None
    known = requirements.catalog
    tried = ((change, resolve(facts, requirements, hosts, [_proposal(change, known)])) for change in _candidates(facts, plan, known))
    lifting = [(change, after) for change, after in tried if not after.conflicts and _rank(after, known) > _rank(plan, known)]
    if not lifting:
        return None
    change, after = max(lifting, key=lambda each: _rank(each[1], known))  # of equal ones the first
    gains = ", ".join(f"{each.what} {each.then} instead of {each.now}" for each in _versions(plan, after, _LIFTED, _releases))
    fewer = len(_problems(plan, requirements.catalog)) - len(_problems(after, requirements.catalog))
    solved = f"{fewer} known problem{'s' if fewer > 1 else ''} fewer" if fewer > 0 else ""
    what = f"leaving {joined(change.hosts)} out" if change.kind == "without" else _proposal(change, requirements.catalog).text
    return f"{what} would give {' and '.join(filter(None, (gains, solved)))}: --what-if {change.text}"


def _rank(plan: Plan, catalog: Catalog) -> tuple[object, ...]:
    """What lifts an inventory, the higher the better: the oldest PyTorch of its hosts, then the known problems of its NCCL."""
    torches = [key(host.torch.version) for host in plan.hosts.values() if host.torch and host.torch.version]
    return min(torches, default=()), -len(_problems(plan, catalog))


def _candidates(facts: Mapping[str, Facts], plan: Plan, catalog: Catalog) -> Iterator[Change]:
    """Single changes that may lift all hosts; of drivers those of supported branches for production, as `--driver auto`."""
    with_gpus = {name: facts[name] for name in plan.hosts if gpus.has_gpu(facts[name], catalog)}
    capabilities = [gpu.compute_capability for host in with_gpus.values() for gpu in host.gpus if gpu.compute_capability]
    cudas = {name: host_class_of(host, catalog).cuda for name, host in with_gpus.items() if not hardware.driver_is_fixed(host, catalog)}
    drivers = catalog.cuda().toolkits.of
    for cuda in sorted(drivers, key=key):
        branch = drivers[cuda].split(".")[0]
        if branch not in catalog.production_branches() or catalog.driver().gpus.misfit(branch, capabilities):
            continue
        older = tuple(name for name, now in cudas.items() if now is not None and key(now) < key(cuda))
        if older:
            scope = "" if len(older) == len(with_gpus) else f"{','.join(older)}:"
            yield Change(f"{scope}driver={branch}", "driver", branch, older)
    for version in sorted(catalog.python_packages().numpy.of, key=key, reverse=True):
        if any(key(host.python.version or "0")[:2] < key(version) for host in plan.hosts.values()):
            yield Change(f"python={version}", "python", version, tuple(plan.hosts))
    if 2 < len(plan.hosts) <= 16:
        for name in plan.hosts:
            yield Change(f"without={name}", "without", name, (name,))


def _gains(before: Plan, after: Plan, catalog: Catalog) -> Iterator[Gain]:
    yield from _versions(before, after, {**_LIFTED, "python": "Python"}, _of_all)
    for what, now, then in (
        ("known problem", _problems(before, catalog), _problems(after, catalog)),
        ("conflict", [f"{each.host}: {each.what}" for each in before.conflicts], [f"{each.host}: {each.what}" for each in after.conflicts]),
    ):
        yield from (Gain(what, each, "") for each in now if each not in then)
        yield from (Gain(what, "", each) for each in then if each not in now)


def _versions(before: Plan, after: Plan, titles: Mapping[str, str], versions: Callable[[Plan, str], str]) -> Iterator[Gain]:
    """Components that change, by what ``versions`` tells of a plan."""
    for name, title in titles.items():
        now, then = (versions(plan, name) for plan in (before, after))
        if now != then:
            yield Gain(title, now, then)


def _releases(plan: Plan, name: str) -> str:
    found = (getattr(host, name) for host in plan.hosts.values())
    return joined(sorted({each.version.partition("+")[0] for each in found if each and each.version}))


def _of_all(plan: Plan, name: str) -> str:
    """``2.13.0``, or ``2.13.0 on 2, 2.4.1 on 1``; empty without any."""
    counted = Counter[str]()
    for host in plan.hosts.values():
        if (component := getattr(host, name)) is not None and component.version:
            cuda = getattr(component, "cuda", None)
            counted[f"{component.version} for CUDA {cuda}" if cuda and "+" not in component.version else component.version] += 1
    return next(iter(counted), "") if len(counted) < 2 else ", ".join(f"{version} on {count}" for version, count in counted.items())


def _problems(plan: Plan, catalog: Catalog) -> list[str]:
    """Known problems of the plan's NCCL."""
    versions = dict.fromkeys(host.nccl.version for host in plan.hosts.values() if host.nccl and host.nccl.version)
    return [f"NCCL {version}: {problem}" for version in versions for problem in catalog.known_bad("nccl", version)]
