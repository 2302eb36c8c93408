"""The GPU code in wheels from the package index: of NCCL as the catalogue says, of JAX's plugins for ROCm as their code objects say."""

from __future__ import annotations

import re
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


def downloaded(requirement: str) -> Path:
    """A wheel, kept between runs."""
    folder = paths.cache() / "gpu-code" / requirement
    if not list(folder.glob("*.whl")):
        options = ["-q", "--no-deps", "--only-binary", ":all:", "--python-version", "3.11"]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement, "-d", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_code_of_nccl_is_as_the_catalogue_says(own_state: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(downloaded(f"{PACKAGE}=={VERSION}")) as archive:  # 300 MB
        library = archive.extract("nvidia/nccl/lib/libnccl.so.2", tmp_path)
    found = gpu_code.read(library)
    (known,) = (each.has for each in OURS.nccl().wheels.code if VERSION in each.wheels.get(PACKAGE, ()))
    assert found is not None
    assert {each for each in found.machine_code if not each.endswith("f")} == set(known)
    assert found.machine_code["10.0f"] < found.machine_code["10.0"]
    assert found.ptx["12.0"] < found.machine_code["12.0"]


def test_bundles_of_amd_are_read_from_wheels(own_state: Path, tmp_path: Path) -> None:
    """Bundles that are not compressed, whose code objects name their target, too; and those that are compressed with zstd."""
    with zipfile.ZipFile(downloaded("jax-rocm60-plugin==0.5.0")) as archive:
        library = Path(archive.extract("jax_rocm60_plugin/_prng.so", tmp_path))
    found = gpu_code.read(str(library))
    assert found is not None
    named = re.findall(rb"[^-]amdgcn-amd-amdhsa--(gfx\w+)", library.read_bytes())  # in a code object, not in the bundle's header
    assert set(found.machine_code) == {each.decode() for each in named} >= {"gfx90a", "gfx942", "gfx1100"}
    with zipfile.ZipFile(downloaded("jax-rocm7-plugin==0.10.2")) as archive:
        found = gpu_code.read(archive.extract("jax_rocm7_plugin/_solver.so", tmp_path))
    assert found is not None
    assert found.containers == 2
    assert {"gfx90a", "gfx942", "gfx950", "gfx1201"} <= set(found.machine_code)
