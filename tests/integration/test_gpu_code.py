"""The GPU code of NCCL in a wheel from the package index, compared with what the catalogue says of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from provision.base import paths
from provision.catalog import OURS
from provision.hostside import gpu_code

pytestmark = pytest.mark.slow

PACKAGE, VERSION = "nvidia-nccl-cu12", "2.28.9"


def test_the_code_of_nccl_is_as_the_catalogue_says(own_state: Path, tmp_path: Path) -> None:
    folder = paths.cache() / "gpu-code"  # 300 MB
    if not list(folder.glob("*.whl")):
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{PACKAGE}=={VERSION}", "-d", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("nvidia/nccl/lib/libnccl.so.2", tmp_path)
    found = gpu_code.read(library)
    (known,) = (each.has for each in OURS.nccl().wheels.code if VERSION in each.wheels.get(PACKAGE, ()))
    assert found is not None
    assert {each for each in found.machine_code if not each.endswith("f")} == set(known)
    assert found.machine_code["10.0f"] < found.machine_code["10.0"]
    assert found.ptx["12.0"] < found.machine_code["12.0"]
