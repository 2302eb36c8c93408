"""The C++ test programs, built from the engine's sources (csrc/tests)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "collective_core"


def build(folder: Path, programs: list[str], *options: str) -> list[Path]:
    """Compiles them in `folder`, with CMake options such as -DCOLLECTIVE_ASAN=ON."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    assert cmake is not None, "there is no cmake; `make engine` sets everything up"
    always = ["-DCOLLECTIVE_SELFTEST=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1"]
    subprocess.run([cmake, "-S", str(SOURCES), "-B", str(folder), *always, *options], check=True, capture_output=True)
    subprocess.run([cmake, "--build", str(folder), "--target", *programs, "--parallel", "2"], check=True, capture_output=True)
    return [folder / program for program in programs]
