"""`provision bench` without hosts: the experiments, their results, the page, and the comparison with the previous run."""

from __future__ import annotations

import contextlib
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import host, plan_for
from pydantic import ValidationError

from provision import inventory
from provision.base import downloads
from provision.base.errors import ProvisionError, UsageError
from provision.bench import charts, page, results
from provision.bench.measurement import BenchOptions, EngineReport, Experiment, experiments, measure, outcome
from provision.bench.results import Figure, Measurements, Ranks
from provision.cli.bench import tables
from provision.remote.progress import Progress
from provision.survey import installed


def allreduce(gbs: float, us: float = 50.0) -> list[dict[str, float]]:
    """The quartiles are 2 % below and above the medians."""
    took = (16 << 20) / gbs / 1e3
    return [
        {"bytes": 4096, "median_us": us, "low_us": 0.98 * us, "high_us": 1.02 * us, "busbw_gbs": 0.1},
        {"bytes": 16 << 20, "median_us": took, "low_us": 0.98 * took, "high_us": 1.02 * took, "busbw_gbs": gbs},
    ]


def measurements(gbs: float = 2.0, **replaced: Any) -> Measurements:
    document = {
        "schema": 2,
        "when": "2026-11-21T10:00:00+00:00",
        "hosts": [{"name": "a", "slots": 2}, {"name": "b", "slots": 2}, {"name": "<c>", "slots": 1}],
        "pairs": [
            {"hosts": ["a", "b"], "results": allreduce(gbs), "limit_gbs": 2.5},
            {"hosts": ["a", "<c>"], "results": allreduce(0.5), "limit_gbs": 0.6},
            {"hosts": ["b", "<c>"], "results": allreduce(1.5), "limit_gbs": 0.0},
        ],
        "ranks": [{"np": n, "hosts": ["a", "b"][: 1 + n // 3], "results": allreduce(gbs / n), "limit_gbs": 3.0} for n in (2, 4, 5)],
        "training": [
            {
                "np": n,
                "hosts": ["a"],
                "samples_per_second": 900.0 * n,
                "low": 890.0 * n,
                "high": 910.0 * n,
                "alone": 1e3 * n,
                "efficiency": 0.9,
            }
            for n in (1, 2, 4, 5)
        ],
    }
    return Measurements.model_validate({**document, **replaced})


def test_every_pair_and_more_and_more_ranks_are_measured() -> None:
    planned = experiments([("a", 2), ("b", 2), ("c", 1)], pairs=True, training=True)
    assert [one.hosts for one in planned if one.kind == "pair"] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert [one.ranks for one in planned if one.kind == "ranks"] == [2, 4, 5]
    assert [one.ranks for one in planned if one.kind == "training"] == [1, 2, 4, 5]
    assert planned[-1].placement == (("a", 2), ("b", 2), ("c", 1))
    assert [one.kind for one in experiments([("a", 2)], pairs=True, training=False)] == ["ranks"]
    assert experiments([("a", 1)], pairs=True, training=False) == []


def test_where_nothing_can_be_measured_that_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(installed, "read_plan", lambda _: plan_for({"a": host()}))
    with pytest.raises(UsageError, match="nothing to measure"):
        measure(inventory.load("a,"), BenchOptions(training=False), Progress(), {})


def report(rounds: Sequence[float], limit: float = 3.0, **more: Any) -> EngineReport:
    one = {"engine": "collective_core", "bytes": 4096, "op": "allreduce", "np": 2}
    rows = [{**one, "memory": "arena", "rounds_us": rounds}, {**one, "memory": "ordinary", "rounds_us": [99.0]}]
    return EngineReport.model_validate({"limit_gbs": limit, "network_gbs_each_way": limit, "results": rows, **more})


def test_rounds_of_all_launches_are_one_sample() -> None:
    pair = outcome(Experiment("pair", (("a", 1), ("b", 1))), [report([4.0, 8.0]), report([5.0, 6.0, 7.0], 5.0)])
    only = {"bytes": 4096, "median_us": 6.0, "low_us": 5.0, "high_us": 7.0, "busbw_gbs": 0.6827}
    assert pair.model_dump() == {"hosts": ["a", "b"], "limit_gbs": 4.0, "limit_of": "network", "results": [only]}
    few = outcome(Experiment("ranks", (("a", 2),)), [report([4.0, 6.0], network_gbs_each_way=None)])
    assert isinstance(few, Ranks)
    assert (few.limit_of, few.smallest.latency) == ("memory", Figure(5.0)), "too few rounds for quartiles"


def test_training_steps_are_samples_per_second_of_all_ranks() -> None:
    rows = [{"engine": "collective_core", "rounds_us": [2000.0] * 4}, {"engine": "none", "rounds_us": [1000.0]}]
    found = outcome(Experiment("training", (("a", 2),)), [EngineReport.model_validate({"results": rows, "batch": 64})])
    assert found.model_dump(exclude={"hosts", "np"}) == {
        "samples_per_second": 64_000.0,
        "low": 64_000.0,
        "high": 64_000.0,
        "alone": 128_000.0,
        "efficiency": 0.5,
    }
    with pytest.raises(ProvisionError, match="the benchmark's report lacks none"):
        outcome(Experiment("training", (("a", 2),)), [EngineReport.model_validate({"results": rows[:1]})])


@pytest.mark.parametrize("rounds", [["1e999"], [0.0], [-1.0], [1e300], ["NaN"], []])
def test_a_strange_report_of_the_engine_cannot_be_read(rounds: list[Any]) -> None:
    with pytest.raises(ValidationError):
        report(rounds)


def test_a_report_without_results_is_refused_with_what_and_where() -> None:
    with pytest.raises(ValidationError):
        EngineReport.model_validate({"results": []})
    only_training = EngineReport.model_validate({"results": [{"engine": "none", "rounds_us": [1.0]}]})
    with pytest.raises(ProvisionError, match=r"the benchmark's report cannot be read: results: ") as raised:
        outcome(Experiment("pair", (("a", 1), ("b", 1))), [only_training])
    assert raised.value.where == "a and b"


def test_the_page_opens_from_disk_and_shows_the_slow_link() -> None:
    before, now = measurements(4.0), measurements(2.0)
    text = page.render(now, [before], results.compare(before, now))
    assert not re.findall(r"(?:src|href)=|https?://|<script", text), "nothing is fetched and nothing runs"
    assert "<c>" not in text
    assert "&lt;c&gt;" in text
    drawings = [ET.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]  # noqa: S314  our own text
    assert {drawing.tag for drawing in drawings} == {"svg"}
    assert len(re.findall(r'<rect class="q3" x=', text)) == 2, "0.5 of 2 GB/s, seen from both ends"
    assert "Slow: a – &lt;c&gt; (0.5 GB/s);" in text
    assert "a – b, 16 MiB: 4 → 2 GB/s (-50%, worse)" in text
    assert "Over all 2 runs" in text
    assert "Between two hosts" not in page.render(measurements(pairs=[]), [], None)
    assert "<svg" not in page.render(measurements(pairs=[], ranks=[], training=[]), [], None)


def test_heat_maps_of_many_hosts_hold_every_pair_as_text() -> None:
    names = [f"node{number:02}" for number in range(16)]
    pairs = [{"hosts": pair, "results": allreduce(1.0 + index), "limit_gbs": 0.0} for index, pair in enumerate(combinations(names, 2))]
    latency, bandwidth = page.heat_maps(measurements(hosts=[{"name": name, "slots": 1} for name in names], pairs=pairs))
    assert len(latency.cells) == len(bandwidth.cells) == 16 * 15
    assert {cell.shade for cell in latency.cells} == {0}, "all take equally long"
    assert {cell.shade for cell in bandwidth.cells} == {0, 1, 2, 3, 4}
    assert [cell.text for cell in bandwidth.cells[:2]] == ["1", "2"]
    assert bandwidth.cells[0].title == "node00 – node01: 1 (0.98–1.02) GB/s"


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (7.3, [0, 2, 4, 6, 8]),
        (0.093, [0, 0.02, 0.04, 0.06, 0.08, 0.1]),
        (56_600, [0, 20_000, 40_000, 60_000]),
    ],
)
def test_ticks_are_round_numbers(most: float, ticks: list[float]) -> None:
    assert charts.nice_ticks(most) == ticks


def test_tables_for_people_have_every_measurement() -> None:
    pairs, ranks, training = (rows for _, rows in tables(measurements()))
    assert pairs[0] == {"between": "a – b", "4 KiB, µs": "50 (49–51)", "16 MiB, GB/s": "2 (1.96–2.04)", "of the limit": "80%"}
    assert pairs[2]["of the limit"] == ""
    assert [row["ranks"] for row in ranks] == ["2", "4", "5"]
    assert training[0] == {"ranks": "1", "samples/s": "900 (890–910)", "efficiency": "90%"}


def test_nothing_exceeds_the_limit() -> None:
    """Plain TCP over one connection can be slower than the engine, which has several."""
    pair = measurements(3.0).pairs[0]
    assert (pair.limit_gbs, pair.of_limit) == (2.5, 1.0)
    assert tables(measurements(3.0))[0][1][0]["of the limit"] == "reached"


def test_a_change_is_what_exceeds_both_spreads() -> None:
    assert results.compare(measurements(2.0), measurements(2.1)).changes == [], "5 % apart, and both spread over 4 %"
    slower = results.compare(measurements(2.0), measurements(1.8))
    assert sorted(change.what for change in slower.changes) == ["2 ranks, 16 MiB", "4 ranks, 16 MiB", "5 ranks, 16 MiB", "a – b, 16 MiB"]
    assert {round(change.better, 3) for change in slower.changes} == {0.9}
    assert (slower.compared, slower.without_spread, slower.without_partner) == (16, 0, 0)


def test_the_same_ranks_on_other_hosts_are_not_compared_and_a_pair_is_the_same_in_any_order() -> None:
    def measured(gbs: float, slots: int, hosts: list[str], pair: list[str]) -> Measurements:
        return measurements(
            hosts=[{"name": name, "slots": slots} for name in "ab"],
            pairs=[{"hosts": pair, "results": allreduce(gbs), "limit_gbs": 0}],
            ranks=[{"np": 4, "hosts": hosts, "results": allreduce(gbs), "limit_gbs": 0}],
            training=[],
        )

    found = results.compare(measured(1.0, 2, ["a", "b"], ["a", "b"]), measured(9.0, 4, ["a"], ["b", "a"]))
    assert [change.what for change in found.changes] == ["b – a, 16 MiB"], "4 ranks are in one host now"
    assert (found.compared, found.without_partner) == (2, 2)
    found = results.compare(measured(1.0, 2, ["a", "b"], ["a", "b"]), measured(9.0, 3, ["a", "b"], ["a", "b"]))
    assert (found.compared, found.without_partner) == (2, 2), "3 and 1 are not 2 and 2"


def test_a_run_that_left_something_out_leaves_the_trends_of_all_others() -> None:
    whole = [measurements(float(gbs)) for gbs in (1, 2, 3)]
    all_trends = {chart.title: len(chart.curves[0].points) for chart in page._trends(whole)}
    assert set(all_trends.values()) == {3}
    for partial in (measurements(training=[]), measurements(pairs=[]), measurements(pairs=[], ranks=[], training=[])):
        found = {chart.title: len(chart.curves[0].points) for chart in page._trends([*whole, partial])}
        assert set(found) == set(all_trends)
        assert 3 in found.values()
    assert page._trends(whole[:1]) == []
    assert "Over all 4 runs" in page.render(measurements(training=[]), whole, results.compare(whole[-1], measurements(training=[])))


def test_names_of_curves_that_are_alike_stay_inside_of_the_drawing() -> None:
    series = [charts.Series(f"{number} ranks", [(1.0, Figure(100.0)), (2.0, Figure(99.0 + number / 10))]) for number in range(12)]
    chart = charts.chart("Speed", series, ("bytes", "GB/s"), {})
    assert chart is not None
    heights = sorted(curve.label_y for curve in chart.curves)
    assert heights[0] >= chart.top
    assert heights[-1] <= chart.floor
    assert min(below - above for above, below in pairwise(heights)) >= 15


OLD = """{"schema": 1, "when": "2026-11-20T10:00:00+00:00", "hosts": [{"name": "a", "slots": 2}, {"name": "b", "slots": 2}], "pairs": [
{"hosts": ["a", "b"], "results": [{"bytes": 4096, "median_us": 40.0, "busbw_gbs": 0.1}], "limit_gbs": 2.5}], "ranks": [], "training": []}"""


def test_earlier_runs_are_kept_and_old_documents_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(results, "MOST_RUNS", 3)
    (tmp_path / "hosts.ini").write_text("a ansible_host=192.0.2.1\nb ansible_host=192.0.2.2\n")
    hosts = inventory.load(str(tmp_path / "hosts.ini"))
    assert results.history(hosts) == ([], [])
    for gbs in (1.0, 2.0, 3.0, 4.0):
        results.keep(hosts, measurements(gbs))
    assert results.history(hosts).runs == [measurements(2.0), measurements(3.0), measurements(4.0)], "the oldest is removed"
    assert results.history(inventory.load(str(tmp_path / "hosts.ini"), limit="a")).runs == [], "two hosts are not compared with one"
    (folder,) = (tmp_path / "state/bench").iterdir()
    folder.with_suffix(".json").write_text(OLD)
    before = results.history(hosts).runs[0]
    comparison = results.compare(before, measurements())
    assert (comparison.changes, comparison.compared, comparison.without_spread) == ([], 0, 1), "without quartiles nothing can be said"
    assert comparison.without_partner == 15


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Invalid JSON"),
        (OLD.replace('"schema": 1', '"schema": 3'), "schema: Input should be 1 or 2"),
        (OLD.replace("40.0", "-1"), "0.median_us"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts.ini").write_text("a ansible_host=192.0.2.1\n")
    hosts = inventory.load(str(tmp_path / "hosts.ini"))
    results.keep(hosts, measurements())
    (path,) = (tmp_path / "state/bench").glob("*/*.json")
    path.write_text(content)
    runs, (line,) = results.history(hosts)
    assert (runs, line.startswith(f"{path}: not compared: "), reason in line) == ([], True, True)


def test_each_of_two_benches_that_end_at_once_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts.ini").write_text("a ansible_host=192.0.2.1\n")
    hosts = inventory.load(str(tmp_path / "hosts.ini"))
    both = threading.Barrier(2)
    store = downloads.store

    def store_together(path: Path, content: bytes) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # nobody else comes so far meanwhile
        store(path, content)

    monkeypatch.setattr(downloads, "store", store_together)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda gbs: results.keep(hosts, measurements(gbs)), (1.0, 2.0)))
    assert len(results.history(hosts).runs) == 2
