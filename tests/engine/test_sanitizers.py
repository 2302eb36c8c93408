"""The whole engine under the sanitizers: ranks as threads (csrc/tests/selftest.cpp), strangers and broken ranks (csrc/tests/fuzz.cpp).

Takes a minute on two cores, so only with COLLECTIVE_TEST_SANITIZERS=1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCES = Path(__file__).resolve().parents[2] / "collective_core"


@pytest.mark.skipif(os.environ.get("COLLECTIVE_TEST_SANITIZERS") != "1", reason="COLLECTIVE_TEST_SANITIZERS=1 runs it")
@pytest.mark.parametrize("sanitizer", ["ASAN", "TSAN"])
def test_selftest_and_fuzz_are_clean(tmp_path, sanitizer):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    assert cmake is not None, "the sanitizers were asked for, but there is no cmake; `make engine` sets everything up"
    options = ["-DCOLLECTIVE_SELFTEST=ON", f"-DCOLLECTIVE_{sanitizer}=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g"]
    subprocess.run([cmake, "-S", str(SOURCES), "-B", str(tmp_path), *options], check=True, capture_output=True)
    programs = ["collective_core_selftest", "collective_core_fuzz"]
    subprocess.run([cmake, "--build", str(tmp_path), "--target", *programs, "--parallel", "2"], check=True, capture_output=True)
    # A count that a broken rank made up asks for more memory than there is: the engine must see that it gets none.
    environment = {**os.environ, f"{sanitizer}_OPTIONS": "allocator_may_return_null=1"}
    for program in programs:
        done = subprocess.run([str(tmp_path / program)], env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Sanitizer: " not in done.stderr.replace("WARNING: AddressSanitizer failed to allocate", ""), done.stderr
        assert "runtime error" not in done.stderr
