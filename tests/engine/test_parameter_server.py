"""Parameter servers: hvd.ps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from cases import slow_but_last
from collective_core.common.parameter_server import layout, messages
from collective_core.common.parameter_server.clocks import Clocks

torch = pytest.importorskip("torch")

PATIENCE = 90
LAUNCH = [sys.executable, "-m", "collective_core.launch"]


@pytest.mark.parametrize(("n", "servers", "hosts"), slow_but_last((3, 1, 1), (5, 3, 1), (4, 2, 2)))
def test_training_with_servers(launch, n, servers, hosts):
    reports = launch("parameter_server.py", n, hosts, [str(servers)]).must_succeed().reports()
    assert set(reports) == set(range(n))


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
