"""Parameter servers: hvd.ps."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from cases import slow_but_last
from collective_core.extensions.ps import layout, messages
from collective_core.extensions.ps.clocks import Clocks
from conftest import WORKERS

torch = pytest.importorskip("torch")

PATIENCE = 90
LAUNCH = [sys.executable, "-m", "collective_core.launch"]


@pytest.mark.parametrize(("n", "servers", "hosts"), slow_but_last((3, 1, 1), (5, 3, 1), (4, 2, 2)))
def test_training_with_servers(launch, n, servers, hosts):
    reports = launch("parameter_server.py", n, hosts, [str(servers)]).must_succeed().reports()
    assert set(reports) == set(range(n))


@pytest.mark.slow
def test_a_child_that_is_forked_from_a_worker_ends_at_once_and_uses_no_server(launch):
    assert launch("forked_and_ended.py", 2, arguments=["servers"], limit=3 * PATIENCE).must_succeed().reports()[0]["code"] == 7


@pytest.mark.parametrize("servers", ["0", "2", "3", "-1"])
def test_a_job_has_a_worker_and_a_server_at_least(servers):
    done = subprocess.run(
        [*LAUNCH, "-np", "2", "--servers", servers, "true"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 2
    assert f"--servers {servers}: of 2 ranks" in done.stderr


def test_messages_hold_a_header_and_arrays():
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7.5), np.zeros((0, 4)), np.array([3], np.int64)]
    header, found = messages.unpack(messages.pack({"kind": "step", "of": ["ä", None]}, arrays))
    assert header == {"kind": "step", "of": ["ä", None]}
    assert [each.dtype for each in found] == [each.dtype for each in arrays]
    assert all(np.array_equal(one, other) and one.shape == other.shape for one, other in zip(arrays, found, strict=True))


@pytest.mark.parametrize(
    "message", [b"", b"x" * 8, b"\xff" * 64, (2).to_bytes(8, "little") + b"[]      ", (99).to_bytes(8, "little") + b"{}"]
)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(ValueError, match="makes no sense"):
        messages.unpack(np.frombuffer(message, np.uint8))


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("length", [1, layout.FEWEST_TO_CUT - 1, layout.FEWEST_TO_CUT, 10_001])
def test_servers_hold_every_element_and_row_once(length, servers):
    bounds = layout.bounds_of("name", length, servers)
    assert (bounds[0], bounds[-1]) == (0, length)
    sizes = np.diff(bounds)
    assert (sizes.max() - sizes.min() <= 1) if length >= layout.FEWEST_TO_CUT else (sizes > 0).sum() == 1
    held = [layout.rows_of(server, length, servers) for server in range(servers)]
    for row in (0, length // 2, length - 1):
        assert held[layout.server_of(row, servers)][layout.row_at_server(row, servers)] == row


def test_whom_a_worker_waits_for():
    active = {0, 1, 2}
    clocks = Clocks(range(3), active, staleness=2)
    for _ in range(2):
        clocks.tick(0)
    assert clocks.waits_for(0) == []
    assert clocks.tick(0) == 3
    assert clocks.waits_for(0) == [1, 2]
    clocks.tick(1)
    assert clocks.waits_for(0) == [2]
    active.remove(2)  # it has ended
    assert clocks.waits_for(0) == []
    assert clocks.complete_rounds() == 1
    free = Clocks(range(2), {0, 1}, staleness=None)
    for _ in range(9):
        free.tick(1)
    assert free.waits_for(1) == []


def test_how_servers_are_used(launch, tmp_path):
    reports = launch("parameter_server_use.py", 3, 1, [str(tmp_path)]).must_succeed().reports()
    assert set(reports) == {0, 1}


@pytest.mark.slow
def test_an_answer_that_comes_too_late_is_not_taken_for_another(launch, tmp_path):
    report = launch("parameter_server_failures.py", 2, 1, ["1", "late", "-1", str(tmp_path)], keep_going=True).reports()[0]
    assert report["kind"] == "closed", report
    assert "cannot be used after an earlier failure: a message" in report["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "failing", "hosts"), slow_but_last(("raises", 1, 1), ("raises", 3, 1), ("killed", 3, 2), ("killed", 0, 2)))
def test_a_rank_that_fails_is_named_to_all_others(launch, how, failing, hosts):
    """Rank 3 is the server."""
    done = launch("parameter_server_failures.py", 4, hosts, ["1", how, str(failing)], keep_going=True)
    reports = done.reports()
    assert set(reports) == {0, 1, 2, 3} - {failing}
    for report in reports.values():
        assert report["kind"] in ("peer_lost", "internal"), report
        assert report["ranks"] == [failing], report
        assert f"rank {failing} (host " in report["error"], report


@pytest.mark.slow
def test_a_worker_that_stands_still_is_named_to_whoever_waits_for_it(launch, tmp_path):
    arguments, env = ["1", "stalls", "1", str(tmp_path)], {"COLLECTIVE_STALL_WARNING": "1"}
    done = launch("parameter_server_failures.py", 3, 1, arguments, env=env, keep_going=True)
    report = done.reports()[0]
    assert (report["kind"], report["ranks"]) == ("timeout", [1])
    for text, says in ((done.stderr, "has waited 1 s"), (report["error"], "has waited 3 s")):
        assert re.search(rf"rank 0 \(host \S+ pid \d+\) {says} for an update of rank 1 \(host ", text), text


@pytest.mark.slow
def test_a_worker_that_ends_early_holds_up_nobody(launch):
    reports = launch("parameter_server_failures.py", 3, 1, ["1", "ends", "0"]).must_succeed().reports()
    assert reports[2]["ended"]
    assert reports[0]["value"] == [-4.5], "three steps of both"
    assert reports[1]["value"] == [-4.5 - 6], "and three of the second alone"


@pytest.mark.slow
def test_a_new_job_goes_on_from_snapshots(launch, tmp_path):
    def values(folder, steps, **env):
        done = launch("parameter_server_again.py", 2, 1, [str(tmp_path / folder), str(steps)], env=env)
        return done.must_succeed().reports()[0]["values"]

    whole = values("one", 6)
    values("two", 2)
    assert values("two", 4) == whole
    for damage, what in ((lambda data: data[:-3], "is damaged"), (lambda data: b"\xff" * len(data), "is damaged")):
        file = tmp_path / "two" / "server-0.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        done = launch("parameter_server_again.py", 2, 1, [str(tmp_path / "two"), "1"])
        assert done.returncode != 0
        assert f"server-0.safetensors {what}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", slow_but_last("copies", "snapshots"))
def test_a_server_that_dies_loses_no_more_than_the_updates_since_its_snapshot(tmp_path, how):
    """After 13 updates of one of its two arrays. The job goes on with three ranks, of which others are servers, then with four."""
    command = [*LAUNCH, "-np", "4", "--min-np", "3", "--servers", "2", sys.executable]
    script = [str(WORKERS / "elastic_parameter_server.py"), str(tmp_path), "13", how]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("log.*")]
    assert len(logs) == 5
    first = next(log for log in logs if log[0].get("begin") == 0 and log[0]["rank"] == 0)
    begins = [number for number, note in enumerate(first) if "begin" in note]
    assert len(begins) >= 2
    acknowledged = max(note["known"][0] for note in first[: begins[1]])
    lost, kept = first[begins[1]]["known"]
    if how == "snapshots":
        assert lost == 10, "every fifth update is in a snapshot"
        assert acknowledged - 5 <= lost
    else:
        assert lost >= acknowledged, "what was answered is in the copy"
    assert kept >= acknowledged, "the server that lives has lost nothing"
    for begin in begins[2:]:
        assert first[begin]["known"][0] >= first[begin - 1]["known"][0], "what moves to other ranks is not lost"
    # Workers tell the servers that the fourth rank is to come.
    left = [note["left"] for log in logs for note in log if "left" in note]
    assert sorted(left) == ["HostsUpdatedInterrupt", "HostsUpdatedInterrupt", "PeerLostError"]
    ends = [log[-1]["end"] for log in logs if "end" in log[-1]]
    assert len(ends) == 2
    assert ends[0] == ends[1]


def test_what_the_benchmark_sums_up():
    from benchmarks.engine.parameter_server import STALENESS, summary

    speeds = [(10.0, 9.0), (20.0, 20.0), (30.0, 33.0)]
    rows = [{"staleness": each, "without": w, "with": s, "ratio": s / w} for each in STALENESS for w, s in speeds]
    for found, staleness in zip(summary(rows), STALENESS, strict=True):
        assert found == {"staleness": staleness, "without": 20.0, "with": 20.0, "ratio": 1.0, "least": 0.9, "most": 1.1, "n": 3}
