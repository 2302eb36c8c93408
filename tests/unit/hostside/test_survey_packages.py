"""The survey's reading of packages and of provision's own files, below a root folder of the test."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from survey_module import machine, sentences, survey


def test_packages_by_dpkgs_three_letters() -> None:
    text = "libnccl2\t2.18.3-1+cuda12.2\thi \nhwloc\t2.9.0-1\tii \ng++\t4:12.2.0-3\tiF \nold\t1\trc \nbash\t5.2\tii \nbad\t1\tiiR\n"
    found, held, broken = survey.classified([line.split("\t") for line in text.splitlines()])
    assert found == {"libnccl2": "2.18.3-1+cuda12.2", "hwloc": "2.9.0-1"}
    assert held == ["libnccl2"]
    assert broken == ["bad", "g++"]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds apt's front-end lock, as apt does."""
    lock = tmp_path / "var/lib/dpkg/lock-frontend"
    lock.parent.mkdir(parents=True)
    lock.touch()
    code = f"import fcntl,sys;f=open({str(lock)!r},'w');fcntl.lockf(f,fcntl.LOCK_EX);print('held',flush=True);sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        assert process.stdin
        process.stdin.close()


def test_the_holder_of_apts_lock_is_named(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    host = machine(tmp_path, {"/proc/locks": Path("/proc/locks").read_text(), "/var/lib/dpkg/lock": ""})
    assert survey.lock_owner(host, "/var/lib/dpkg/lock-frontend") == holder.pid
    assert survey.lock_owner(host, "/var/lib/dpkg/lock") is None
    assert survey.lock_owner(host, "/var/lib/apt/lists/lock") is None


OURS = "/etc/apt/sources.list.d/cuda-ubuntu2204-x86_64.list"

NVIDIAS = "https://nvidia.example/ubuntu2204/x86_64"

MIRROR = "https://mirror.corp.example/cuda"

MADISON = f"""
  libnccl2 | 2.31.2-1+cuda12.9 | {NVIDIAS}  Packages
  libnccl2 | 2.29.7-1+cuda12.9 | {NVIDIAS}  Packages
  libnccl2 | 2.29.7-1+cuda12.9 | {MIRROR}  Packages
  libnccl2 | 2.21.5-1+cuda12.4 | file:/var/nccl-local-repo-ubuntu2204-2.21.5-cuda12.4  Packages
libnccl-dev | 2.29.7-1+cuda12.9 | {MIRROR}  Packages
     cmake | 3.22.1-1ubuntu1 | http://archive.ubuntu.com/ubuntu jammy/main amd64 Packages
"""

ALL = ["2.31.2-1+cuda12.9", "2.29.7-1+cuda12.9"]


@pytest.mark.parametrize(
    ("files", "libnccl2"),
    [
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n"}, ALL[1:]),
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n", "/etc/apt/sources.list": f"# deb {NVIDIAS}/ /\n"}, ALL[1:]),
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n", "/etc/apt/sources.list.d/x.sources": f"Types: deb\nURIs: {NVIDIAS}\n"}, ALL),
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n", "/etc/apt/sources.list.d/cuda.list.save": f"deb {NVIDIAS}/ /\n"}, ALL[1:]),
    ],
    ids=["ours alone", "the other is commented out", "another names it, too", "apt does not read the other"],
)
def test_candidates_of_our_own_list_are_not_third_party(tmp_path: Path, files: dict[str, str], libnccl2: list[str]) -> None:
    host = on_apt(tmp_path, files, record=[OURS])
    assert survey.candidates(host)["libnccl2"] == [*ALL, "2.21.5-1+cuda12.4"]
    assert survey.candidates_elsewhere(host) == {"libnccl2": libnccl2, "libnccl-dev": ALL[1:]}


def test_without_a_list_of_ours_all_candidates_of_a_network_are_third_party(tmp_path: Path) -> None:
    host = on_apt(tmp_path, {OURS: f"deb {NVIDIAS}/ /\n"}, record=[])
    assert survey.candidates_elsewhere(host)["libnccl2"] == ALL


def test_dnf_repositories_of_ours_are_known_by_name(tmp_path: Path) -> None:
    listing = """Available Packages
libnccl.x86_64        2.29.7-1+cuda12.9     corp-cuda
libnccl.x86_64        2.31.2-1+cuda12.9     cuda-rhel9-x86_64
cmake.x86_64          3.26.5-2.el9          appstream
"""
    noted = json.dumps({"files": {"/etc/yum.repos.d/cuda-rhel9-x86_64.repo": {}}})
    host = machine(tmp_path, {"/opt/provision/record.json": noted}, prefix="/opt/provision")
    host.which = {"dnf": "/usr/bin/dnf"}.get
    host.run = lambda _words: (0, listing, "")
    assert survey.candidates_elsewhere(host) == {"libnccl": ["2.29.7-1+cuda12.9"]}


def on_apt(tmp_path: Path, files: dict[str, str], *, record: list[str]) -> Any:
    noted = json.dumps({"files": {path: {"path": path} for path in record}})
    host = machine(tmp_path, {**files, "/opt/provision/record.json": noted}, prefix="/opt/provision")
    host.which = {"apt-cache": "/usr/bin/apt-cache"}.get
    host.run = lambda _words: (0, MADISON, "")
    return host


def test_missing_and_changed_files_are_drift_unless_unwanted(tmp_path: Path) -> None:
    entry = {"marker": None, "sha256": ["0" * 64], "made": True}
    files = {path: {**entry, "path": path} for path in ("/gone", "/changed", "/unwanted", "/unwanted-and-gone")}
    for path in ("/unwanted", "/unwanted-and-gone"):
        files[path]["unwanted"] = True
    told = machine(tmp_path, {"/record.json": json.dumps({"files": files}), "/changed": "other", "/unwanted": "other"})
    assert sentences(survey.changed_files(told, "/record.json")) == ["/gone is gone", "/changed was changed"]


def test_a_block_of_another_cluster_is_not_missed(tmp_path: Path) -> None:
    files = {
        cluster: {"path": "/authorized_keys", "marker": f"# {{mark}} provision {cluster}", "sha256": ["0" * 64], "made": False}
        for cluster in ("ours", "theirs")
    }
    told = machine(tmp_path, {"/record.json": json.dumps({"files": files}), "/authorized_keys": "a key\n"})
    assert sentences(survey.changed_files(told, "/record.json", "ours")) == ["/authorized_keys is gone"]
    assert sentences(survey.changed_files(told, "/record.json", "another")) == []


def test_keys_are_compared_byte_by_byte(tmp_path: Path) -> None:
    key, block = b"\x99\x01\x8d\xff binary", "ours \u00e4\n"
    mark = "# {mark} provision"
    files = {
        "/key.gpg": {"path": "/key.gpg", "marker": None, "sha256": [hashlib.sha256(key).hexdigest()]},
        "/shared": {"path": "/shared", "marker": mark, "sha256": [hashlib.sha256(block.encode()).hexdigest()]},
    }
    told = machine(tmp_path, {"/record.json": json.dumps({"files": files}), "/shared": f"# BEGIN provision\n{block}# END provision\n"})
    (tmp_path / "key.gpg").write_bytes(key)
    assert sentences(survey.changed_files(told, "/record.json")) == []
    (tmp_path / "key.gpg").write_bytes(key.replace(b"\xff", b"\xfe"))
    assert sentences(survey.changed_files(told, "/record.json")) == ["/key.gpg was changed"]


@pytest.mark.parametrize(
    ("files", "options", "elsewhere"),
    [
        ({"/opt/provision/record.json": "{}"}, {}, []),
        ({"/opt/provision/record.json": "{}"}, {"prefix": "/data/p"}, ["/opt/provision"]),
        ({"HOME/provision/record.json": "{}", "/opt/provision/venv/x": ""}, {"prefix": "/data/p"}, ["HOME/provision"]),
        ({"/opt/provision/record.json": "{}"}, {"prefix": "HOME/provision"}, ["/opt/provision"]),
    ],
)
def test_installations_under_another_prefix_are_found(
    tmp_path: Path, files: dict[str, str], options: dict[str, str], elsewhere: list[str]
) -> None:
    named = {path.replace("HOME", "/home/ann"): text for path, text in files.items()}
    host = machine(tmp_path, named, **{name: value.replace("HOME", "/home/ann") for name, value in options.items()})
    host.home = "/home/ann"
    host.privileges = lambda: {"can_become": True}
    assert survey.installed(host)["elsewhere"] == [path.replace("HOME", "/home/ann") for path in elsewhere]
