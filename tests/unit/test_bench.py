"""`provision bench` without hosts: the experiments, their results, the page, and the comparison with the previous run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from provision import inventory
from provision.bench import page, results
from provision.bench.measurement import Experiment, experiments, outcome
from provision.bench.results import Measurements
from provision.cli.bench import tables


def allreduce(gbs: float, us: float = 50.0) -> list[dict[str, float]]:
    return [{"bytes": 4096, "median_us": us, "busbw_gbs": 0.1}, {"bytes": 16 << 20, "median_us": 9000.0, "busbw_gbs": gbs}]


def measurements(gbs: float = 2.0, **replaced: Any) -> Measurements:
    document = {
        "schema": 1,
        "when": "2026-11-21T10:00:00+00:00",
        "hosts": [{"name": "a", "slots": 2}, {"name": "b", "slots": 2}, {"name": "<c>", "slots": 1}],
        "pairs": [
            {"hosts": ["a", "b"], "results": allreduce(gbs), "limit_gbs": 2.5},
            {"hosts": ["a", "<c>"], "results": allreduce(0.5), "limit_gbs": 0.6},
            {"hosts": ["b", "<c>"], "results": allreduce(1.5), "limit_gbs": 0.0},
        ],
        "ranks": [{"np": n, "hosts": ["a", "b"][: 1 + n // 3], "results": allreduce(gbs / n), "limit_gbs": 3.0} for n in (2, 4, 5)],
        "training": [
            {"np": n, "hosts": ["a"], "samples_per_second": 900.0 * n, "alone": 1000.0 * n, "efficiency": 0.9} for n in (1, 2, 4, 5)
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


def test_results_of_the_engines_own_report() -> None:
    one = {"engine": "collective_core", "bytes": 4096, "op": "allreduce", "np": 2}
    arena = {**one, "memory": "arena", "median_us": 5.0, "busbw_gbs": 0.8}
    report = {"limit_gbs": 3.0, "results": [arena, {**one, "memory": "ordinary", "median_us": 9.0, "busbw_gbs": 0.4}]}
    pair = outcome(Experiment("pair", (("a", 1), ("b", 1))), report)
    assert pair.model_dump() == {"hosts": ["a", "b"], "limit_gbs": 3.0, "results": [{"bytes": 4096, "median_us": 5.0, "busbw_gbs": 0.8}]}
    speeds = [{"engine": "collective_core", "samples_per_second": 90.0}, {"engine": "none", "samples_per_second": 100.0}]
    assert outcome(Experiment("training", (("a", 2),)), {"results": speeds}).model_dump()["efficiency"] == 0.9


def test_the_page_opens_from_disk_and_shows_the_slow_link() -> None:
    text = page.render(measurements(), results.changes(measurements(4.0), measurements(2.0)))
    assert not re.findall(r"(?:src|href)=|https?://|<script", text), "nothing is fetched and nothing runs"
    assert "<c>" not in text
    assert "&lt;c&gt;" in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert ET.fromstring(drawing).tag == "svg"  # noqa: S314  our own text
    assert len(re.findall(r'class="slow"', text)) == 2, "0.5 of 2 GB/s, seen from both ends"
    assert "a – b, 16777216 bytes, GB/s: 4 → 2 (-50%)" in text
    assert "Between two hosts" not in page.render(measurements(pairs=[]), [])
    assert "<svg" not in page.render(measurements(pairs=[], ranks=[], training=[]), [])


def test_tables_for_people_have_every_measurement() -> None:
    pairs, ranks, training = tables(measurements())
    assert pairs[0] == {"between": "a – b", "4 KiB takes": "50.0 us", "16 MiB at": "2.00 GB/s", "of the limit": "80%"}
    assert pairs[2]["of the limit"] == ""
    assert [row["ranks"] for row in ranks] == ["2", "4", "5"]
    assert training[0] == {"ranks": "1", "samples/s": "900", "efficiency": "90%"}


def test_the_previous_run_is_kept_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts.ini").write_text("a ansible_host=192.0.2.1\nb ansible_host=192.0.2.2\n")
    hosts = inventory.load(str(tmp_path / "hosts.ini"))
    assert results.previous(hosts) is None
    results.keep(hosts, measurements())
    assert results.previous(hosts) == measurements()
    assert results.previous(inventory.load(str(tmp_path / "hosts.ini"), limit="a")) is None, "two hosts are not compared with one"
    assert results.changes(measurements(2.0), measurements(2.1)) == [], "5 % is noise"
    slower = results.changes(measurements(2.0), measurements(1.0))
    assert [change.what.split(",")[0] for change in slower] == ["a – b", "2 ranks", "4 ranks", "5 ranks"]
    assert all(change.better == 0.5 for change in slower)
    next((tmp_path / "state/bench").iterdir()).write_text("{")
    assert results.previous(hosts) is None
