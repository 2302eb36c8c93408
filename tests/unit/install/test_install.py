"""What hosts say must not become part of the playbook that runs on the controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rendered import variables_in
from typer.testing import CliRunner

from provision.cli.main import app

PLAY = "- name: 12 not ours\n  hosts: localhost\n  tasks:\n    - ansible.builtin.command: id\n#"


@pytest.mark.parametrize("line_end", ["\n", "\r", "\x85", "\u2028"])
def test_a_version_with_a_play_in_it_stays_a_comment(tmp_path: Path, line_end: str) -> None:
    version = line_end.join(["2.99.9-1+cuda12.4", *PLAY.splitlines()])
    host = {
        "os": {"id": "ubuntu", "version": "22.04"},
        "arch": "x86_64",
        "driver": {"version": "550.54.14", "cuda": "12.4"},
        "gpus": [{"name": "A", "compute_capability": "8.0"}],
        "candidates": {"libnccl2": [version, "2.21.5-1+cuda12.4"]},
        "network": {"interfaces": [{"name": "eth0", "addresses": ["10.0.0.1/24"], "up": True}]},
    }
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"schema": 1, "hosts": {"a": host}}))
    made = tmp_path / "made"
    done = CliRunner().invoke(app, ["plan", "--facts", str(file), "--nccl", "wheel", "--out", str(made)])
    if done.exit_code == 0:
        plays = yaml.safe_load((made / "site.yml").read_text())
        assert [play["name"] for play in plays if "not ours" in play["name"]] == []
        assert all(play["hosts"] != "localhost" for play in plays)
    else:
        assert "Traceback" not in done.output
        assert done.exit_code == 2


INDEX = "https://me:sec@ret@index.example/simple"
BARE = {"os": {"id": "debian", "version": "12"}, "arch": "x86_64"}


@pytest.mark.parametrize("words", [["--json"], []])
def test_the_login_of_an_index_is_in_the_variables_alone_which_only_the_user_reads(tmp_path: Path, words: list[str]) -> None:
    facts, made = tmp_path / "facts.json", tmp_path / "made"
    facts.write_text(json.dumps({"schema": 1, "hosts": {"a": BARE}}))
    made.mkdir()
    (made / "vars.json").write_text("{}")
    (made / "vars.json").chmod(0o644)
    done = CliRunner().invoke(app, ["plan", "--facts", str(facts), "--index-url", "torch=" + INDEX, "--out", str(made), *words])
    assert done.exit_code == 0, done.output
    assert "ret@" not in done.output
    assert not words or "https://index.example/simple" in done.output
    variables = variables_in(made / "vars.json")
    assert variables["provision_plan"]["hosts"]["a"]["torch"]["index"] == INDEX
    assert variables["provision_manifests"]["a"]["host"]["torch"]["index"] == "https://index.example/simple"
    assert (made / "vars.json").stat().st_mode & 0o777 == 0o600
    others = [path for path in made.rglob("*") if path.is_file() and path.name != "vars.json"]
    assert [path for path in others if b"ret@" in path.read_bytes()] == []


def test_no_play_is_root_where_root_is_not_to_be_had() -> None:
    root = Path(__file__).parents[3] / "playbooks"
    said = {
        (book.name, line.partition("ansible_become:")[2].strip())
        for book in [*root.glob("*.yml"), root / "site.yml.j2", *root.glob("roles/*/tasks/*.yml")]
        for line in book.read_text().splitlines()
        if "ansible_become:" in line
    }
    assert "true" not in {value for _, value in said}
    for book in root.glob("*.yml"):
        for play in yaml.safe_load(book.read_text()):
            if "hosts" in play:  # else a task that plays include
                assert play["become"] is False or "ansible_become" in play["vars"], book
