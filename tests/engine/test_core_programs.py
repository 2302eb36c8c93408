"""The whole core without Python (csrc/tests): ranks as threads, over TCP, in memory and on a network that misbehaves; strangers and
broken ranks; all of it under the sanitizers with COLLECTIVE_TEST_SANITIZERS=1."""

from __future__ import annotations

import os
import subprocess

import pytest
from selftest import build

AN_HOUR = os.environ.get("COLLECTIVE_TEST_FAULTS", "3600")  # seconds


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["selftest", "memory"], marks=pytest.mark.slow),
        ["fuzz", "faults", "20", "0"],
        pytest.param(["fuzz", "faults", AN_HOUR, "1000000"], marks=pytest.mark.slow),
    ],
)
def test_ranks_in_memory_agree_whatever_their_network_does(tmp_path, arguments):
    (program,) = build(tmp_path, [f"collective_core_{arguments[0]}"])
    done = subprocess.run([program, *arguments[1:]], capture_output=True, text=True, timeout=2 * float(AN_HOUR) + 600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout or " 0 failures" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("COLLECTIVE_TEST_SANITIZERS") != "1", reason="COLLECTIVE_TEST_SANITIZERS=1 runs it")
@pytest.mark.parametrize("sanitizer", ["ASAN", "TSAN"])
def test_selftest_and_fuzz_are_clean(tmp_path, sanitizer):
    programs = build(tmp_path, ["collective_core_selftest", "collective_core_fuzz"], f"-DCOLLECTIVE_{sanitizer}=ON")
    # A count that a broken rank made up asks for more memory than there is: the engine must see that it gets none.
    environment = {**os.environ, f"{sanitizer}_OPTIONS": "allocator_may_return_null=1"}
    for program in programs:
        done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Sanitizer: " not in done.stderr.replace("WARNING: AddressSanitizer failed to allocate", ""), done.stderr
        assert "runtime error" not in done.stderr
