"""Which system packages are ours: what installations bring, also those that fail or are cut off while the host's owner installs others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from loading import load, load_ansible_module
from test_remove_script import ROOT

BARE = ["bash", "libc6"]


@pytest.fixture(scope="module")
def owned() -> Any:
    return load_ansible_module("host_record")


def noted(owned: Any, *steps: tuple[Any, ...]) -> dict[str, Any]:
    """The record's packages after ``(state, installed packages, asked)`` one after the other."""
    packages = {"added": [], "before": None}  # as versions before `asked` wrote it
    for state, now, *asked in steps:
        packages = owned.packages_entry({**owned.host_record.EMPTY["packages"], **packages}, state, now, *(asked or [[]]))
    return packages


def test_what_comes_after_a_failed_installation_is_not_ours(owned: Any) -> None:
    packages = noted(
        owned,
        ("before", BARE, ["g++"]),
        ("after", [*BARE, "cpp"]),  # failed half way
        ("closed", [*BARE, "cpp", "nginx", "linux-image-6.9"]),
        ("before", [*BARE, "cpp", "nginx", "linux-image-6.9"], ["g++"]),
        ("after", [*BARE, "cpp", "nginx", "linux-image-6.9", "g++"]),
    )
    assert (packages["added"], packages["unsure"]) == (["cpp", "g++"], [])


def test_what_is_new_since_an_installation_was_cut_off_is_unsure(owned: Any) -> None:
    for next_run in ("before", "closed"):
        packages = noted(owned, ("before", BARE, ["g++"]), (next_run, [*BARE, "g++", "nginx"]), ("after", [*BARE, "g++", "nginx", "make"]))
        assert packages["unsure"] == ["g++", "nginx"]
        assert packages["asked"] == ["g++"]
        assert packages["added"] == (["make"] if next_run == "before" else [])


def database(folder: Path, packages: dict[str, dict[str, str]]) -> None:
    """A package database for the real dpkg-query."""
    folder.mkdir()
    stanzas = []
    for name, fields in packages.items():
        lines = {"Package": name, "Status": "install ok installed", "Architecture": "all", "Version": "1", **fields}
        lines.update(Maintainer="test <test@example.org>", Description="stand-in")
        stanzas.append("".join(f"{key}: {value}\n" for key, value in lines.items()))
    (folder / "status").write_text("\n".join(stanzas))


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs dpkg-query; the integration tests cover it too")
def test_of_a_cut_off_installation_only_what_it_asked_for_and_what_nothing_else_needs_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remover = load("hostside_remove", ROOT / "provision/hostside/remove.py")
    database(
        tmp_path / "dpkg",
        {
            "bash": {"Depends": "libupgraded (>= 1)", "Recommends": "cpp"},
            "g++": {"Depends": "cpp (>= 4) | clang, c-compiler:any", "Status": "install ok unpacked"},
            "cpp": {"Depends": "libshared"},
            "gcc": {"Provides": "c-compiler (= 1)"},
            "libshared": {},
            "libupgraded": {},
            "nginx": {"Depends": "libshared", "Recommends": "nginx-extra"},
            "nginx-extra": {},
            "linux-image": {},
            "libfirst": {"Status": "install reinstreq half-installed"},
            "went": {"Status": "deinstall ok config-files"},
        },
    )
    states = tmp_path / "extended_states"
    marked = ("libfirst", "cpp", "gcc", "libshared", "libupgraded", "nginx-extra")
    states.write_text("".join(f"Package: {name}\nArchitecture: amd64\nAuto-Installed: 1\n\n" for name in marked))
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path / "dpkg"))
    monkeypatch.setattr(remover, "EXTENDED_STATES", str(states))
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"packages": {"added": [], "before": BARE, "asked": ["g++"], "unsure": []}}))
    removal = remover.Removal(str(record), None, True)
    unsure = set(removal.installed()) - {"bash"}
    assert {"nginx", "g++"} <= unsure
    assert removal.ours_among(unsure, {"g++"}) == {"g++", "cpp", "gcc"}
    monkeypatch.setattr(removal, "reachable", lambda _names: set())
    assert removal.ours_among(unsure, {"make"}) == set()
    # Cut off before what was asked for had its turn: what it needs is there already, what others need stays.
    monkeypatch.setattr(removal, "reachable", lambda names: {"libfirst", "libupgraded", "cpp"} if names == {"make"} else set())
    assert removal.ours_among(unsure, {"make", "g++"}) == {"g++", "cpp", "gcc", "libfirst"}


def tasks_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [task for entry in entries for task in [entry, *tasks_of(entry.get("block", []))]]


def test_every_installation_is_closed_also_when_it_fails() -> None:
    brackets = 0
    for book in sorted((ROOT / "playbooks/roles").rglob("tasks/*.yml")):
        tasks = tasks_of(yaml.safe_load(book.read_text()))
        states = [task["host_record"]["packages"] for task in tasks if "packages" in task.get("host_record", {})]
        blocks = [task for task in tasks if any(one.get("host_record", {}).get("packages") == "before" for one in task.get("block", []))]
        assert states.count("before") == len(blocks), book
        for block in blocks:
            assert [one["host_record"]["packages"] for one in block["always"]] == ["after"], book
        brackets += len(blocks)
    assert brackets == 3
