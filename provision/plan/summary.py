"""The plan as text: conflicts, versions of each group of alike hosts, notes, reasons; in full with rejected candidates."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from provision.base.problems import Problem
from provision.base.terminal import Console, table
from provision.base.text import counted, few, grouped, joined, shortened
from provision.plan.model import (
    COMPONENTS,
    Component,
    ComponentName,
    HostPlan,
    Knowledge,
    Network,
    Plan,
    Rejected,
    SourceBuild,
    SystemPackages,
    Wheel,
)

WIDEST = 120
_INDENT = 11
_MOST = 3  # lines about the same in the plan in brief
_MAX_GROUPS, _MAX_NOTES, _MAX_CONFLICTS, _MAX_REMEDIES = 6, 4, 3, 3  # that are shown without `why`
#: The components whose version and reason are always shown.
MAIN: tuple[ComponentName, ...] = ("driver", "python", "openmpi", "nccl", "torch")
TITLES = {
    "driver": "Driver",
    "openmpi": "Open MPI",
    "nccl": "NCCL",
    "torch": "PyTorch",
    "python": "Python",
    "numpy": "NumPy",
    "cmake": "CMake",
}
FROM = {
    "wheel": "wheel from the Python package index",
    "repository": "NVIDIA's package repository",
    "local_repository": "the given local repository package",
    "distribution": "the distribution",
    "source": "built from source",
    "index": "wheel from an index",
    "folder": "wheel from the given folder",
    "host": "already on the host",
    "uv": "downloaded by uv into the prefix",
    "bundled": "bundled",
    "remove": "to be removed",
    "leave": "stays",
}


def origin(component: Component) -> str:
    """Where a component comes from, and its package."""
    if isinstance(component, Wheel) and component.source == "host":
        return f"wheel in a folder on the host: {component.package}"  # it is not installed yet, unlike others of the host's
    return f"{FROM.get(component.source, component.source)}: {component.package}"


def show(plan: Plan, console: Console, *, why: bool = False) -> None:
    """Print a plan, at most 120 columns wide: conflicts, what each group of alike hosts gets, notes, and a reason per component.

    Args:
        why: also print all conflicts, notes and reasons, rejected candidates, networks and system packages.
    """
    width = min(console.width, WIDEST)
    groups = groups_of(plan.hosts.values())
    left_out = list(_show_conflicts(plan, console, width, why=why))
    if groups:
        _print(console, title(plan), width, style="bold")
        rows = list(_rows(groups))
        console.print(table(rows if why else rows[:_MAX_GROUPS]))
        left_out += _left_out(len(rows) - _MAX_GROUPS, "group of hosts", "groups of hosts", why=why)
    for note in plan.notes if why else plan.notes[:_MAX_NOTES]:
        _print(console, f"note: {note}", width, indent=6, style="cyan", lines=None if why else 2)
    is_cut = not why and any(len(_wrapped(f"note: {note}", width, 6)) > 2 for note in plan.notes[:_MAX_NOTES])
    left_out += _left_out(len(plan.notes) - _MAX_NOTES, "note", "notes", why=why) or (["whole notes"] if is_cut else [])
    if plan.knowledge is not None and (why or plan.knowledge.overlay or plan.knowledge.newer_drivers):
        _print(console, f"catalogue: {_reach(plan.knowledge)}", width, style="dim")
    if why:
        _show_details(plan, groups, console, width)
    elif groups:
        console.say("why", "bold")
        for line in _reasons(groups):
            _print(console, line, width, indent=_INDENT, lines=2)
        left_out.append("reasons, rejected candidates, networks, packages")
    if left_out:
        _print(console, f"more with --why: {', '.join(left_out)}", width, style="dim")


def title(plan: Plan) -> str:
    """``Plan for 2 hosts in /opt/provision``"""
    count, prefixes = len(plan.hosts), joined(list(dict.fromkeys(host.prefix for host in plan.hosts.values())))
    return f"Plan for {counted(count, 'host')} in {prefixes}"


def _left_out(count: int, one: str, several: str, *, why: bool) -> list[str]:
    return [f"{count} more {one if count == 1 else several}"] if count > 0 and not why else []


def _show_conflicts(plan: Plan, console: Console, width: int, *, why: bool) -> Iterator[str]:
    """Print what fits no plan; yields what is left out."""
    shown = plan.conflicts if why else plan.conflicts[:_MAX_CONFLICTS]
    for conflict in shown:
        _print(console, f"{conflict.host}: no plan fits: {conflict.what}", width, indent=4, style="red")
        for remedy in conflict.remedies[: None if why else _MAX_REMEDIES]:
            _print(console, f"  → {remedy.text}", width, indent=4)
    yield from _left_out(len(plan.conflicts) - len(shown), "conflict", "conflicts", why=why)
    yield from _left_out(sum(len(each.remedies[_MAX_REMEDIES:]) for each in shown), "remedy", "remedies", why=why)


def _rows(groups: Iterable[Sequence[HostPlan]]) -> Iterator[dict[str, str]]:
    """Rows of the table of versions: hosts that differ in nothing of it together; components that no host gets are left out."""
    same: dict[tuple[str, ...], list[str]] = {}
    for hosts in groups:
        first = hosts[0]
        system = f"{first.system} {first.arch}{'' if first.root else ', without root'}"
        versions = (component.version if (component := getattr(first, name)) else "-" for name in MAIN)
        same.setdefault((system, *versions), []).extend(host.name for host in hosts)
    shown = [number for number in range(len(MAIN)) if any(cells[number + 1] != "-" for cells in same)]
    for cells, names in same.items():
        yield {"hosts": shortened(names), "system": cells[0], **{TITLES[MAIN[number]]: cells[number + 1] for number in shown}}


def _reasons(groups: Sequence[Sequence[HostPlan]]) -> Iterator[str]:
    """A line for each main component with its source and one reason, for all hosts or with the host's name; one with the other versions."""
    others = {}
    for name in COMPONENTS:
        found = [(hosts[0].name, component) for hosts in groups if (component := getattr(hosts[0], name))]
        if not found:
            continue
        host, first = next((each for each in found if getattr(each[1], "cuda", None)), found[0])  # a build for GPUs says more
        if name in MAIN or first.source in ("remove", "leave"):
            of_all = [
                reason for reason in first.why[:2] if all((each.version, reason in each.why) == (first.version, True) for _, each in found)
            ]
            reason = (of_all or [f"{first.why[0]} ({host})"])[0].partition("; ")[0]
            yield f"  {TITLES.get(name, name):<8} {first.source.replace('_', ' ')}: {reason}"
        elif first.source != "bundled":
            others[TITLES.get(name, name)] = first.version
        elif name == "engine":
            others[name] = f"{first.version} ({_engine(groups)})"
    yield f"  {'also':<8} {', '.join(f'{title} {version}' for title, version in others.items())}"


def _engine(groups: Iterable[Sequence[HostPlan]]) -> str:
    """Which way the engine comes to hosts, and why."""
    ways = grouped((host.engine.why[0], host.name) for hosts in groups for host in hosts)
    return "; ".join(f"{shortened(names)}: {way}" if len(ways) > 1 else way for way, names in ways.items())


def _show_details(plan: Plan, groups: Sequence[Sequence[HostPlan]], console: Console, width: int) -> None:
    """Print every component with its source, reasons and rejected candidates; what all hosts get first."""
    common = [name for name in COMPONENTS if len({id(getattr(hosts[0], name)) for hosts in groups}) == 1] if len(groups) > 1 else []
    if common:
        console.say(f"\nall {len(plan.hosts)} hosts", "bold")
        _show_components(groups[0][0], common, console, width)
    for hosts in groups:
        console.say("")
        for line in _names(hosts, width):
            console.say(line, "bold")
        for line in _hosts_lines(hosts, width):
            console.say(line)
        _show_components(hosts[0], [name for name in COMPONENTS if name not in common], console, width)


def brief(plan: Plan, reasons: Mapping[str, Problem]) -> Iterator[tuple[str, str]]:
    """The plan in a few lines, each with what it is about: what, why.

    Args:
        reasons: host → why the installation has to run there.
    """
    groups = groups_of(plan.hosts.values())
    rows = list(_rows(groups))
    for hosts, system, *versions in (row.items() for row in rows[:_MOST]):
        parts = ", ".join(f"{title} {version}" for title, version in versions if version != "-")
        yield "what", f"{hosts[1]}: {system[1]}: {parts}"
    yield from _more("what", len(rows))
    if reasons:
        yield "engine", _engine(groups)
    causes = grouped((reason.what, name) for name, reason in reasons.items())
    for cause, names in list(causes.items())[:_MOST]:
        yield "why", cause if len(names) == len(plan.hosts) else f"{shortened(names)}: {cause}"
    yield from _more("why", len(causes))


def _more(about: str, count: int) -> Iterator[tuple[str, str]]:
    if count > _MOST:
        yield about, f"and {count - _MOST} more of these"


def _reach(known: Knowledge) -> str:
    newer = f"; newer than that: the driver of {joined(known.newer_drivers)} (provision catalog update)"
    return f"it knows {known}{newer if known.newer_drivers else ''}"


def groups_of(hosts: Iterable[HostPlan]) -> list[list[HostPlan]]:
    """Hosts with the same components, in the order of the first of each. Equal components of a plan are the same object."""

    def shared(host: HostPlan) -> tuple[object, ...]:
        return (host.system, host.arch, host.prefix, host.root, *(id(getattr(host, name)) for name in COMPONENTS))

    return list(grouped((shared(host), host) for host in hosts).values())


def _names(hosts: Sequence[HostPlan], width: int) -> list[str]:
    listed = few([host.name for host in hosts], 12)
    return _wrapped(f"{len(hosts)} hosts: {listed}" if len(hosts) > 1 else listed, width, indent=2)


def _hosts_lines(hosts: Sequence[HostPlan], width: int) -> Iterator[str]:
    first = hosts[0]
    yield f"  {'system':<{_INDENT - 2}}{first.system} on {first.arch}, prefix {first.prefix}{'' if first.root else ', without root'}"
    yield f"  {'network':<{_INDENT - 2}}{_network(first.network)}" + (f"; the others likewise: {_others(hosts)}" if len(hosts) > 1 else "")
    if first.packages:
        yield from _wrapped(f"  {'packages':<{_INDENT - 2}}{', '.join(first.packages)}", width)


def _network(network: Network) -> str:
    return f"{network.address} on {network.interface} ({network.why})" if network.address else network.why


def _others(hosts: Sequence[HostPlan]) -> str:
    networks = {host.network.cidr or "unknown": None for host in hosts}
    return ", ".join(list(networks)[:4]) + (" …" if len(networks) > 4 else "")


def _show_components(host: HostPlan, names: Iterable[str], console: Console, width: int) -> None:
    for name in names:
        component = getattr(host, name)
        if component is not None:
            _show_component(TITLES.get(name, name), component, console, width)


def _show_component(title: str, component: Component, console: Console, width: int) -> None:
    built_for = component.cuda if isinstance(component, Wheel | SystemPackages | SourceBuild) else None
    cuda = f" for CUDA {built_for}" if built_for else ""
    head = f"{component.version or '-'}{cuda} — {origin(component)}"
    _print(console, f"  {title:<{_INDENT - 3}} {head}", width)
    _print(console, " " * _INDENT + "; ".join(component.why), width, style="dim")
    for candidates, reason in by_cause(component.rejected):
        _print(console, f"{' ' * _INDENT}not {candidates}: {reason}", width, indent=_INDENT + 4, style="dim")


def by_cause(rejected: Sequence[Rejected]) -> Iterator[tuple[str, str]]:
    """Rejected candidates grouped by cause: (candidates, cause with the details of all)."""
    for cause, group in grouped((each.cause, each) for each in rejected).items():
        candidates = [each.candidate for each in group]
        reason = Rejected("", cause, ", ".join(dict.fromkeys(each.detail for each in group if each.detail))).reason
        if len(candidates) > 3:
            yield f"{candidates[0]} … {candidates[-1]} ({len(candidates)} builds)", reason
        else:
            yield ", ".join(candidates), reason


def _print(console: Console, line: str, width: int, *, indent: int = _INDENT, style: str = "", lines: int | None = None) -> None:
    """Print a text; ``lines``: cut it after so many."""
    for part in _wrapped(line, width, indent, lines):
        console.say(part, style)


def _wrapped(line: str, width: int, indent: int = _INDENT, lines: int | None = None) -> list[str]:
    """Wrapped between words only, so that options and names can be copied."""
    further = " " * indent
    return textwrap.wrap(
        line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False, max_lines=lines, placeholder=" …"
    )
