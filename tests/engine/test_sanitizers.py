"""The whole engine under the address and undefined-behaviour sanitizers, ranks as threads (csrc/selftest.cpp).

Takes a minute on two cores, so only with COLLECTIVE_TEST_SANITIZERS=1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "collective_core"


@pytest.mark.skipif(os.environ.get("COLLECTIVE_TEST_SANITIZERS") != "1", reason="COLLECTIVE_TEST_SANITIZERS=1 runs it")
@pytest.mark.parametrize("sanitizer", ["ASAN", "TSAN"])
def test_selftest_is_clean(tmp_path, sanitizer):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    assert cmake is not None, "the sanitizers were asked for, but there is no cmake; `make engine` sets everything up"
    options = ["-DCOLLECTIVE_SELFTEST=ON", f"-DCOLLECTIVE_{sanitizer}=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g"]
    subprocess.run([cmake, "-S", str(SOURCES), "-B", str(tmp_path), *options], check=True, capture_output=True)
    target = ["--target", "collective_core_selftest", "--parallel", "2"]
    subprocess.run([cmake, "--build", str(tmp_path), *target], check=True, capture_output=True)
    done = subprocess.run([str(tmp_path / "collective_core_selftest")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Sanitizer" not in done.stderr
