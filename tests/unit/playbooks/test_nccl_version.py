"""Which NCCL a program gets: the linker role's script with stand-in libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provision.base import resources

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler makes the stand-in library")
SOURCE = 'const char banner[] = "{}"; int ncclGetVersion(int *v) {{ *v = {}; return banner[0] == 0 || {}; }}\n'


def ask(folder: Path, banner: str, code: int, status: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "fake.c").write_text(SOURCE.format(banner, code, status))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnccl.so.2", folder / "fake.c"], check=True)
    return run(folder)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    script = resources.folder("playbooks") / "roles/linker/files/nccl_version.py"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("banner", "code", "version", "cuda"),
    [
        ("NCCL version 2.21.5+cuda12.4", 22105, "2.21.5", "12.4"),
        ("NCCL version 2.7.8+cuda11.0", 2708, "2.7.8", "11.0"),
        ("says nothing", 22105, "2.21.5", ""),
    ],
)
def test_version_cuda_and_file_are_the_librarys_own(banner: str, code: int, version: str, cuda: str, tmp_path: Path) -> None:
    done = ask(tmp_path, banner, code)
    assert json.loads(done.stdout) == {"version": version, "cuda": cuda, "path": str(tmp_path / "libnccl.so.2")}


def test_a_library_that_does_not_load_or_answer_is_an_error(tmp_path: Path) -> None:
    assert "ncclGetVersion failed with 1" in ask(tmp_path, "NCCL version 2.21.5+cuda12.4", 22105, 1).stderr
    (tmp_path / "libnccl.so.2").write_bytes(b"not a library")
    assert "NCCL cannot be loaded: " in (done := run(tmp_path)).stderr
    assert done.returncode == 1
