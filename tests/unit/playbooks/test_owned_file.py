"""Files of ours on a host, several in one call: recorded before they are written, and what is removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loading import run_ansible_module


def test_one_call_writes_a_file_a_block_and_a_document_once(tmp_path: Path) -> None:
    theirs, record = tmp_path / "theirs", tmp_path / "record.json"
    theirs.write_text("first line\n")
    theirs.chmod(0o640)
    files = [
        {"path": str(tmp_path / "ours"), "content": "x\n", "mode": "0600"},
        {"path": str(theirs), "content": "block\n", "marker": "# {mark} us"},
        {"path": str(tmp_path / "document"), "content": {"b": [1], "a": None}},
    ]
    assert run_ansible_module("owned_file", {"record": str(record), "files": files}, check=True)["changed"]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    assert run_ansible_module("owned_file", {"record": str(record), "files": files})["changed"]
    assert not run_ansible_module("owned_file", {"record": str(record), "files": files})["changed"]
    assert theirs.read_text() == "first line\n# BEGIN us\nblock\n# END us\n"
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "ours", theirs)] == [0o600, 0o640]
    assert json.loads((tmp_path / "document").read_text()) == {"a": None, "b": [1]}
    made = {entry["path"]: entry["made"] for entry in json.loads(record.read_text())["files"].values()}
    assert made == {files[0]["path"]: True, str(theirs): False, files[2]["path"]: True}


def test_a_file_that_cannot_be_written_is_recorded_before(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    files = [{"path": str(tmp_path / "folder/missing/file"), "content": "x"}]
    with pytest.raises(FileNotFoundError):
        run_ansible_module("owned_file", {"record": str(tmp_path / "record.json"), "files": files})
    assert json.loads((tmp_path / "record.json").read_text())["files"].keys() == {files[0]["path"]}


@pytest.mark.parametrize("check", [True, False])
def test_files_folders_and_links_are_removed_and_what_a_link_leads_to_stays(tmp_path: Path, check: bool) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "folder/inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    absent = [str(tmp_path / name) for name in ("folder", "file", "link", "never-there")]
    arguments: dict[str, Any] = {"absent": absent}
    assert run_ansible_module("owned_file", arguments, check=check)["changed"]
    assert (sorted(path.name for path in tmp_path.iterdir()) == ["kept"]) is not check
    assert run_ansible_module("owned_file", arguments, check=check)["changed"] is check
