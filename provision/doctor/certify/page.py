"""The certificate as one page that opens from disk; nothing is fetched and nothing runs."""

from __future__ import annotations

from collections.abc import Mapping

from provision.base import pages
from provision.bench import charts
from provision.bench.charts import HeatMap
from provision.bench.results import Figure, number
from provision.doctor.certify.model import Certificate, PairMeasured

MAX_MAPPED = 32  # hosts of which every pair is drawn


def render(made: Certificate) -> str:
    """The page's HTML."""
    return pages.template("provision.doctor.certify").render(made=made, maps=_maps(made), shares=charts.SHARES, number=number)


def _maps(made: Certificate) -> list[HeatMap]:
    """Bandwidth and latency of the pairs that were measured, of each the last time; none of too many hosts."""
    last: Mapping[frozenset[str], PairMeasured] = {
        frozenset(pair.hosts): pair.measured for pair in made.pairs if pair.measured.error is None
    }
    if len(last) < 2 or len(made.hosts) > MAX_MAPPED:
        return []
    speeds = {pair: Figure(each.mbps) for pair, each in last.items() if each.mbps}
    times = {pair: Figure(each.latency_us) for pair, each in last.items() if each.latency_us}
    drawn = [
        charts.heat_map("Bandwidth, in Mbit/s", "Mbit/s", made.hosts, speeds, less_is_better=False),
        charts.heat_map("Time of a packet to and back, in µs", "µs", made.hosts, times, less_is_better=True),
    ]
    return [each for each in drawn if each is not None]
