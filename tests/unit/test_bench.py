"""`provision bench` without hosts: the experiments, their results, the page, and the comparison with the previous run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from provision import inventory
from provision.base.errors import ProvisionError
from provision.bench import charts, page, results
from provision.bench.measurement import EngineReport, Experiment, experiments, outcome
from provision.bench.results import Figure, Measurements, Ranks
from provision.cli.bench import tables


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
    pairs, ranks, training = tables(measurements())
    assert pairs[0] == {"between": "a – b", "4 KiB, µs": "50 (49–51)", "16 MiB, GB/s": "2 (1.96–2.04)", "of the limit": "80%"}
    assert pairs[2]["of the limit"] == ""
    assert [row["ranks"] for row in ranks] == ["2", "4", "5"]
    assert training[0] == {"ranks": "1", "samples/s": "900 (890–910)", "efficiency": "90%"}


def test_nothing_exceeds_the_limit() -> None:
    """Plain TCP over one connection can be slower than the engine, which has several."""
    pair = measurements(3.0).pairs[0]
    assert (pair.limit_gbs, pair.of_limit) == (2.5, 1.0)
    assert tables(measurements(3.0))[0][0]["of the limit"] == "reached"


def test_a_change_is_what_exceeds_both_spreads() -> None:
    assert results.compare(measurements(2.0), measurements(2.1)).changes == [], "5 % apart, and both spread over 4 %"
    slower = results.compare(measurements(2.0), measurements(1.8))
    assert sorted(change.what for change in slower.changes) == ["2 ranks, 16 MiB", "4 ranks, 16 MiB", "5 ranks, 16 MiB", "a – b, 16 MiB"]
    assert {round(change.better, 3) for change in slower.changes} == {0.9}
    assert (slower.compared, slower.without_spread) == (16, 0)


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
