"""Version of a tarball with NCCL's sources, whatever its name."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest

from provision.base import tarball
from provision.base.errors import UsageError

# As in 2.29.7 of 2026, comments and all.
VERSION = "#\n# SPDX-License-Identifier: Apache-2.0\n#\n\n##### version\nNCCL_MAJOR   := 2\nNCCL_MINOR   := 29\nNCCL_PATCH   := 7\n"


def packed(path: Path, *members: tuple[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members:
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("folder", ["nccl-2.29.7-1", "./nccl", "my-nccl"])
def test_the_version_is_read_from_inside(folder: str, tmp_path: Path) -> None:
    path = packed(tmp_path / "nvidia-nccl_9.9.9-1.orig.tar.gz", (f"{folder}/Makefile", "all:"), (f"{folder}/makefiles/version.mk", VERSION))
    assert tarball.nccl(path).version == "2.29.7"


@pytest.mark.parametrize(
    "members",
    [
        [("openmpi-4.1.8/configure", "#!/bin/sh")],
        [("nccl/makefiles/version.mk", VERSION.replace("NCCL_PATCH   := 7", "NCCL_PATCH := seven"))],
        [("nccl/makefiles/version.mk", VERSION), ("other/makefiles/version.mk", VERSION)],
        [("nccl/deeper/makefiles/version.mk", VERSION)],
    ],
)
def test_other_content_is_refused(members: list[tuple[str, str]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not the sources of NCCL.*\n?.*") as refused:
        tarball.nccl(packed(tmp_path / "nccl-2.29.7-1.tar.gz", *members))
    assert "nvidia-nccl_2.22.3-1.orig.tar.gz" in str(refused.value)


@pytest.mark.parametrize("part", [0, 0.01, 0.5, 0.95])
def test_a_truncated_download_is_refused(part: float, tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(20_000).hex()
    whole = packed(tmp_path / "whole.tar.gz", ("nccl/makefiles/version.mk", VERSION), ("nccl/src/all.cc", noise)).read_bytes()
    (tmp_path / "half.tar.gz").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(UsageError, match="cannot be read as a tarball"):
        tarball.nccl(tmp_path / "half.tar.gz")
