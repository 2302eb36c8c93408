"""What belongs to another user of a host, or can be changed by one, is neither installed into nor removed by."""

from __future__ import annotations

import grp
import io
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import removal_order, write_record
from invented_hosts import stated
from loading import load_ansible_module, load_script, run_ansible_module
from survey_module import machine, survey

from provision.catalog import OURS
from provision.survey.document import parse_output
from provision.survey.preflight import host_problems

MALLORY = 54321
Pretend = Callable[..., None]


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("SUDO_UID", raising=False)
    return load_script("trust.py")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Give paths other owners and groups than they have, as only root could."""
    real, changes = os.lstat, {}

    def lstat(path: Any, **more: Any) -> os.stat_result:
        seen = list(real(path, **more))
        for at, value in changes.get(str(path), {}).items():
            seen[at] = value
        return os.stat_result(seen)

    monkeypatch.setattr(os, "lstat", lstat)

    def change(path: Path, **fields: int) -> None:
        changes[str(path)] = {getattr(stat, f"ST_{name.upper()}"): value for name, value in fields.items()}

    return change


def test_a_folder_of_ours_is_trusted_also_below_a_sticky_one(trust: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "shared/prefix").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "link").symlink_to("shared/prefix")
    for path in ("shared/prefix", "shared/prefix/record.json", "shared/new/deep", "link", "shared/prefix/../prefix"):
        assert trust.distrust(f"{tmp_path}/{path}") is None, path


@pytest.mark.parametrize("place", ["shared", "shared/prefix", "shared/prefix/record.json"])
def test_what_another_user_owns_is_named_with_its_owner(trust: ModuleType, pretend: Pretend, tmp_path: Path, place: str) -> None:
    (tmp_path / "shared/prefix").mkdir(parents=True)
    path = write_record(tmp_path / "shared/prefix", {})
    pretend(tmp_path / place, uid=MALLORY)
    assert trust.distrust(str(path)) == f"{tmp_path / place} belongs to {MALLORY}"


def test_without_root_in_the_user_namespace_only_what_is_above_may_be_nobodys(
    trust: ModuleType, pretend: Pretend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert trust.unmapped_root() == set(), "root is known here"
    monkeypatch.setattr(trust, "unmapped_root", lambda: {MALLORY})
    (tmp_path / "home/prefix").mkdir(parents=True)
    pretend(tmp_path / "home", uid=MALLORY)
    assert trust.distrust(f"{tmp_path}/home/prefix") is None
    pretend(tmp_path / "home/prefix", uid=MALLORY)
    assert trust.distrust(f"{tmp_path}/home/prefix") == f"{tmp_path}/home/prefix belongs to {MALLORY}"


def test_a_link_of_another_user_is_refused_wherever_it_leads(trust: ModuleType, pretend: Pretend, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "second").symlink_to("ours")
    (tmp_path / "first").symlink_to(tmp_path / "second")
    assert trust.distrust(f"{tmp_path}/first/prefix") is None
    pretend(tmp_path / "second", uid=MALLORY)
    assert trust.distrust(f"{tmp_path}/first/prefix") == f"{tmp_path}/second belongs to {MALLORY}"
    (tmp_path / "second").unlink()
    (tmp_path / "second").symlink_to("first")
    assert trust.distrust(f"{tmp_path}/first/prefix") is None, "links that lead to each other: nothing can be made there"


@pytest.mark.parametrize(("place", "mode", "who"), [("above", 0o777, "every user"), ("above/prefix", 0o1777, "every user")])
def test_what_every_user_can_write_is_refused(trust: ModuleType, tmp_path: Path, place: str, mode: int, who: str) -> None:
    (tmp_path / "above/prefix").mkdir(parents=True)
    (tmp_path / place).chmod(mode)
    assert trust.distrust(f"{tmp_path}/above/prefix") == f"{tmp_path}/{place} can be written by {who}"


def test_a_group_of_others_is_refused_and_the_users_own_is_not(
    trust: ModuleType, pretend: Pretend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o775)
    monkeypatch.setattr(trust, "trusted_users", lambda: {0, 1000, os.geteuid()})
    monkeypatch.setattr(trust.pwd, "getpwuid", {0: ["root"], 1000: ["ann"], os.geteuid(): ["root"]}.__getitem__)
    monkeypatch.setattr(trust.pwd, "getpwall", lambda: [pwd.struct_passwd(("eve", "x", 2000, 60, "", "/", "/bin/sh"))])
    groups = [(1000, "ann", ["ann"]), (1001, "ann", ["ann", "bob"]), (1002, "lab", ["ann"])]
    groups += [(50, "staff", []), (51, "staff", ["bob"]), (60, "games", [])]  # of Debian's /usr/local; the last one is eve's
    for gid, name, members in groups:
        pretend(tmp_path, gid=gid, uid=1000)
        group = grp.struct_group((name, "x", gid, members))
        monkeypatch.setattr(trust.grp, "getgrgid", lambda _gid, group=group: group)
        assert trust.distrust(str(tmp_path)) == (None if gid in (1000, 50) else f"{tmp_path} can be written by group {name}")


def test_users_and_groups_without_names_are_told_by_their_numbers(trust: ModuleType, pretend: Pretend, tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    pretend(tmp_path, gid=MALLORY)
    assert trust.distrust(str(tmp_path)) == f"{tmp_path} can be written by group {MALLORY}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "trusted_users", lambda: {0, MALLORY, os.geteuid()})
        assert trust.distrust(str(tmp_path)) is None, "the user's own, as in a container that knows neither"


def test_who_ran_sudo_is_trusted_by_root_alone(trust: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "1234")
    for own, trusted in ((0, {0, 1234}), (999, {0, 999})):
        monkeypatch.setattr(os, "geteuid", lambda own=own: own)
        assert trust.trusted_users() == trusted


RECORDS: list[dict[str, Any]] = [
    {"contents": ["../../etc"]},
    {"contents": ["venv", ".."]},
    {"contents": ["/etc"]},
    {"contents": ["a\n/../b/.."]},
    {"claimed": ["etc/passwd"]},
    {"claimed": ["/opt/provision/../../etc/passwd"]},
    {"claimed": ["/etc/.."]},
    {"files": {"x": {"path": "/opt/../etc/passwd", "marker": None, "sha256": [], "made": True}}},
    {"held": ["--force"]},
    {"packages": {"added": ["-o=Dpkg::Pre-Invoke::=id"], "before": None}},
    {"packages": {"added": [], "before": None, "unsure": ["a b"]}},
]


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_a_record_that_names_what_no_run_of_ours_records_removes_nothing(record: dict[str, Any], tmp_path: Path) -> None:
    remover, opener = load_script("remove.py"), load_ansible_module("host_record")
    (tmp_path / "victim").mkdir()
    path = write_record(tmp_path, {"contents": ["victim"], "claimed": []} | record)
    with pytest.raises(RuntimeError, match="nothing is removed, because the record names"):
        remover.Removal(str(path), str(tmp_path), dry_run=False)
    assert "which is not ours to remove" in opener.refusal(str(tmp_path), [])


def test_what_our_runs_record_is_removed(trust: ModuleType) -> None:
    record = {
        "contents": ["venv", "openmpi.provision-new", "..data"],
        "claimed": ["/opt/provision", "/home/ann/.ssh/provision_ed25519.pub", "/a/...b"],
        "files": {"x": {"path": "/etc/ld.so.conf.d/00-provision.conf"}},
        "held": ["libnccl2"],
        "packages": {"added": ["g++:amd64", "libstdc++6", "python3.11", "0ad"], "asked": ["gcc-c++"], "unsure": []},
    }
    assert trust.invalid_name(record) is None
    assert trust.invalid_name({}) is None


@pytest.mark.parametrize("dry_run", [True, False])
def test_nothing_is_removed_by_a_record_that_another_user_could_have_written(
    pretend: Pretend, tmp_path: Path, dry_run: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remover = load_script("remove.py")
    (tmp_path / "prefix/venv").mkdir(parents=True)
    (tmp_path / "canary").touch()
    path = write_record(tmp_path / "prefix", {"contents": ["venv"], "claimed": [str(tmp_path / "canary")]})
    pretend(tmp_path / "prefix", uid=MALLORY)
    order = removal_order(tmp_path / "lock", str(path), str(path.parent), dry_run=dry_run)
    monkeypatch.setattr("sys.stdin", io.StringIO(order))
    monkeypatch.setattr(remover, "remove_abandoned", lambda _dry_run: [])
    remover.main()
    answer = parse_output(capsys.readouterr().out, remover.BEGIN, "the removal")
    assert f"{path.parent} belongs to {MALLORY}" in answer["error"]
    assert answer["removed"] == []
    assert (path.parent / "venv").exists()
    assert (tmp_path / "canary").exists()


def test_a_prefix_that_another_user_makes_first_is_refused_before_anything_is_written(
    pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, real = tmp_path / "prefix", os.makedirs

    def slower(path: Any, **more: Any) -> None:
        real(path, exist_ok=True)  # Mallory's
        pretend(prefix, uid=MALLORY)
        real(path, **more)

    monkeypatch.setattr(os, "makedirs", slower)
    arguments = {"record": str(prefix / "record.json"), "prefix": str(prefix), "contents": ["venv"]}
    answer = run_ansible_module("host_record", arguments)
    assert f"{prefix} belongs to {MALLORY}" in answer["msg"]
    assert list(prefix.iterdir()) == []


def test_the_survey_reports_it_before_anything_is_changed(pretend: Pretend, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    host = machine(tmp_path, prefix="/prefix")
    assert survey.installed(host)["distrust"] is None
    os.mkfifo(prefix / "manifest.json")  # whose reader would wait
    pretend(prefix, uid=MALLORY)
    found = stated({"installed": {"distrust": survey.installed(host)["distrust"]}})
    (problem,) = [each for each in host_problems("a", found, OURS, needed_mb=0, prefix="/prefix") if each.id == "prefix-of-another-user"]
    assert (problem.severity, problem.host) == ("error", "a")
    assert f"{prefix} belongs to {MALLORY}" in problem.what
