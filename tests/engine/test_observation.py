"""What a user sees of a job: the timeline, warnings of stalls, the flight recorder, notes on Horovod's variables."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow_but_last
from collective_core.errors import CollectiveError
from collective_core.observe import recorder, timeline_file
from collective_core.observe.clocks import Clock, offset_of
from collective_core.observe.flight_recorder import path_of
from collective_core.observe.timeline_file import Head, Part
from collective_core.observe.trace import rows, table
from collective_core.runtime import config
from collective_core.runtime.horovod_variables import translate

from collective_core import flight, trace

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("n", "hosts", "how"), [*slow_but_last((2, 1, "call"), (3, 1, "COLLECTIVE_TIMELINE"), (4, 2, "call")), (2, 2, "HOROVOD_TIMELINE")]
)
def test_timeline_of_all_ranks(launch, tmp_path, n, hosts, how):
    path = tmp_path / "timeline.json"
    (tmp_path / "other").mkdir()
    env = {"TMPDIR": str(tmp_path / "other")} if how == "call" else {how: str(path)}
    outcome = launch("timeline.py", n, hosts, [str(path), how], env=env).must_succeed()
    rows = json.loads(path.read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == set(range(n))
    for name in [f"gradient.{i}" for i in range(5)] + [f"late.{i}" for i in range(3)]:
        moves = [row for row in rows if row["name"] == f"allreduce {name}"]
        assert sorted(row["pid"] for row in moves) == list(range(n)), name
        assert all(row["dur"] > 0 for row in moves)
        # Nobody moves data before everybody is there, by the corrected clocks; their error is far below a step's 300 ms.
        waits = [row for row in rows if row["name"] == "wait" and row["args"]["tensor"] == name]
        assert max(row["ts"] for row in waits) < min(row["ts"] + row["dur"] for row in moves) + 20_000
    table = outcome.stderr.split(f"timeline: {path}\n")[1]
    assert "slowest rank: 1 " in table
    lines = [line.split() for line in table.splitlines() if line.split()[:1] and line.split()[0] in map(str, range(n))]
    assert len(lines) == n
    assert all(float(total) >= float(compute) > 0 for _, _, total, compute, *_ in lines)
    assert ("timeline: rank 3 (host" in outcome.stderr) == (n > 3), "the rank without the folder did not say where it records"
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_a_clock_that_is_ahead_is_found():
    ahead = 5_000_000
    enters = [[0, 1000, 2000], [ahead + 100, ahead + 990, ahead + 2100]]
    leaves = [[150, 1050, 2150], [ahead + 160, ahead + 1040, ahead + 2140]]
    assert abs(offset_of(enters, leaves, 1) - ahead) <= 50


def test_table_and_trace_correct_the_clocks():
    parts = [part_of(0, 0), part_of(1, 7_000_000)]
    starts = [(row["pid"], row["ts"]) for row in rows(parts) if row["name"] == "allreduce g"]
    assert starts == [(0, 2000.0), (1, 2000.0)]
    first = table(parts).splitlines()[1].split()
    assert first == ["0", "box", "0.010", "0.006", "0.003", "0.001", "0.004", "0.002"]


def part_of(rank, shift, job=1):
    event = recorder.Event("done", 0, 1, shift, shift, shift + 2_000_000, shift + 5_000_000, 40, "allreduce", "float32", "g")
    clock = Clock(shift, float(shift))
    return Part(Head(bytes(16), job, rank, 0, clock, clock, shift, shift + 10_000_000, 4_000_000, 0, "box"), [event])


def test_what_killed_ranks_have_left_is_drawn_without_what_an_earlier_run_left(tmp_path, capsys):
    timeline = str(tmp_path / "[t].json")
    assert trace.main([timeline]) == 2
    for rank, job in [(2, 7), (0, 8), (1, 8)]:
        timeline_file.Writer(timeline_file.path_of(timeline, rank), part_of(rank, 0, job).head).close()
    with open(timeline_file.path_of(timeline, 1), "ab") as file:
        file.write(bytes(2 * recorder.EVENT_BYTES + 5))  # the last one was cut off
    assert trace.main([timeline]) == 0
    rows = json.loads((tmp_path / "[t].json").read_text())["traceEvents"]
    assert [row["pid"] for row in rows if row["ph"] == "X"] == [1, 1]
    assert {row["pid"] for row in rows} == {0, 1}
    assert timeline_file.path_of(timeline, 2) in capsys.readouterr().out
    Path(timeline_file.path_of(timeline, 0)).write_bytes(b"something else")
    assert trace.main([timeline]) == 2
    assert "is not a rank's part of a timeline" in capsys.readouterr().err


def test_copies_that_cannot_be_written_are_a_problem_and_leave_nothing(tmp_path):
    copies = timeline_file.Copies([str(tmp_path / "one"), str(tmp_path / "nowhere" / "two")])
    copies.add([memoryview(b"abc"), memoryview(b"")])
    copies.close()
    assert "No such file" in copies.problem
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 1), (4, 2)))
def test_a_rank_that_waits_names_whom_it_waits_for(launch, n, hosts):
    outcome = launch("waiting.py", n, hosts, env={"COLLECTIVE_STALL_WARNING": "0.5"}).must_succeed()
    late = outcome.reports()[n - 1]["pid"]
    warnings = [line for line in outcome.stderr.splitlines() if line.startswith("collective_core: rank")]
    if hosts == 1:
        assert all(line.startswith("collective_core: rank 0 (host") for line in warnings), warnings
    assert any(f"in allreduce 'loss' (float32[10]) for rank {n - 1} (host " in line and f"pid {late})" in line for line in warnings)
    assert outcome.reports()[n - 1]["running"] == "allreduce 'loss'", "not what `provision doctor --job` reads of the recorder"


@pytest.mark.parametrize(("hosts", "backend", "awaited"), slow_but_last((1, "mpi", "its data to move"), (2, "engine", "rank 1 (host ")))
def test_a_rank_that_stands_still_while_data_moves_is_warned_of(launch, hosts, backend, awaited):
    env = {"COLLECTIVE_STALL_WARNING": "0.5", "COLLECTIVE_BACKEND": backend, "TEST_LATE": "0"}
    outcome = launch("waiting.py", 2, hosts, ["stop"], env=env).must_succeed()
    said = f"s in allreduce 'gradient' (float32[33554432]) for {awaited}"
    assert any(line.startswith("collective_core: rank 0 (host ") and said in line for line in outcome.stderr.splitlines()), outcome.stderr


def test_stall_warnings_can_be_switched_off(launch):
    outcome = launch("waiting.py", 2, env={"HOROVOD_STALL_CHECK_DISABLE": "1", "TEST_LATE": "0.3"}).must_succeed()
    assert "has waited" not in outcome.stderr


def test_flight_recorder_and_timeline_survive_a_kill(launch, tmp_path, capsys):
    timeline = tmp_path / "timeline.json"
    env = {"COLLECTIVE_FLIGHT_RECORDER": str(tmp_path), "COLLECTIVE_TIMELINE": str(timeline), "TEST_LATE": "0"}
    launch("waiting.py", 3, 1, ["die"], env=env, keep_going=True)
    assert flight.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for rank in range(3):
        recording = recorder.read_file(path_of(str(tmp_path), rank))
        assert recording.rank == rank
        assert [event.name for event in recording.events if event.name == "loss"] == ["loss"]
        assert f"rank {rank} of 3 (host " in text
    assert recorder.read_file(path_of(str(tmp_path), 0)).events[-1].state == "failed"
    assert "allreduce 'gradient' (float32, 12000000 bytes): failed after" in text
    assert flight.main([str(tmp_path / "nothing")]) == 2
    # The others have ended without an end of their timeline, too.
    assert trace.main([str(timeline)]) == 0
    rows = json.loads(timeline.read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == {0, 1, 2}
    assert 2 in {row["pid"] for row in rows if row.get("cat") == "barrier"}


def test_horovods_variables():
    ours, notes = translate(
        {
            "HOROVOD_FUSION_THRESHOLD": "1048576",
            "HOROVOD_CYCLE_TIME": "5",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
            "HOROVOD_TIMELINE": "DYNAMIC",
            "HOROVOD_LOG_LEVEL": "debug",
            "HOROVOD_SOMETHING": "1",
            "PATH": "/bin",
        }
    )
    assert ours == {"COLLECTIVE_FUSION_MB": "1.0", "COLLECTIVE_STALL_WARNING": "30", "COLLECTIVE_TIMEOUT": "0"}
    assert notes == [
        "HOROVOD_CYCLE_TIME has no effect: operations start at once, without a cycle",
        "HOROVOD_SOMETHING has no effect: it is not known here",
    ]
    assert translate({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"})[0]["COLLECTIVE_STALL_WARNING"] == "0"
    assert translate({"HOROVOD_GLOO_IFACE": "eth1"}) == ({"COLLECTIVE_NETWORK": "eth1"}, [])
    quiet = {"HOROVOD_LOG_LEVEL": "ERROR", "HOROVOD_CYCLE_TIME": "5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}
    assert translate(quiet) == ({"COLLECTIVE_STALL_WARNING": "0"}, [])
    levels = "trace, debug, info, warning, error, fatal"
    assert translate({"HOROVOD_LOG_LEVEL": "loud"}) == ({}, [f"HOROVOD_LOG_LEVEL=loud has no effect: the levels are {levels}"])


def test_every_variable_is_in_the_table():
    """The table of settings is where a user looks: a variable that the code reads and the table lacks does not exist for them."""
    root = Path(__file__).parents[2]
    table = (root / "docs" / "engine-settings.md").read_text()
    package = root / "collective_core" / "src" / "collective_core"
    texts = [path.read_text() for path in package.rglob("*.py") if package / "bench" not in path.parents]
    read = {name for text in texts for name in re.findall(r"COLLECTIVE_[A-Z]+(?:_[A-Z]+)*", text)}
    assert len(read) > 10
    assert {name for name in read if f"`{name}`" not in table} == set()


def first_of_two_free_ports():
    """Below those that Linux gives to connections by default."""
    while True:
        port = random.randrange(20_000, 32_000)
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port


def test_metrics_of_a_job_add_up_and_are_served_while_it_runs(launch):
    port = first_of_two_free_ports()
    env = {"COLLECTIVE_METRICS_PORT": str(port)}
    reports = launch("metrics.py", 2, 1, [str(port)], env=env).must_succeed().reports()
    waits = reports[0]  # the worker itself compares the rest
    assert waits["slowest_rank"] == 1
    assert waits["late_seconds"]["1"] > 0.2
    assert waits["peers_seconds"] > 0.2
    assert waits["waited_seconds"] > 0.2


def test_hosts_that_are_late_are_known_to_the_first_rank_of_a_host(launch):
    reports = launch("metrics.py", 2, 2).must_succeed().reports()
    assert 0.2 < reports[0]["hosts_seconds"] <= reports[0]["peers_seconds"]
    assert reports[0]["late_seconds"] == {}
    assert reports[0]["slowest_rank"] is None


def test_a_metrics_port_in_use_is_a_warning_and_training_goes_on():
    script = "import collective_core as cc, numpy; cc.init(); cc.barrier(); print(cc.metrics()['operations'][0]['operations'])"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {**os.environ, "COLLECTIVE_METRICS_PORT": str(port)}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert f"serves no metrics: it cannot listen at 127.0.0.1 port {port} (COLLECTIVE_METRICS_PORT + local rank" in done.stderr
    assert "Address already in use" in done.stderr


CROWDED = """
import socket, urllib.request
import collective_core as cc
from collective_core.observe import prometheus
cc.init()
port = prometheus._server.server_address[1]
def call():
    return socket.create_connection(("127.0.0.1", port), timeout=5)
idle = [call() for _ in range(prometheus.MAX_CLIENTS)]
print(len(call().recv(1)))  # sent away at once, where the others are waited for
for client in idle:
    client.close()
while prometheus._server._places._value < prometheus.MAX_CLIENTS:
    pass
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).status)
"""


def test_clients_of_the_metrics_are_limited_and_make_room_when_they_go():
    env = {**os.environ, "COLLECTIVE_METRICS_PORT": str(first_of_two_free_ports())}
    done = subprocess.run([sys.executable, "-c", CROWDED], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0\n200\n", done.stderr


@pytest.mark.parametrize("port", ["http", "0.5", "70000"])
def test_a_metrics_port_that_is_none_is_an_error(monkeypatch, port):
    monkeypatch.setenv("COLLECTIVE_METRICS_PORT", port)
    with pytest.raises(CollectiveError, match="COLLECTIVE_METRICS_PORT="):
        config.from_environment()


def test_the_metrics_port_follows_the_local_rank_of_an_elastic_job():
    script = """
import socket, threading, urllib.request
from collective_core.observe import prometheus
from collective_core.runtime import config, launchers, membership

settings = config.from_environment()
launchers.is_elastic = lambda: True
for local_rank in (0, 1, 0):
    membership.local_rank = lambda: local_rank
    if local_rank == 1:  # the rank that had it leaves it in this moment
        taken = socket.create_server(("127.0.0.1", settings.metrics_port + 1))
        threading.Timer(0.3, taken.close).start()
    prometheus.begin(settings)
    prometheus.begin(settings)
    for port in (0, 1):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{settings.metrics_port + port}/metrics", timeout=10) as answer:
                print(port, answer.status)
        except OSError:
            pass
"""
    env = {**os.environ, "COLLECTIVE_METRICS_PORT": str(first_of_two_free_ports())}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 200", "1 200", "0 200"]
    assert done.stderr == ""
