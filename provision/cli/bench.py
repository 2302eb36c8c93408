"""`provision bench` on the command line: parse, call one function, print."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError
from provision.bench import comparison, history, measurement, page
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.remote import progress

PAGE = "provision-bench.html"


@with_options(passwords=passwords)
def bench(
    hosts: Hosts,
    limit: Limit = None,
    sizes: Annotated[str, typer.Option(help="Bytes per rank, K, M and G binary.", metavar="LIST")] = measurement.Wanted.sizes,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds whose median counts.")] = measurement.Wanted.rounds,
    no_pairs: Annotated[bool, typer.Option("--no-pairs", help="Leave out the pairs of hosts: there are n(n-1)/2.")] = False,
    no_training: Annotated[bool, typer.Option("--no-training", help="Leave out the training steps.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the page.", metavar="FILE", dir_okay=False)] = Path(PAGE),
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Measure hosts that `provision up` made ready: every pair, more and more ranks, training steps; and write a page with plots."""
    if not re.fullmatch(r"\d+[KMG]?(,\d+[KMG]?)*", sizes, re.IGNORECASE):
        raise UsageError(f"--sizes {sizes}: these are no sizes", hint="write them like 4K,1M,16M")
    inventory = inventory_of(hosts, limit)
    wanted = measurement.Wanted(sizes, not no_pairs, not no_training, rounds)
    before = history.last(inventory)
    if not os.access(out.absolute().parent, os.W_OK):  # known before hosts work for it, not after
        raise UsageError("the page cannot be written there", where=str(out.absolute().parent), hint="name another place: -o FILE")
    with progress.make() as shown:
        document = measurement.measure(inventory, wanted, shown, passwords)
    changes = comparison.changes(before, document) if before else []
    history.keep(inventory, document)
    try:
        out.write_text(page.render(document, changes), encoding="utf-8")
    except OSError as error:
        raise ProvisionError(f"the page cannot be written: {error.strerror}", where=str(out), hint="name another: -o FILE") from error
    if json_:
        terminal.print_json({**document, "changes": [change._asdict() for change in changes]})
        return
    console = terminal.out()
    for rows in tables(document):
        console.print(terminal.table(rows))
    for change in changes:
        console.say(f"since {before['when'] if before else ''}: {change}")
    console.say(f"the page: {out}")


def tables(document: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    """Rows for people: pairs, sums, training; those that were measured."""
    pairs = [{"between": " – ".join(pair["hosts"]), **_of_results(pair)} for pair in document["pairs"]]
    sums = [{"ranks": str(run["np"]), "hosts": str(len(run["hosts"])), **_of_results(run)} for run in document["ranks"]]
    training = [
        {"ranks": str(run["np"]), "samples/s": f"{run['samples_per_second']:.0f}", "efficiency": f"{run['efficiency']:.0%}"}
        for run in document["training"]
    ]
    return [rows for rows in (pairs, sums, training) if rows]


def _of_results(run: Mapping[str, Any]) -> dict[str, str]:
    first, last = run["results"][0], run["results"][-1]
    return {
        f"{page.spelled(first['bytes'])} takes": f"{first['median_us']:.1f} us",
        f"{page.spelled(last['bytes'])} at": f"{last['busbw_gbs']:.2f} GB/s",
        "of the limit": f"{last['busbw_gbs'] / run['limit_gbs']:.0%}" if run["limit_gbs"] else "",
    }
