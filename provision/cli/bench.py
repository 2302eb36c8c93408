"""`provision bench` on the command line: parse, call one function, print."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError
from provision.bench import measurement, page, results
from provision.bench.results import Measurements, Pair, Ranks
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.remote import progress

PAGE = "provision-bench.html"


@with_options(passwords=passwords)
def bench(
    hosts: Hosts,
    limit: Limit = None,
    sizes: Annotated[str, typer.Option(help="Bytes per rank, K, M and G binary.", metavar="LIST")] = measurement.BenchOptions.sizes,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds whose median counts.")] = measurement.BenchOptions.rounds,
    no_pairs: Annotated[bool, typer.Option("--no-pairs", help="Leave out the pairs of hosts: there are n(n-1)/2.")] = False,
    no_training: Annotated[bool, typer.Option("--no-training", help="Leave out the training steps.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the page.", metavar="FILE", dir_okay=False)] = Path(PAGE),
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Measure hosts that `provision up` made ready: every pair, more and more ranks, training steps; and write a page with plots."""
    if not re.fullmatch(r"\d+[KMG]?(,\d+[KMG]?)*", sizes, re.IGNORECASE):
        raise UsageError(f"--sizes {sizes}: invalid sizes", hint="write them like 4K,1M,16M")
    inventory = inventory_of(hosts, limit)
    options = measurement.BenchOptions(sizes, not no_pairs, not no_training, rounds)
    before = results.previous(inventory)
    if not os.access(out.absolute().parent, os.W_OK):  # before the hosts have worked for it
        raise UsageError("the page cannot be written there", where=str(out.absolute().parent), hint="name another place: -o FILE")
    with progress.make() as shown:
        measurements = measurement.measure(inventory, options, shown, passwords)
    changes = results.changes(before, measurements) if before else []
    results.keep(inventory, measurements)
    try:
        out.write_text(page.render(measurements, changes), encoding="utf-8")
    except OSError as error:
        raise ProvisionError(f"the page cannot be written: {error.strerror}", where=str(out), hint="name another: -o FILE") from error
    if json_:
        terminal.print_json({**measurements.model_dump(by_alias=True), "changes": [change._asdict() for change in changes]})
        return
    console = terminal.out()
    for rows in tables(measurements):
        console.print(terminal.table(rows))
    for change in changes:
        console.say(f"since {before.when if before else ''}: {change}")
    console.say(f"the page: {out}")


def tables(measurements: Measurements) -> list[list[dict[str, str]]]:
    """Rows for people: pairs, allreduce, training; those that were measured."""
    pairs = [{"between": " – ".join(pair.hosts), **_columns(pair)} for pair in measurements.pairs]
    ranks = [{"ranks": str(run.np), "hosts": str(len(run.hosts)), **_columns(run)} for run in measurements.ranks]
    training = [
        {"ranks": str(run.np), "samples/s": f"{run.samples_per_second:.0f}", "efficiency": f"{run.efficiency:.0%}"}
        for run in measurements.training
    ]
    return [rows for rows in (pairs, ranks, training) if rows]


def _columns(run: Pair | Ranks) -> dict[str, str]:
    smallest, largest = run.results[0], run.results[-1]
    return {
        f"{page.size(smallest.bytes)} takes": f"{smallest.median_us:.1f} us",
        f"{page.size(largest.bytes)} at": f"{largest.busbw_gbs:.2f} GB/s",
        "of the limit": f"{largest.busbw_gbs / run.limit_gbs:.0%}" if run.limit_gbs else "",
    }
