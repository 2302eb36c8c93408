"""What `provision remove` does to files on a host, by a record as the installing modules keep it. Packages need a real host."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(path: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def owned() -> Any:
    sys.modules["ansible.module_utils.host_record"] = load("playbooks/module_utils/host_record.py", "ansible.module_utils.host_record")
    import ansible.module_utils

    ansible.module_utils.host_record = sys.modules["ansible.module_utils.host_record"]
    return load("playbooks/library/owned_file.py", "owned_file")


@pytest.fixture(scope="module")
def remover() -> Any:
    return load("provision/hostside/remove.py", "hostside_remove")


def removal(remover: Any, record: Path, prefix: str | None = None, dry_run: bool = False) -> Any:
    found = remover.Removal(str(record), prefix, dry_run)
    found.all()
    return found


def write(tmp_path: Path, record: dict[str, Any]) -> Path:
    path = tmp_path / "record.json"
    empty = {"schema": 1, "files": {}, "claimed": [], "packages": {"added": [], "before": None}, "held": [], "taken_off": []}
    path.write_text(json.dumps({**empty, **record}))
    return path


def test_a_block_goes_in_and_out_of_a_shared_file_without_a_trace(owned: Any, remover: Any, tmp_path: Path) -> None:
    shared = tmp_path / "authorized_keys"
    for before in ("", "own key\n", "own key without newline", "# BEGIN provision b\nother cluster\n# END provision b\n"):
        record: dict[str, Any] = {"files": {}}
        text = owned.with_block(before, "# {mark} provision a", "ours\n")
        assert "# BEGIN provision a\nours\n# END provision a\n" in text
        owned.note(record, str(shared), "ours\n", "# {mark} provision a", exists=True)
        shared.write_text(text)
        removal(remover, write(tmp_path, record))
        assert shared.read_text() == (before if before.endswith("\n") or not before else before + "\n")


def test_a_block_is_replaced_where_it_stands(owned: Any) -> None:
    text = owned.with_block("a\n", "# {mark}", "one\n") + "z\n"
    assert owned.with_block(text, "# {mark}", "two\n") == "a\n# BEGIN\ntwo\n# END\nz\n"
    assert owned.with_block(text, "# {mark}", None) == "a\nz\n"


def test_a_changed_file_stays_and_is_named(owned: Any, remover: Any, tmp_path: Path) -> None:
    ours, changed = tmp_path / "ours", tmp_path / "changed"
    record: dict[str, Any] = {"files": {}}
    for path in (ours, changed):
        path.write_text("written\n")
        owned.note(record, str(path), "written\n", None, exists=False)
    changed.write_text("changed\n")
    done = removal(remover, write(tmp_path, record))
    assert not ours.exists()
    assert changed.read_text() == "changed\n"
    assert [entry["what"] for entry in done.left] == [str(changed)]


def test_a_write_that_did_not_happen_leaves_the_file_before_it_removable(owned: Any, remover: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("first\n")
    record: dict[str, Any] = {"files": {}}
    owned.note(record, str(path), "first\n", None, exists=False)
    owned.note(record, str(path), "second\n", None, exists=True)  # noted, and then the host died
    removal(remover, write(tmp_path, record))
    assert not path.exists()


def test_the_prefix_loses_what_is_ours_and_keeps_the_rest(owned: Any, remover: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "opt" / "provision"
    (prefix / "venv" / "etc").mkdir(parents=True)
    (prefix / "venv" / "link").symlink_to(tmp_path)
    settings = prefix / "venv" / "etc" / "params.conf"
    settings.write_text("mine now\n")
    record: dict[str, Any] = {"files": {}, "claimed": [str(prefix), str(tmp_path / "opt")]}
    owned.note(record, str(settings), "written\n", None, exists=False)
    path = prefix / "record.json"
    write(prefix, record)
    (prefix / "checkpoint.pt").write_text("mine")
    done = removal(remover, path, str(prefix))
    assert sorted(entry.name for entry in prefix.iterdir()) == ["checkpoint.pt", "venv"]
    assert [entry.name for entry in (prefix / "venv").iterdir()] == ["etc"]
    assert settings.read_text() == "mine now\n"
    assert tmp_path.exists()
    assert {Path(entry["what"]).name for entry in done.left} >= {"checkpoint.pt", "params.conf"}


def test_a_dry_run_tells_and_changes_nothing(owned: Any, remover: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("written\n")
    record: dict[str, Any] = {"files": {}}
    owned.note(record, str(path), "written\n", None, exists=False)
    done = removal(remover, write(tmp_path, record), dry_run=True)
    assert path.exists()
    assert (tmp_path / "record.json").exists()
    assert done.removed == [str(path)]


def test_only_what_was_not_there_before_is_claimed(owned: Any, tmp_path: Path) -> None:
    record: dict[str, Any] = {"claimed": []}
    owned.host_record.claim(record, str(tmp_path / "new" / "deep"))
    owned.host_record.claim(record, str(tmp_path))
    assert record["claimed"] == [str(tmp_path / "new" / "deep"), str(tmp_path / "new")]
