"""The whole engine under the sanitizers: ranks as threads (csrc/tests/selftest.cpp), strangers and broken ranks (csrc/tests/fuzz.cpp).

Takes a minute on two cores, so only with COLLECTIVE_TEST_SANITIZERS=1.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from selftest import build

pytestmark = pytest.mark.slow


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
