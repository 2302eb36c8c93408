"""Shared options: what they refuse, and what they return."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from changed_catalogue import change

from provision.base.engine_source import EngineSource
from provision.base.errors import UsageError
from provision.cli import options
from provision.plan.options import requirements_of

LOCAL = "nccl-local-repo-ubuntu2204-2.21.5-cuda12.4_1.0-1_amd64.deb"


def refused(**given: Any) -> str:
    with pytest.raises(UsageError) as error:
        options.requirements(**given)
    return str(error.value)


def nccl_sources(path: Path) -> Path:
    text = b"NCCL_MAJOR := 2\nNCCL_MINOR := 22\nNCCL_PATCH := 3\n"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("nccl/makefiles/version.mk")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return path


@pytest.mark.parametrize("name", ["openmpi-4.1.8.tar.gz", "openmpi-4.1.6.tar.bz2"])
def test_a_tarball_whose_checksum_is_known_must_have_it(name: str, tmp_path: Path) -> None:
    given = tmp_path / name
    given.write_bytes(b"junk")
    assert "it is damaged, or not what its name says" in refused(openmpi_tarball=given)
    other = given.rename(tmp_path / "openmpi-4.1.5.tar.gz")
    assert options.requirements(openmpi_tarball=other).openmpi_tarball == other  # no checksum of that one is known: it is the user's


def test_openmpi_tarball_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "openmpi-4.1.8.tar.gz"
    given.write_bytes(b"the official one")
    known = {"4.1.8": {"ending": "gz", "value": hashlib.sha256(b"the official one").hexdigest()}}
    change(monkeypatch, "openmpi", {"tarball": {"sha256": known}})
    assert options.requirements(openmpi_tarball=given).openmpi_tarball == given


def test_nccl_local_is_a_deb_and_sets_the_source(tmp_path: Path) -> None:
    given = tmp_path / LOCAL
    given.touch()
    assert options.requirements(nccl_local=given, nccl_source="local").nccl_local == given
    assert "exclude each other" in refused(nccl_local=given, nccl_source="wheel")
    assert "name it: --nccl-local FILE" in refused(nccl_source="local")
    rpm = given.rename(tmp_path / "nccl-local-repo-rhel9-2.21.5-cuda12.4-1.0-1.x86_64.rpm")
    assert "only .deb packages can be used" in refused(nccl_local=rpm)


def test_nccl_tarball_sets_the_source_and_must_have_the_requested_version(tmp_path: Path) -> None:
    given = nccl_sources(tmp_path / "sources.tar.gz")
    made = requirements_of(options.requirements(nccl_tarball=given), EngineSource(b"", "0.1.0", "0" * 64))
    assert (made.nccl_source, made.nccl_tarball, made.nccl_tarball_version) == ("source", "sources.tar.gz", "2.22.3")
    assert made.nccl_tarball_sha256 == hashlib.sha256(given.read_bytes()).hexdigest()
    named = options.requirements(nccl_tarball=given, nccl_source="source", nccl="2.22.3").nccl_tarball
    assert named is not None
    assert named.path == given
    assert "--nccl-tarball and --nccl-source wheel exclude each other" in refused(nccl_tarball=given, nccl_source="wheel")
    assert "it contains NCCL 2.22.3, but --nccl requests 2.21.5" in refused(nccl_tarball=given, nccl="2.21.5")
    assert "no such file" in refused(nccl_tarball=tmp_path / "missing.tar.gz")
    local = tmp_path / LOCAL
    local.touch()
    assert "--nccl-tarball and --nccl-local exclude each other" in refused(nccl_tarball=given, nccl_local=local)


def test_nccl_tarball_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = nccl_sources(tmp_path / "sources.tar.gz")
    asked = options.requirements(nccl_tarball=Path("sources.tar.gz"))
    given.unlink()  # whoever looks again finds nothing
    made = requirements_of(asked, EngineSource(b"", "0.1.0", "0" * 64))
    assert (made.nccl_tarball, made.nccl_tarball_version) == ("sources.tar.gz", "2.22.3")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"torch": "2.13.0+cu130"}, "→ --torch 2.13.0"),
        ({"nccl": "2.21.5-1+cuda12.4"}, "→ --nccl 2.21.5"),
        ({"nccl": "newest"}, "not a version"),
        ({"openmpi_version": "4.1."}, "not a version"),
        ({"torch_index": "banana"}, "--torch-index banana: not a URL"),
        ({"index_url": "https:///simple"}, "not a URL"),
    ],
)
def test_invalid_versions_and_urls(given: dict[str, str], said: str) -> None:
    assert said in refused(**given)


def test_valid_versions_and_urls() -> None:
    made = options.requirements(torch="2.13.0", torch_index="file:///srv/simple", index_url="https://me:secret@index.example/simple")
    assert (made.torch_version, made.torch_index) == ("2.13.0", "file:///srv/simple")
