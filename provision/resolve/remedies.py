"""Conflicts and their remedies. Each remedy is tried on the resolver before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from provision.base.problems import Problem, Remedy
from provision.base.text import joined
from provision.base.versions import key
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import HostClass, HostClasses, Interpreter, with_driver_for, with_newest_driver, without_gpus

ConflictId = Literal[
    "nccl", "nccl-absent", "nccl-not-the-same", "nccl-source", "nccl-vendor", "nccl-version", "openmpi", "openmpi-known-bad",
    "openmpi-version", "python", "torch", "accelerator", "architecture", "distribution", "driver-misfit", "driver-too-old", "gpu-fault",
    "horovod-installed", "network", "network-interface", "prefix", "driver-branch", "driver-container", "driver-gpus-unknown",
    "driver-is-newer", "driver-kernel", "driver-modules", "driver-packages", "driver-privileges", "driver-repository", "driver-runfile",
    "driver-secure-boot", "driver-vgpu", "driver-wsl",
]  # fmt: skip
MAX_REMEDIES = 2  # are offered for a conflict: the cheapest


@dataclass(frozen=True)
class Proposal(Remedy):
    """A remedy that may resolve a conflict.

    Attributes:
        apply: the resolver's input after it; None if it is unknown.
        group: of several in a group only the first that works is offered.
        excluded: the hosts that it leaves out.
        fields: the fields of ``Requirements`` that it changes.
        whole: it changes several kinds of hosts, and is offered only if it leads to a plan.
    """

    apply: Callable[[HostClasses, Requirements], tuple[HostClasses, Requirements]] | None = None
    group: str = ""
    excluded: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    whole: bool = False

    def remedy(self, addition: str = "") -> Remedy:
        """The remedy as the user reads it."""
        return Remedy(self.text + addition, self.about)


class Conflict(Exception):
    """Raised when nothing fits: which constraint, the host that blocks, what is wrong, and ``proposals`` in the order of their cost, which
    are read once."""

    def __init__(self, id: ConflictId, host: str, what: str, proposals: Iterable[Proposal]) -> None:
        super().__init__(what)
        self.id, self.host, self.what, self.proposals = id, host, what, proposals


Conflicts = Mapping[Hashable, Conflict]  # by what has the conflict: a component, a host class, …


def change_requirements(text: str, **fields: Any) -> Proposal:
    """Other requirements: the fields of ``Requirements`` that change."""
    return Proposal(text, "options", lambda host_classes, before: (host_classes, replace(before, **fields)), fields=tuple(fields))


def kept_bad(component: str, version: str, problems: Iterable[str], requirements: Requirements) -> list[str]:
    """Notes on the known problems of a version, where an earlier run chose it."""
    kept = problems if component in requirements.kept else ()
    return [f"{version}, which an earlier run chose, is known bad: {problem}; --upgrade resolves again" for problem in kept]


def exclude(names: Sequence[str]) -> Proposal:
    """The plan without these hosts."""
    limit = ",".join(f"!{name}" for name in names)
    how = "remove them from the inventory, or use --limit" if len(names) > 3 else f"--limit '{limit}'"
    text = f"leave {joined(names)} out: {how}"
    return Proposal(text, apply=lambda host_classes, before: (remaining(host_classes, names), before), excluded=tuple(names))


def remaining(host_classes: HostClasses, excluded: Collection[str]) -> HostClasses:
    """The host classes without the excluded hosts."""
    return {host_class: left for host_class, names in host_classes.items() if (left := [name for name in names if name not in excluded])}


def change_hosts(text: str, change: Callable[[HostClass], HostClass], group: str = "", hosts: Collection[str] | None = None) -> Proposal:
    """A change of the hosts: every class becomes the result of ``change``; with ``hosts`` that of these alone."""

    def apply(host_classes: HostClasses, requirements: Requirements) -> tuple[HostClasses, Requirements]:
        changed: dict[HostClass, list[str]] = {}
        for host_class, names in host_classes.items():
            others = [name for name in names if hosts is not None and name not in hosts]
            for each, having in ((host_class, others), (change(host_class), [name for name in names if hosts is None or name in hosts])):
                if having:
                    changed.setdefault(each, []).extend(having)
        return {host_class: sorted(names) for host_class, names in changed.items()}, requirements

    return Proposal(text, apply=apply, group=group)


CPU_ONLY = change_hosts("--cpu: the CPU build on all hosts, their GPUs stay unused", without_gpus)


def change_classes(text: str, changed: Mapping[HostClass, HostClass], group: str = "") -> Proposal:
    """A change of the hosts of these classes."""
    return change_hosts(text, lambda host_class: changed.get(host_class, host_class), group)


def with_python(host_class: HostClass, version: str) -> HostClass:
    """The same class with this Python, which its inventory names."""
    return replace(host_class, python=Interpreter(version, f"/usr/bin/python{version}"), other_pythons=())


def newer_drivers(host_class: HostClass, host_classes: HostClasses) -> Iterator[Proposal]:
    """Every newer driver that supports its GPUs, the oldest first; then on all hosts whose driver is for the same CUDA."""
    drivers = host_class.catalog.cuda().toolkits.of
    for changed in dict.fromkeys([(host_class,), tuple(each for each in host_classes if each.cuda and each.cuda == host_class.cuda)]):
        last = host_class.catalog.driver().gpus.last_of(capability for each in changed for capability in each.capabilities)
        for cuda in sorted(drivers, key=key):
            newer = {each: with_driver_for(each, cuda) for each in changed if key(cuda) > key(each.cuda or "0")}
            if newer and not any(each.driver_misfit for each in newer.values()):
                names, until = sorted(name for each in newer for name in host_classes[each]), f", at most branch {last}" if last else ""
                text = f"update {host_class.driver_name} of {joined(names)} to {drivers[cuda]} or newer (CUDA {cuda}){until}"
                yield replace(change_classes(text, newer, "driver"), whole=len(newer) > 1)


def older_driver(host_class: HostClass, names: Sequence[str]) -> Iterator[Proposal]:
    """The newest driver that supports its GPUs, where theirs is newer."""
    older = with_newest_driver(host_class)
    if older.driver and host_class.driver and key(older.driver) < key(host_class.driver):
        text = f"install driver branch {older.driver.split('.')[0]}, the last for its GPUs, on {joined(names)} instead"
        yield change_classes(text, {host_class: older})


def other_pythons(host_class: HostClass, names: Sequence[str], versions: Collection[str]) -> Iterator[Proposal]:
    """Every one of these Pythons, the newest first."""
    for version in sorted(versions, key=key, reverse=True):
        changed = with_python(host_class, version)
        text = f"install Python {version} on {joined(names)} and name it in the inventory: provision_python={changed.python.path}"
        yield change_classes(text, {host_class: changed}, "python")


@dataclass(frozen=True)
class Trial:
    """A resolver's input, its conflicts, and ``resolve``, which returns the conflicts of another input."""

    host_classes: HostClasses
    requirements: Requirements
    conflicts: Conflicts
    resolve: Callable[[HostClasses, Requirements], Conflicts]

    def problems(self) -> tuple[Problem, ...]:
        """The conflicts as problems, each with its cheapest remedies that work."""
        return tuple(
            Problem("error", conflict.what, id=conflict.id, host=conflict.host, remedies=self._remedies(subject, conflict))
            for subject, conflict in self.conflicts.items()
        )

    def _remedies(self, subject: Hashable, conflict: Conflict) -> tuple[Remedy, ...]:
        """Remedies that lead to a plan; without any, those that resolve this conflict; without any, those that move it to another host;
        without any, those after which there are other conflicts. Then remedies that cannot be tried.

        A component that an earlier run chose is not the user's requirement, so none changes it.
        """
        complete: dict[str, Remedy] = {}
        partial: dict[str, Remedy] = {}
        moving: dict[str, Remedy] = {}
        revealing: dict[str, Remedy] = {}
        untried = []
        for proposal in conflict.proposals:
            group = proposal.group or proposal.text
            if proposal.apply is None:
                untried.append(proposal.remedy())
            elif group not in complete and len(complete) < MAX_REMEDIES and not self.requirements.are_kept(proposal.fields):
                extended = self._with_further_exclusions(proposal, subject)
                left = self._conflicts_after(extended)
                same = left.get(subject)
                if not left:
                    complete[group] = extended.remedy()
                elif proposal.whole:
                    continue
                elif set(left) <= set(self.conflicts) and (same is None or (same.id, same.host) != (conflict.id, conflict.host)):
                    (moving if same else partial).setdefault(group, extended.remedy(" (not enough by itself)"))
                elif same is None:
                    revealing.setdefault(group, extended.remedy(" (not enough by itself)"))
        return tuple([*(complete or partial or moving or revealing).values(), *untried][:MAX_REMEDIES])

    def _conflicts_after(self, proposal: Proposal) -> Conflicts:
        """The conflicts that are left after a remedy; without any host left, all of them."""
        host_classes, requirements = proposal.apply(self.host_classes, self.requirements) if proposal.apply else ({}, self.requirements)
        return self.resolve(host_classes, requirements) if host_classes else self.conflicts

    def _with_further_exclusions(self, proposal: Proposal, subject: Hashable) -> Proposal:
        """Hosts may have the same conflict as the first one: they are excluded with it if that leaves any with a plan."""
        if not proposal.excluded:
            return proposal
        return (
            self._extended(proposal, lambda left: next(iter(left.values()), None))
            or self._extended(proposal, lambda left: left.get(subject))
            or proposal
        )

    def _extended(self, proposal: Proposal, conflict_in: Callable[[Conflicts], Conflict | None]) -> Proposal | None:
        while left := remaining(self.host_classes, proposal.excluded):
            if (conflict := conflict_in(self._conflicts_after(proposal))) is None:
                return proposal
            proposal = exclude([*proposal.excluded, *next(names for names in left.values() if conflict.host in names)])
        return None
