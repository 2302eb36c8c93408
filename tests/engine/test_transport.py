"""The transport seam (csrc/transport/seam.h): the engine runs over a transport of a test's own, without sockets."""

from __future__ import annotations

import subprocess

import pytest
from selftest import build


@pytest.mark.slow
def test_negotiation_and_ring_run_over_a_transport_in_memory(tmp_path):
    (program,) = build(tmp_path, ["collective_core_selftest"])
    done = subprocess.run([str(program), "memory"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
