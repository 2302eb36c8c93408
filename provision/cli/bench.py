"""`provision bench` on the command line: parse, call one function, print."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import pages, terminal
from provision.base.errors import UsageError
from provision.base.text import size
from provision.base.validation import MAX_COUNT
from provision.bench import charts, measurement, page, results
from provision.bench.measurement import BenchOptions
from provision.bench.results import Comparison, Measurements, Pair, Ranks
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.remote import progress

PAGE = "provision-bench.html"


def _options(
    sizes: Annotated[str, typer.Option(help="Bytes per rank, K, M and G binary.", metavar="LIST")] = BenchOptions.sizes,
    rounds: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Rounds of each launch.")] = BenchOptions.rounds,
    repetitions: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, help="Launches of each measurement; the median of all rounds counts. One tells no change.")
    ] = BenchOptions.repetitions,
    no_pairs: Annotated[bool, typer.Option("--no-pairs", help="Leave out the pairs of hosts: there are n(n-1)/2.")] = False,
    no_training: Annotated[bool, typer.Option("--no-training", help="Leave out the training steps.")] = False,
) -> BenchOptions:
    if not re.fullmatch(r"\d+[KMG]?(,\d+[KMG]?)*", sizes, re.IGNORECASE):
        raise UsageError(f"invalid --sizes {sizes}: expected sizes such as 4K,1M,16M")
    return BenchOptions(sizes, not no_pairs, not no_training, rounds, repetitions)


@with_options(options=_options, passwords=passwords)
def bench(
    hosts: Hosts,
    limit: Limit = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the page.", metavar="FILE", dir_okay=False)] = Path(PAGE),
    json_: Json = False,
    *,
    options: BenchOptions,
    passwords: Mapping[str, str],
) -> None:
    """Measure hosts that `provision up` made ready: every pair, more and more ranks, training steps; and write a page with plots."""
    inventory = inventory_of(hosts, limit)
    earlier = results.history(inventory)
    for line in earlier.unreadable:
        terminal.say(line)
    pages.check_folder(out, "-o")
    with progress.make() as shown:
        measurements, ended = measurement.measure(inventory, options, shown, passwords)
    comparison = results.compare_with_last(earlier.runs, measurements)
    results.keep(inventory, measurements)
    pages.write(out, page.render(measurements, comparison))
    if json_:
        changes = [change._asdict() for change in comparison.changes] if comparison else []
        terminal.print_json({**measurements.model_dump(by_alias=True), "changes": changes})
    else:
        _print(measurements, comparison)
        terminal.out().say(f"the page: {out}")
    if ended is not None:
        raise ended


def _print(measurements: Measurements, comparison: Comparison | None) -> None:
    console = terminal.out()
    for title, rows in tables(measurements):
        console.say(title, "bold")
        console.print(terminal.table(rows))
    for remark in results.remarks(measurements):
        console.prose(remark)
    if comparison is not None:
        for line in _since(comparison):
            console.prose(line)


def _since(comparison: Comparison) -> Iterator[str]:
    """Lines about what has changed."""
    since = f"since {comparison.before.date}"
    for change in comparison.changes[: page.MAX_CHANGES]:
        yield f"{since}: {change}"
    if len(comparison.changes) > page.MAX_CHANGES:
        yield f"{since}: {len(comparison.changes) - page.MAX_CHANGES} more changes; the page lists them"
    for remark in comparison.remarks:
        yield f"{since}: {remark}"


def tables(measurements: Measurements) -> list[tuple[str, list[dict[str, str]]]]:
    """Titles and rows for people: pairs, allreduce, training; those that were measured."""
    pairs = [{"between": " – ".join(pair.hosts), **_columns(pair)} for pair in measurements.pairs]
    ranks = [{"ranks": str(run.np), "hosts": str(len(run.hosts)), **_columns(run)} for run in measurements.ranks]
    training = [
        {"ranks": str(run.np), "samples/s": charts.spelled(run.samples_per_second), "efficiency": charts.percent(run.share_left)}
        for run in measurements.training
    ]
    titled = [("allreduce between two hosts", pairs), ("allreduce of more and more ranks", ranks), ("training steps", training)]
    return [(title, rows) for title, rows in titled if rows]


def _columns(run: Pair | Ranks) -> dict[str, str]:
    return {
        f"{size(run.smallest.bytes)}, µs": charts.spelled(run.smallest.latency_us),
        f"{size(run.largest.bytes)}, GB/s": charts.spelled(run.largest.bandwidth),
        "of the limit": charts.share_of_limit(run),
    }
