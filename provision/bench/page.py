"""The measurements as one page that opens from disk: heat maps of the pairs, and charts, as SVG; nothing is fetched and nothing runs."""

from __future__ import annotations

from collections.abc import Sequence

from provision.base import pages
from provision.base.text import size
from provision.bench import charts, results
from provision.bench.charts import Axes, Chart, HeatMap, Series
from provision.bench.results import Comparison, Measurements, Pair, number

MAX_CHANGES = 10  # that are listed at once


def render(measurements: Measurements, comparison: Comparison | None) -> str:
    """The page's HTML. ``comparison``: with an earlier run of the same hosts, if there is one."""
    return pages.template("provision.bench").render(
        measured=measurements,
        maps=heat_maps(measurements),
        shares=charts.SHARES,
        slow=_slow_links(measurements.pairs),
        allreduce=_allreduce(measurements),
        training=_training(measurements),
        comparison=comparison,
        shown=MAX_CHANGES,
        size=size,
        remarks=list(results.remarks(measurements)),
        spelled=charts.spelled,
        percent=charts.percent,
        share=charts.share_of_limit,
        number=number,
    )


def heat_maps(measurements: Measurements) -> list[HeatMap]:
    """Latency and bandwidth of all pairs of hosts; none where there is nothing to compare a pair with."""
    hosts = [host.name for host in measurements.hosts]
    pairs = {frozenset(pair.hosts): pair for pair in measurements.pairs}
    latency = {names: pair.smallest.latency_us for names, pair in pairs.items()}
    bandwidth = {names: pair.largest.bandwidth for names, pair in pairs.items()}
    if len(pairs) < 2:
        return []
    smallest, largest = (size(result.bytes) for result in (measurements.pairs[0].smallest, measurements.pairs[0].largest))
    drawn = [
        charts.heat_map(f"Time of an allreduce of {smallest}, in µs", "µs", hosts, latency, less_is_better=True),
        charts.heat_map(f"Bus bandwidth of an allreduce of {largest}, in GB/s", "GB/s", hosts, bandwidth, less_is_better=False),
    ]
    return [each for each in drawn if each is not None]


def _slow_links(pairs: Sequence[Pair]) -> list[Pair]:
    """Those much slower than the fastest, the slowest first."""
    fastest = max((pair.largest.busbw_gbs for pair in pairs), default=0.0)
    slow = [pair for pair in pairs if pair.largest.busbw_gbs < charts.SLOW * fastest]
    return sorted(slow, key=lambda pair: pair.largest.busbw_gbs)


def _allreduce(measurements: Measurements) -> Chart | None:
    curves = [Series(f"{run.np} ranks", [(result.bytes, result.bandwidth) for result in run.results]) for run in measurements.ranks]
    sizes = sorted({result.bytes for run in measurements.ranks for result in run.results})
    axes = Axes("bytes per rank", "bus bandwidth, GB/s", {count: size(count) for count in sizes})
    return charts.chart("Bus bandwidth of allreduce by size", curves, axes)


def _training(measurements: Measurements) -> Chart | None:
    curves = [
        Series("communicating", [(run.np, run.samples_per_second) for run in measurements.training]),
        Series("not communicating", [(run.np, run.alone) for run in measurements.training]),
    ]
    axes = Axes("ranks", "samples/s of all ranks", {run.np: str(run.np) for run in measurements.training})
    return charts.chart("Speed of training by ranks", curves, axes)
