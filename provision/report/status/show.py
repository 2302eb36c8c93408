"""The status for people: a row per host, and below it what differs, what runs, and what to type."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from provision.base.terminal import Console, Table, clipped, styled, table, wrapped
from provision.base.text import counted, duration, joined
from provision.report.status.model import STATES, HostStatus, Status, command

STYLES = {
    "installed": "green",
    "busy": "cyan",
    "drifted": "yellow",
    "GPU error": "red",
    "not installed": "yellow",
    "unknown": "red",
    "unreachable": "red",
}
HIGH = " (high)"
_DISPENSABLE = ("GPU GiB", "disk GiB", "mem GiB", "load")  # columns that are left out first, where a terminal is too narrow for names
_DISPENSABLE_OF_GPUS = ("power", "temp", "GiB")
_FOLDED = ("host", "GPU")  # columns that may take several lines; the first holds the hosts' names
_NARROWEST_NAME = 24  # columns of a name that is folded over lines
_MAX_GPUS = 16  # of all hosts, that get a row each
_MAX_DIFFERENCES = 3  # of one host, that are shown
_FEWEST_ROWS = 4  # of hosts in a live view
_MAX_LINES = 2  # of a text in a live view
_ANY_WIDTH = 10_000
_GIB = 1 << 30
MAX_DRAWN = 64  # hosts, whose last hour is kept and drawn
HOUR_S, CHART = 3600.0, (120, 24)  # seconds; pixels
#: When, in seconds since 1970; host → figure → its part of what the host has: a load may be more than all of its cores.
Sample = tuple[float, Mapping[str, Mapping[str, float]]]
_MAX_LOAD, _MIN_FREE, _HOT_C = 1.5, 0.05, 85.0  # per core; of memory and disk; °C, from which on cards slow down


def show(status: Status, console: Console) -> None:
    """Print it, with lines that can be copied whole, and the summary last."""
    listed, left_out = _table(status, list(status.hosts), console)
    console.print(listed)
    if 0 < sum(len(host.gpus) for host in status.hosts) <= _MAX_GPUS:
        gpus, more_left_out = _fitting(_gpu_rows(status), _DISPENSABLE_OF_GPUS, console)
        left_out += more_left_out
        console.print("", gpus)
    for text, style in (*left_out, *_troubles(status, status.hosts), *_jobs(status), (summary(status), "bold")):
        console.say(text, style)


def view(status: Status, console: Console) -> Table:
    """The same for a live view, which must not be higher than the terminal: the summary first, of the hosts the worst."""
    below = list(_jobs(status))
    if len(below) > (some := max(2, console.height // 4)):
        below[some - 1 :] = [(f"and {len(below) - some + 1} more lines: provision status prints all", "dim")]
    room, count = console.height - 3, len(status.hosts)  # without the summary, the table's head, and the cursor's line
    while True:
        hosts, rest = status.worst_first[:count], status.worst_first[count:]
        listed, left_out = _table(status, hosts, console)
        more = [(f"and {len(rest)} more: {joined(list(dict.fromkeys(host.state for host in rest)))}", "dim")] if rest else []
        lines = [(clipped(text, console.width, _MAX_LINES), style) for text, style in (*more, *left_out, *below, *_troubles(status, hosts))]
        heights = [len(wrapped(text, console.width)) for text, _ in lines]
        height = len(console.render_lines(listed)) - 1
        tall = -(-height // count)  # lines of a host; a long name takes several
        excess = height + sum(heights) - room
        fewest = max(_FEWEST_ROWS, room * 2 // 5) // tall or 1  # what is wrong with each of many hosts takes more lines than their rows
        if excess <= 0 or count <= fewest:
            break
        count = max(fewest, count - -(-excess // tall))
    grid = Table.grid()
    grid.add_column(overflow="fold")
    grid.add_row(styled(clipped(summary(status), console.width, 1), "bold"))
    grid.add_row(listed)
    fit = sum(height + line <= room - (excess > 0) for line in accumulate(heights))
    for text, style in lines[:fit] + [("… provision status prints all", "dim")] * (fit < len(lines)):
        grid.add_row(styled(text, style))
    return grid


def tables(status: Status) -> dict[str, list[dict[str, str]]]:
    """What a page shows: title → rows of hosts, the worst first, and of GPUs; those that there are. `HIGH` ends what is out of range."""
    has_gpus = any(host.gpus for host in status.hosts)
    hosts = [
        {**_row(status, host, has_gpus=has_gpus), "up for": duration(host.uptime) if host.uptime is not None else "-"}
        for host in status.worst_first
    ]
    gpus = _gpu_rows(status)
    for row, host in zip(hosts, status.worst_first, strict=True):
        sizes = {"mem GiB": host.memory, "disk GiB": host.disk}
        high = [name for name, size in sizes.items() if size and size.available < _MIN_FREE * size.total]
        high += ["load"] if host.load is not None and host.cores and host.load > _MAX_LOAD * host.cores else []
        row.update({name: f"{row[name]}{HIGH}" for name in high})
    for row, gpu in zip(gpus, (gpu for host in status.hosts for gpu in host.gpus), strict=True):
        row["temp"] += HIGH if gpu.temperature is not None and gpu.temperature >= _HOT_C else ""
    found = {"Hosts, the worst first": hosts, "GPUs": gpus}
    empty = {title: [name for name in rows[0] if all(row[name] == "-" for row in rows)] for title, rows in found.items() if rows}
    return {title: [{name: row[name] for name in row if name not in empty[title]} for row in found[title]] for title in empty}


def sample(status: Status) -> Sample:
    """What the charts need of a status."""
    parts: dict[str, dict[str, float]] = {}
    for host in status.hosts[:MAX_DRAWN]:
        used = (host.memory.total - host.memory.available, host.memory.total) if host.memory else (None, None)
        known = {"load": (host.load, host.cores), "memory": used, "GPUs": (host.utilization, 100)}
        parts[host.host] = {name: part / whole for name, (part, whole) in known.items() if part is not None and whole}
    return status.when, parts


def charts(history: Sequence[Sample]) -> list[dict[str, str | tuple[str, str]]]:
    """A row for each host: its name, and of each figure that any host has the last hour, as a path of SVG and in words; none before there
    are two samples of it."""
    recent = [each for each in history if history[-1][0] - each[0] < HOUR_S]
    hosts = recent[-1][1] if len(recent) > 1 else {}
    figures = dict.fromkeys(name for _, parts in recent for host in hosts for name in parts.get(host, {}))
    return [{"host": host, **{name: _chart(recent, host, name) for name in figures}} for host in hosts]


def _chart(recent: Sequence[Sample], host: str, figure: str) -> tuple[str, str]:
    """With a gap where the figure was not known."""
    values = [parts.get(host, {}).get(figure) for _, parts in recent]
    known, path = [value for value in values if value is not None], []
    for (when, _), value, before in zip(recent, values, [None, *values], strict=False):
        if value is not None:
            x, y = CHART[0] * (1 - (recent[-1][0] - when) / HOUR_S), CHART[1] * (1 - min(max(value, 0.0), 1.0))
            path.append(f"{'M' if before is None else 'L'}{x:.1f},{y:.1f}")
    return " ".join(path), f"{100 * min(known):.0f} to {100 * max(known):.0f} %" if known else "not known"


def lines(status: Status) -> list[tuple[str, str]]:
    """What a page says below that, each line with its style."""
    return [*_troubles(status, status.hosts), *_jobs(status)]


def summary(status: Status) -> str:
    """One line: how many hosts are in which state."""
    counts = {state: sum(host.state == state for host in status.hosts) for state in reversed(STATES)}
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{counted(len(status.hosts), 'host')} at {moment(status.when)}: {said}"


def moment(seconds: float) -> str:
    """A time of today as 14:05:09, of another day with its date."""
    then = time.localtime(seconds)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", then)


def _table(status: Status, hosts: Sequence[HostStatus], console: Console) -> tuple[Table, list[tuple[str, str]]]:
    """The table of hosts."""
    has_gpus = any(host.gpus for host in status.hosts)
    return _fitting([_row(status, host, has_gpus=has_gpus) for host in hosts], _DISPENSABLE, console)


def _fitting(rows: Sequence[dict[str, str]], dispensable: Sequence[str], console: Console) -> tuple[Table, list[tuple[str, str]]]:
    """A table, and a line about the columns that it lacks because the terminal is narrow.

    Hosts' names are whole as long as it is enough to leave columns out; longer ones are folded over lines, and never cut.
    """
    longest = max(len(row["host"]) for row in rows)
    candidates = [name for name in dispensable if name in rows[0]]
    choices = [(width, candidates[:count]) for width in (longest, min(longest, _NARROWEST_NAME)) for count in range(len(candidates) + 1)]
    for name_width, left_out in choices:
        built = table(({name: value for name, value in row.items() if name not in left_out} for row in rows), STYLES)
        for column in built.columns:
            column.no_wrap = str(column.header) not in _FOLDED
        width = console.measure(built, options=console.options.update(max_width=_ANY_WIDTH)).maximum
        if width - (longest - name_width) <= console.width:
            break
    return built, [(f"on a wider terminal also: {', '.join(left_out)}", "dim")] if left_out else []


def _row(status: Status, host: HostStatus, *, has_gpus: bool) -> dict[str, str]:
    memory, disk, gpu_memory = host.memory, host.disk, host.gpu_memory
    row = {
        "host": host.host,
        "state": host.state,
        "load": f"{host.load:.1f}/{host.cores}" if host.load is not None else "-",
        "mem GiB": _of(memory.total - memory.available, memory.total) if memory else "-",
        "disk GiB": _of(disk.total - disk.available, disk.total) if disk else "-",
    }
    if has_gpus:
        busy = f": {host.utilization:.0f} %" if host.utilization is not None else ""
        row |= {"GPUs": f"{len(host.gpus)}{busy}" if host.gpus else "-", "GPU GiB": _of(*gpu_memory) if gpu_memory else "-"}
    return row | {"ranks": str(status.ranks_on(host.host) or "-")}


def _of(used: int, total: int) -> str:
    return f"{max(0, used) / _GIB:.0f}/{total / _GIB:.0f}"


def _gpu_rows(status: Status) -> list[dict[str, str]]:
    def shown(value: float | None, unit: str) -> str:
        return f"{value:.0f} {unit}" if value is not None else "-"

    return [
        {
            "host": host.host,
            "GPU": f"{gpu.index} {gpu.name}",
            "busy": shown(gpu.utilization, "%"),
            "GiB": _of(gpu.memory_used, gpu.memory_total) if gpu.memory_used is not None and gpu.memory_total is not None else "-",
            "temp": shown(gpu.temperature, "°C"),
            "power": shown(gpu.power, "W"),
        }
        for host in status.hosts
        for gpu in host.gpus
    ]


def _troubles(status: Status, hosts: Sequence[HostStatus]) -> Iterator[tuple[str, str]]:
    """Lines about what is wrong, the worst first, and what helps; hosts with the same trouble share them."""
    if status.problem:
        yield status.problem, "red"
    groups: dict[tuple[str, ...], list[HostStatus]] = {}
    for host in sorted(hosts, key=lambda host: STATES.index(host.state)):
        holder = f"{host.locked.owner} works on it since {host.locked.since}" if host.locked else ""
        shown = [each for each in (host.problem, holder, *map(str, host.drift[:_MAX_DIFFERENCES])) if each]
        if len(host.drift) > _MAX_DIFFERENCES:
            shown.append(f"and {len(host.drift) - _MAX_DIFFERENCES} more")
        groups.setdefault((host.state, *shown), []).append(host)
    for (state, *texts), group in groups.items():
        if state == "installed" and not texts:
            continue
        names = [host.host for host in group]
        head = f"{joined(names)}: {state}"
        yield (f"{head}: {texts[0]}" if len(texts) == 1 else head), STYLES[state]
        for text in texts if len(texts) > 1 else ():
            yield f"    {text}", ""
        of_all = command(group[0].state, status.inventory, names if len(names) < len(status.hosts) else ())
        if remedy := (group[0].remedy if len(group) == 1 else of_all) or of_all or group[0].remedy:
            yield f"  → {remedy}", "bold"


def _jobs(status: Status) -> Iterator[tuple[str, str]]:
    for job in status.jobs:
        where = ", ".join(f"{host} ({ranks})" for host, ranks in list(job.hosts.items())[:3])
        more = f" and {len(job.hosts) - 3} more hosts" if len(job.hosts) > 3 else ""
        since = f"since {moment(job.began)} ({duration(status.when - job.began)})"
        yield f"job {job.run}: {job.program}, {counted(job.ranks, 'rank')} on {where}{more}, {since}", "cyan"
        if job.stalled_since is not None:
            yield f"  stalled since {moment(job.stalled_since)} → provision doctor --job {job.run}", "bold red"
        yield from ((f"  {said}", "yellow") for said in job.stragglers)
    if last := status.last_run:
        began = f", begun at {moment(last.began)} ({duration(status.when - last.began)} ago)" if last.began else ""
        yield f"last run: {last.command or 'unknown'}, {last.verdict}{began}: {last.folder}", ""
