"""Which system packages are ours: also after installations that failed or were interrupted while the host's owner installed others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from loading import load_ansible_module, load_script

ROOT = Path(__file__).parents[3]

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


@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt; the integration tests cover it too")
@pytest.mark.parametrize(
    ("ours", "unsure", "going"),
    [
        ({"g++", "cpp", "gcc"}, set(), {"g++", "cpp"}),
        # Interrupted: what apt installed for g++ and nothing else needs goes, what others have installed since stays.
        ({"g++"}, {"cpp", "gcc", "libshared", "libupgraded", "nginx", "nginx-extra", "linux-image"}, {"g++", "cpp"}),
    ],
)
def test_packages_go_that_we_have_installed_and_no_other_package_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: set[str], unsure: set[str], going: set[str]
) -> None:
    remover = load_script("remove.py")
    database(
        tmp_path / "dpkg",
        {
            "bash": {"Depends": "libupgraded (>= 1)"} | ({} if unsure else {"Recommends": "cpp"}),
            "g++": {"Depends": "cpp | clang, c-compiler"},
            "cpp": {"Depends": "libshared"},
            "gcc": {"Provides": "c-compiler (= 1)"},
            "own": {"Depends": "gcc"},
            "libshared": {},
            "libupgraded": {},
            "nginx": {"Depends": "libshared", "Recommends": "nginx-extra"},
            "nginx-extra": {},
            "linux-image": {},
            "went": {"Status": "deinstall ok config-files"},
        },
    )
    states, settings = tmp_path / "extended_states", tmp_path / "apt.conf"
    marked = ("cpp", "gcc", "libshared", "libupgraded", "nginx-extra")
    states.write_text("".join(f"Package: {name}\nArchitecture: amd64\nAuto-Installed: 1\n\n" for name in marked))
    settings.write_text(f"""
        Dir::State "{tmp_path}"; Dir::State::status "{tmp_path}/dpkg/status"; Dir::State::extended_states "{states}";
        Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache ""; Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "/dev/null";
    """)
    before = states.read_text()
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path / "dpkg"))
    monkeypatch.setenv("APT_CONFIG", str(settings))
    monkeypatch.setattr(remover, "EXTENDED_STATES", str(states))
    record = tmp_path / "record.json"
    record.write_text("{}")
    removal = remover.Removal(str(record), None, True)
    assert removal.plan_with_apt(ours, unsure, None) == going
    assert states.read_text() == before


def tasks_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [task for entry in entries for task in [entry, *tasks_of(entry.get("block", []))]]


def test_every_installation_is_closed_also_when_it_fails() -> None:
    installations = 0
    for book in sorted((ROOT / "playbooks/roles").rglob("tasks/*.yml")):
        tasks = tasks_of(yaml.safe_load(book.read_text()))
        states = [task["host_record"]["packages"] for task in tasks if "packages" in task.get("host_record", {})]
        closing = [one["host_record"]["packages"] for task in tasks for one in task.get("always", [])]
        assert closing == ["after"] * len([state for state in states if "before" in state]), book
        installations += len(closing)
    assert installations == 3
