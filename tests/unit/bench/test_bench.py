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
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.bench import charts, measurement, page, results
from provision.bench.measurement import BenchOptions, EngineReport, Experiment, experiments, measure, outcome
from provision.bench.results import Figure, Measurements, Ranks, Training
from provision.cli.bench import bench, tables
from provision.launch.smoke import training_job
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.survey import installed


def allreduce(gbs: float, us: float = 50.0, launches: Sequence[float] = (0.99, 1.01)) -> list[dict[str, Any]]:
    """The quartiles are 2 % below and above the medians; ``launches``: their medians next to that of all rounds."""

    def result(count: int, took: float, gbs: float) -> dict[str, Any]:
        latency = {"median": took, "low": 0.98 * took, "high": 1.02 * took, "launches": [took * each for each in launches]}
        return {"bytes": count, "latency_us": latency, "busbw_gbs": gbs}

    return [result(4096, us, 0.1), result(16 << 20, (16 << 20) / gbs / 1e3, gbs)]


def measurements(gbs: float = 2.0, **replaced: Any) -> Measurements:
    document = {
        "schema": 4,
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
                "samples_per_second": {"median": 900.0 * n, "low": 890.0 * n, "high": 910.0 * n, "launches": [895.0 * n, 905.0 * n]},
                "alone": {"median": 1e3 * n},
                "efficiency": {"median": 0.9} if n > 1 else None,
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
    pair = outcome(Experiment("pair", (("a", 1), ("b", 1))), [report([4.0, 8.0]), report([5.0, 6.5, 7.0], 5.0)])
    only = {"bytes": 4096, "latency_us": {"median": 6.5, "low": 5.0, "high": 7.0, "launches": (6.0, 6.5)}, "busbw_gbs": 0.6302}
    assert pair.model_dump() == {"hosts": ["a", "b"], "limit_gbs": 4.0, "limit_of": "network", "results": [only]}
    few = outcome(Experiment("ranks", (("a", 2),)), [report([4.0, 6.0], network_gbs_each_way=None)])
    assert isinstance(few, Ranks)
    assert (few.limit_of, few.smallest.latency_us) == ("memory", Figure(5.0, launches=(5.0,))), "too few rounds for quartiles"


def test_training_steps_are_samples_per_second_of_all_ranks() -> None:
    rows = [
        {"engine": "collective_core", "rounds_us": [2000.0] * 4},
        {"engine": "none", "rounds_us": [1000.0, 1000.0, 2000.0, 2000.0]},
    ]
    report = EngineReport.model_validate({"results": rows, "batch": 64})
    found = outcome(Experiment("training", (("a", 2),)), [report])
    assert isinstance(found, Training)
    assert found.samples_per_second == Figure(64_000.0, 64_000.0, 64_000.0, (64_000.0,))
    assert found.alone == Figure(96_000.0, 64_000.0, 128_000.0, (96_000.0,))
    assert found.efficiency == Figure(0.75, 0.5, 1.0, (0.75,))
    one = outcome(Experiment("training", (("a", 1),)), [report])
    assert isinstance(one, Training)
    assert one.efficiency is None, "it has no peer"
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
    with pytest.raises(ProvisionError, match=r"the benchmark's report cannot be read: `results") as raised:
        outcome(Experiment("pair", (("a", 1), ("b", 1))), [only_training])
    assert raised.value.where == "a and b"


def test_the_page_opens_from_disk_and_shows_the_slow_link() -> None:
    before, now = measurements(4.0), measurements(2.0)
    text = page.render(now, results.compare(before, now))
    assert not re.findall(r"(?:src|href)=|https?://|<script", text), "nothing is fetched and nothing runs"
    assert "<c>" not in text
    assert "&lt;c&gt;" in text
    drawings = [ET.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]  # noqa: S314  our own text
    assert {drawing.tag for drawing in drawings} == {"svg"}
    assert "What ended the measurement" not in text
    assert len(re.findall(r'<rect class="q3" x=', text)) == 2, "0.5 of 2 GB/s, seen from both ends"
    assert "Slow: a – &lt;c&gt; (0.5 GB/s);" in text
    assert "a – b, 16 MiB: 4 → 2 GB/s (-50%, worse)" in text
    assert "Between two hosts" not in page.render(measurements(pairs=[]), None)
    assert "<svg" not in page.render(measurements(pairs=[], ranks=[], training=[]), None)


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
    assert pairs[0] == {"between": "a – b", "4 KiB, µs": "50 (49–51)", "16 MiB, GB/s": "2 (1.96–2.04)", "of the limit": "80 %"}
    assert pairs[2]["of the limit"] == "-"
    assert [row["ranks"] for row in ranks] == ["2", "4", "5"]
    assert training[0] == {"ranks": "1", "samples/s": "900 (890–910)", "efficiency": "-"}, "it has nobody to communicate with"
    assert training[1]["efficiency"] == "90 %"


def test_nothing_exceeds_the_limit() -> None:
    """Plain TCP over one connection can be slower than the engine, which has several."""
    now = measurements(2.9)
    assert (now.pairs[0].limit_gbs, now.pairs[0].of_limit) == (2.5, 1.0)
    assert tables(now)[0][1][0]["of the limit"] == "reached"
    assert list(results.remarks(now)) == []


def test_a_limit_that_was_exceeded_by_far_was_measured_too_low() -> None:
    fast = measurements(46.9)  # of 2.5 between the pair, and with 2 ranks 23.45 of 3
    assert (fast.pairs[0].of_limit, fast.ranks[0].of_limit) == (None, None)
    pairs, ranks, _ = (rows for _, rows in tables(fast))
    assert [pairs[0]["of the limit"], ranks[0]["of the limit"]] == ["-", "-"]
    assert pairs[1]["of the limit"] == "83 %"
    (remark,) = results.remarks(fast)
    assert "too low for a – b, 2 ranks and 2 more" in remark
    text = page.render(fast, None)
    assert remark in text
    assert "<td>reached</td>" not in text


def trained(n: int, speed: float, quartiles: float = 1.02, efficiency: tuple[float | None, ...] = (0.9,), **more: Any) -> dict[str, Any]:
    """``more``: of the speed."""
    figure = {"median": speed, "low": speed / quartiles, "high": speed * quartiles, **more}
    share = dict(zip(("median", "low", "high"), efficiency, strict=False))
    return {"np": n, "hosts": ["a"], "samples_per_second": figure, "alone": {"median": speed}, "efficiency": share}


def shares(now: Measurements) -> list[str]:
    return [charts.percent(run.share_left) for run in now.training]


def test_more_than_all_of_the_speed_is_noise_or_a_disturbance() -> None:
    noise = trained(2, 1800.0, efficiency=(1.03, 0.96, 1.12))
    unknown = trained(3, 1800.0, efficiency=(1.47,))
    disturbed = trained(4, 1800.0, efficiency=(1.47, 1.2, 1.6))
    now = measurements(training=[trained(1, 900.0, efficiency=(1.47,)), noise, unknown, disturbed])
    assert shares(now) == ["-", "103 % (96–112)", "-", "147 % (120–160)"]
    (remark,) = results.remarks(now)
    assert remark.startswith("training with 4 ranks was faster with communication than without")
    text = page.render(now, None)
    assert remark in text
    assert "<td>103 % (96–112)</td>" in text


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        (trained(1, 1000.0), ["100 %", "90 % (87–94)", "45 % (43–47)"]),
        (trained(1, 1000.0, 1.3), ["-", "-", "-"]),  # the upper quartile is 1.69 times the lower
        (trained(1, 1000.0, low=None, high=None), ["-", "-", "-"]),
        (trained(1, 340.0), ["100 %", "-", "-"]),  # 265 % of linear cannot be, nor 132 %
    ],
)
def test_more_ranks_are_compared_with_one_only_where_its_speed_is_known(one: dict[str, Any], shown: list[str]) -> None:
    now = measurements(training=[one, trained(2, 1800.0), trained(4, 1800.0)])
    assert [charts.percent(now.of_linear(run)) for run in now.training] == shown
    assert page.render(now, None).count("</td><td>-</td></tr>") >= shown.count("-")


def test_hosts_that_were_busy_before_are_named() -> None:
    hosts = [{"name": "a", "slots": 2, "load": 9.1, "cores": 2}, {"name": "b", "slots": 2, "load": 1.0, "cores": 2}]
    busy = measurements(hosts=[*hosts, {"name": "<c>", "slots": 1}])
    (remark,) = results.remarks(busy)
    assert remark == "hosts were busy before the measurement: a (load 9.1 on 2 cores); figures are lower and spread more"
    assert remark in page.render(busy, None)
    for found in (results.compare(busy, measurements(9.0, hosts=busy.hosts[1:])), results.compare(measurements(9.0), busy)):
        assert found.changes
        assert "hosts were busy before one of the two runs: the changes may come from that" in found.remarks
    assert not any("busy" in remark for remark in results.compare(measurements(9.0), measurements()).remarks)


def test_one_launch_tells_no_change() -> None:
    def of_one_launch(gbs: float) -> Measurements:
        one = {"results": allreduce(gbs, launches=[1.0]), "limit_gbs": 0.0}
        return measurements(
            pairs=[{"hosts": ["a", "b"], **one}], ranks=[{"np": 2, "hosts": ["a"], **one}], training=[trained(1, gbs, launches=[gbs])]
        )

    found = results.compare(of_one_launch(1.0), of_one_launch(9.0))
    assert (found.changes, found.compared, found.left_out) == ([], 0, {"launches": 5})
    assert [line.partition(";")[0] for line in found.remarks] == ["5 figures not compared: one launch is not enough to tell a change"]
    assert results.compare(measurements(1.0), of_one_launch(9.0)).left_out["launches"] == 5, "both runs need two"
    assert found.remarks[0] in page.render(of_one_launch(9.0), found)


def test_launches_that_differ_among_each_other_tell_no_change() -> None:
    def spread(gbs: float, launches: Sequence[float]) -> Measurements:
        return measurements(
            pairs=[{"hosts": ["a", "b"], "results": allreduce(gbs, launches=launches), "limit_gbs": 0}], ranks=[], training=[]
        )

    assert len(results.compare(spread(1.0, (0.99, 1.01)), spread(1.2, (0.99, 1.01))).changes) == 1
    assert results.compare(spread(1.0, (0.85, 1.01)), spread(1.2, (0.99, 1.01))).changes == [], "a launch before was as fast as these"


def test_an_incomplete_run_is_compared_only_where_nothing_else_is_there() -> None:
    ended = {"why": "the network broke\n    <last line>", "launches": 3, "planned": 12, "missing": ["allreduce of 4 ranks on 2 hosts"]}
    part, whole = measurements(ranks=[], incomplete=ended), measurements()
    assert results.compare_with_last([], whole) is None
    against = results.compare_with_last([whole, part], measurements())
    assert against is not None
    assert (against.before, against.left_out) == (whole, {})
    against = results.compare_with_last([part], measurements())
    assert against is not None
    assert (against.before, against.left_out) == (part, {"partner": 6})
    (remark,) = results.remarks(part)
    assert remark == "incomplete: 3 of 12 launches; not measured: allreduce of 4 ranks on 2 hosts"
    text = page.render(part, None)
    assert remark in text
    assert "the network broke\n    &lt;last line&gt;\n</pre>" in text


def broken_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, completed: int, error: BaseException) -> None:
    """`measure` on two invented hosts, whose launches end with an error after so many."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(installed, "read_plan", lambda _: plan_for({"a": host(), "b": host()}))
    monkeypatch.setattr(training_job, "copy_files", lambda *_: None)
    answers = {"a": ssh.Answer(0, f"{ssh.ANSWER}\n9.10 5.00 4.00 2/99 7\n2\n", ""), "b": ssh.Answer(1, "", "no such file")}
    monkeypatch.setattr(ssh, "run", lambda *_, **__: answers)
    left = iter(range(completed))

    def run(*arguments: Any) -> EngineReport:
        if next(left, None) is None:
            raise error
        if arguments[2].kind != "training":
            return report([4.0, 5.0])
        rows = [{"engine": side, "rounds_us": [1000.0, 2000.0]} for side in ("collective_core", "none")]
        return EngineReport.model_validate({"results": rows})

    monkeypatch.setattr(measurement, "_run", run)


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (ProvisionError("it broke", where="b"), 1, "b: it broke"),
        (Interrupted("interrupted"), 130, "interrupted"),
        (KeyboardInterrupt(), 130, "inte"),
    ],
)
def test_what_was_measured_is_kept_when_a_launch_fails(
    error: BaseException, code: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_after(monkeypatch, tmp_path, 6, error)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.ini").write_text("a ansible_host=192.0.2.1\nb ansible_host=192.0.2.2\n")
    command = {"hosts": "hosts.ini", "repetitions": 2, "out": tmp_path / "page.html", "passwords": {}}
    with pytest.raises(ProvisionError) as raised:
        bench(**command)
    assert raised.value.exit_code == code
    shown = " ".join(capsys.readouterr().out.split())
    assert "incomplete: 6 of 8 launches; every figure is there, some of fewer launches" in shown
    assert "load 9.1 on 2 cores" in shown
    (path,) = (tmp_path / "state/runs").glob("2*/bench.json")
    kept = results.read(path.read_bytes())
    assert kept.incomplete is not None
    assert kept.incomplete.why.startswith(why)
    assert [len(run.samples_per_second.launches) for run in kept.training] == [2, 1]
    assert [(each.load, each.cores) for each in kept.hosts] == [(9.1, 2), (None, None)]
    assert results.history(inventory.load("hosts.ini")).runs == [kept]
    assert "incomplete: 6 of 8 launches" in (tmp_path / "page.html").read_text()


def test_what_was_never_launched_is_named_and_nothing_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = inventory.load("a,b")
    broken_after(monkeypatch, tmp_path, 1, ProvisionError("it broke"))
    found, error = measure(hosts, BenchOptions(), Progress(), {})
    assert found.incomplete is not None
    assert (found.incomplete.launches, found.incomplete.planned, str(error)) == (1, 12, "it broke")
    assert found.incomplete.missing[0] == "training steps of 1 rank on 1 host"
    broken_after(monkeypatch, tmp_path, 0, ProvisionError("it broke"))
    with pytest.raises(ProvisionError, match="it broke"):
        measure(hosts, BenchOptions(), Progress(), {})
    broken_after(monkeypatch, tmp_path, 12, ProvisionError("it broke"))
    found, error = measure(hosts, BenchOptions(), Progress(), {})
    assert (found.incomplete, error) == (None, None)


def test_one_pair_of_hosts_is_no_heat_map() -> None:
    one = measurements(hosts=[{"name": name, "slots": 2} for name in "ab"], pairs=measurements().pairs[:1])
    assert page.heat_maps(one) == []
    text = page.render(one, None)
    assert "<rect" not in text
    assert "The best pair" not in text
    assert "<details" not in text, "what is not drawn is no table to open"
    assert "2 (1.96–2.04)" in text


def test_a_change_is_what_exceeds_both_spreads() -> None:
    assert results.compare(measurements(2.0), measurements(2.1)).changes == [], "5 % apart, and both spread over 4 %"
    slower = results.compare(measurements(2.0), measurements(1.8))
    assert sorted(change.what for change in slower.changes) == ["2 ranks, 16 MiB", "4 ranks, 16 MiB", "5 ranks, 16 MiB", "a – b, 16 MiB"]
    assert {round(change.better, 3) for change in slower.changes} == {0.9}
    assert (slower.compared, slower.left_out) == (16, {})
    few_rounds = measurements(training=[trained(1, 900.0, low=None, high=None, launches=[900.0, 900.0])])
    assert results.compare(few_rounds, few_rounds).left_out["spread"] == 1


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
    assert (found.compared, found.left_out) == (2, {"partner": 2})
    found = results.compare(measured(1.0, 2, ["a", "b"], ["a", "b"]), measured(9.0, 3, ["a", "b"], ["a", "b"]))
    assert (found.compared, found.left_out) == (2, {"partner": 2}), "3 and 1 are not 2 and 2"


def test_names_of_curves_that_are_alike_stay_inside_of_the_drawing() -> None:
    series = [charts.Series(f"{number} ranks", [(1.0, Figure(100.0)), (2.0, Figure(99.0 + number / 10))]) for number in range(12)]
    chart = charts.chart("Speed", series, charts.Axes("bytes", "GB/s", {}))
    assert chart is not None
    heights = sorted(curve.label_y for curve in chart.curves)
    assert heights[0] >= chart.top
    assert heights[-1] <= chart.floor
    assert min(below - above for above, below in pairwise(heights)) >= 15


DOCUMENT = """{"schema": 4, "when": "2026-11-20T10:00:00+00:00", "hosts": [{"name": "a", "slots": 2}, {"name": "b", "slots": 2}],
"pairs": [{"hosts": ["a", "b"], "results": [{"bytes": 4096, "latency_us": {"median": 40.0}, "busbw_gbs": 0.1}], "limit_gbs": 2.5}],
"ranks": [], "training": []}"""


def test_earlier_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(results, "MAX_RUNS", 3)
    (tmp_path / "hosts.ini").write_text("a ansible_host=192.0.2.1\nb ansible_host=192.0.2.2\n")
    hosts = inventory.load(str(tmp_path / "hosts.ini"))
    assert results.history(hosts) == ([], [])
    for gbs in (1.0, 2.0, 3.0, 4.0):
        results.keep(hosts, measurements(gbs))
    assert results.history(hosts).runs == [measurements(2.0), measurements(3.0), measurements(4.0)], "the oldest is removed"
    assert results.history(inventory.load(str(tmp_path / "hosts.ini"), limit="a")).runs == [], "two hosts are not compared with one"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Invalid JSON"),
        *((DOCUMENT.replace('"schema": 4', f'"schema": {number}'), "`schema` must be 4") for number in (1, 3, 5)),
        (DOCUMENT.replace("40.0", "-1"), "[0].latency_us"),
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
