"""The plan as text: the components of each group of equal hosts with source, reasons and rejected candidates; notes; conflicts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from provision.base.terminal import Console
from provision.base.text import folded, joined
from provision.plan.model import COMPONENTS, Component, HostPlan, Knowledge, Network, Plan, Rejected, SourceBuild, SystemPackages, Wheel

WIDEST = 120
_INDENT = 11
_MOST = 3  # lines about the same in the plan in brief
TITLES = {"openmpi": "Open MPI", "nccl": "NCCL", "torch": "PyTorch", "python": "Python", "numpy": "NumPy", "cmake": "CMake"}
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


def show(plan: Plan, console: Console) -> None:
    """Print a plan, no wider than the terminal and 120 columns."""
    width = min(console.width, WIDEST)
    groups = groups_of(plan.hosts.values())
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
    if groups:
        console.print()
        _print(console, "in short:", width, style="bold")
        for names, parts in _in_short(groups):
            listed = joined(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
            _print(console, f"  {listed}: {parts}", width, indent=6)
    if plan.knowledge is not None:
        _print(console, f"catalogue: {_reach(plan.knowledge)}", width, indent=_INDENT, style="dim")
    for note in plan.notes:
        _print(console, f"note: {note}", width, indent=6, style="cyan")
    for conflict in plan.conflicts:
        _print(console, f"{conflict.host}: no plan fits: {conflict.what}", width, indent=4, style="red")
        for remedy in conflict.remedies:
            _print(console, f"  → {remedy.text}", width, indent=4)


def brief(plan: Plan, reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The plan in a few lines, each with what it is about: what, where, why.

    Args:
        reasons: host → why the installation has to run there.
    """
    groups = groups_of(plan.hosts.values())
    what = list(_in_short(groups))
    for names, parts in what[:_MOST]:
        yield "what", f"{folded(names)}: {parts}" if len(what) > 1 else parts
    yield from _more("what", len(what))
    places: dict[str, list[str]] = {}
    for host in plan.hosts.values():
        place = f"{host.system} on {host.arch}, {host.prefix}{'' if host.root else ', without root'}"
        places.setdefault(place, []).append(host.name)
    for place, hosts in list(places.items())[:_MOST]:
        yield "where", f"{folded(hosts)}: {place}"
    yield from _more("where", len(places))
    causes: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        causes.setdefault(reason, []).append(name)
    for reason, hosts in list(causes.items())[:_MOST]:
        yield "why", reason if len(hosts) == len(plan.hosts) else f"{folded(hosts)}: {reason}"
    yield from _more("why", len(causes))


def _more(about: str, count: int) -> Iterator[tuple[str, str]]:
    if count > _MOST:
        yield about, f"and {count - _MOST} more of these"


def _reach(known: Knowledge) -> str:
    text = f"it knows PyTorch ≤ {known.pytorch}, CUDA ≤ {known.cuda}, NCCL ≤ {known.nccl}, as of {known.date}"
    if known.overlay:
        text += f", with your own files ({known.overlay[:12]})"
    if known.newer_drivers:
        text += f"; newer than that: the driver of {joined(known.newer_drivers)} (provision catalog update)"
    return text


def groups_of(hosts: Iterable[HostPlan]) -> list[list[HostPlan]]:
    """Hosts with the same components, in the order of the first of each. Equal components of a plan are the same object."""
    groups: dict[tuple[object, ...], list[HostPlan]] = {}
    for host in hosts:
        key = (host.system, host.arch, host.prefix, host.root, *(id(getattr(host, name)) for name in COMPONENTS))
        groups.setdefault(key, []).append(host)
    return list(groups.values())


def _in_short(groups: Iterable[Sequence[HostPlan]]) -> Iterator[tuple[list[str], str]]:
    """(names of hosts, what they get): the versions of the main components, hosts with the same ones together."""
    same: dict[str, list[str]] = {}
    for hosts in groups:
        found = [("Driver", hosts[0].driver)] + [(TITLES[name], getattr(hosts[0], name)) for name in ("python", "openmpi", "nccl", "torch")]
        parts = ", ".join(f"{title} {component.version}" for title, component in found if component is not None)
        same.setdefault(parts, []).extend(host.name for host in hosts)
    for parts, names in same.items():
        yield names, parts


def _names(hosts: Sequence[HostPlan], width: int) -> list[str]:
    listed = ", ".join(host.name for host in hosts[:12]) + (f" and {len(hosts) - 12} more" if len(hosts) > 12 else "")
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
    groups: dict[str, list[Rejected]] = {}
    for each in rejected:
        groups.setdefault(each.cause, []).append(each)
    for cause, group in groups.items():
        candidates = [each.candidate for each in group]
        reason = Rejected("", cause, ", ".join(dict.fromkeys(each.detail for each in group if each.detail))).reason
        if len(candidates) > 3:
            yield f"{candidates[0]} … {candidates[-1]} ({len(candidates)} builds)", reason
        else:
            yield ", ".join(candidates), reason


def _print(console: Console, line: str, width: int, *, indent: int = _INDENT, style: str = "") -> None:
    for part in _wrapped(line, width, indent):
        console.say(part, style)


def _wrapped(line: str, width: int, indent: int = _INDENT) -> list[str]:
    """Wrapped between words only, so that options and names can be copied."""
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True)
