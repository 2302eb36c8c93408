"""The role that builds on one host for all of its kind, run by real Ansible as several hosts: who builds when one cannot."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from provision.base import resources
from provision.install import from_source
from provision.install.builds import Build, Shares
from provision.remote import ansible
from provision.remote.ansible import Event, Outcome

# A host whose folder holds `cannot` cannot build; it notes each try. What is installed says who built it.
CONFIGURE = """#!/bin/sh
for word; do case $word in --prefix=*) prefix=${word#--prefix=} ;; esac; done
home=$(dirname "$prefix")
echo tried >> "$home/tries"
test ! -e "$home/cannot" || { echo "configure: error: $(cat "$home/cannot")" >&2; exit 1; }
printf 'all:\\ninstall:\\n\\tmkdir -p $(DESTDIR)%s\\n\\techo %s > $(DESTDIR)%s/builder\\n' "$prefix" "${home##*/}" "$prefix" > Makefile
"""
GOOD, BAD = "thing-1.0-good", "thing-1.0-bad"
SHARING = {GOOD: ["a", "b", "c"], BAD: ["d", "e", "f", "g"]}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, list[Event]]:
    """Two builds at once. Of the first, a cannot build and b has no room for the sources; of the second, nobody can."""
    folder = tmp_path_factory.mktemp("role")
    shutil.copytree(resources.folder("playbooks"), folder / "book")
    (folder / "handed").mkdir()
    tarball = folder / "thing.tar.gz"
    with tarfile.open(tarball, "w:gz") as tar:
        member = tarfile.TarInfo("thing-1.0/configure")
        member.size, member.mode = len(CONFIGURE.encode()), 0o755
        tar.addfile(member, io.BytesIO(CONFIGURE.encode()))
    hosts = [name for names in SHARING.values() for name in names]
    for name in hosts:
        (folder / name).mkdir()
    for name in ("a", *SHARING[BAD]):
        (folder / name / "cannot").write_text(f"no compiler on {name}")
    (folder / "b/openmpi-source").touch()  # where a folder must go
    component = {"version": "1.0", "sha256": hashlib.sha256(tarball.read_bytes()).hexdigest(), "options": []}
    part = {
        "title": "Thing",
        "homes": {name: str(folder / name / "openmpi") for name in hosts},
        "folder": str(folder / "handed"),
        "tarball": str(tarball),
        "make": [],
        "words": {},
        "taken": [],
        "job_mb": 1,
        "build_of": {name: key for key, names in SHARING.items() for name in names},
        "builds": {key: {"hosts": names, "builders": names, "sha256": ""} for key, names in SHARING.items()},
    }
    plans = {
        name: {"prefix": str(folder / name), "interpreter": sys.executable, "system": "debian 12", "arch": "x86_64", "openmpi": component}
        for name in hosts
    }
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "plans": plans,
        "host_plan": "{{ plans[inventory_hostname] }}",
        "provision_from_source": {"openmpi": part, "nccl": {"build_of": {}}},
    }
    book = folder / "book/one.yml"
    book.write_text(json.dumps([{"name": "Test", "hosts": "all", "gather_facts": False, "vars": variables, "roles": ["from_source"]}]))
    events: list[Event] = []
    outcome = ansible.run(ansible.Play(book), ",".join(hosts) + ",", workdir=folder / "run", run_id="unit", on_event=events.append)
    return folder, outcome, events


@pytest.mark.slow
def test_another_host_takes_over_and_the_one_that_could_not_build_gets_the_result(played: tuple[Path, Outcome, list[Event]]) -> None:
    folder, outcome, events = played
    assert outcome.hosts["a"].failure is None
    for name in ("a", "c"):
        assert (folder / name / "openmpi/builder").read_text() == "c\n"
    assert [event.text.splitlines()[1] for event in events if event.kind == "tolerated" and event.host == "a"] == [
        "configure: error: no compiler on a"
    ]
    assert not (folder / "c/openmpi-source").exists()
    assert [path.name for path in (folder / "a/openmpi-source").iterdir()] == [f"{GOOD}.tar.gz.log"]
    assert (folder / "a/openmpi-source").stat().st_mode & 0o777 == 0o711, "every user could hold the build's lock, or change its sources"


@pytest.mark.slow
def test_a_host_that_fails_before_it_can_build_stops_nobody_else(played: tuple[Path, Outcome, list[Event]]) -> None:
    folder, outcome, _ = played
    assert set(outcome.failed) == {"b", *SHARING[BAD]}
    failure = outcome.hosts["b"].failure
    assert failure is not None
    assert failure.task == "Create a folder for the build"
    assert not (folder / "b/tries").exists()


@pytest.mark.slow
def test_sources_that_no_host_can_build_are_tried_on_three_hosts_and_no_more(played: tuple[Path, Outcome, list[Event]]) -> None:
    folder, outcome, _ = played
    assert [(folder / name / "tries").exists() for name in SHARING[BAD]] == [True, True, True, False]
    said = {name: outcome.hosts[name].failure for name in SHARING[BAD]}
    assert all(event is not None and event.task == "Stop without a build" for event in said.values())
    assert "no compiler on e" in said["e"].text  # type: ignore[union-attr]
    assert said["g"].text == "no host could build Thing 1.0 for debian 12 on x86_64: see d, e, f"  # type: ignore[union-attr]


def test_who_stepped_in_for_whom_is_told_with_the_reason() -> None:
    made: dict[str, Build] = {GOOD: {"builders": ["a", "b", "c"]}, BAD: {"builders": ["d", "e"]}}
    parts: dict[str, Shares] = {"Thing": {"folder": "", "build_of": {}, "builds": made}}
    (line,) = from_source.fallbacks(parts, {GOOD: "c", BAD: "d"}, {(GOOD, "a"): "configure: error: no compiler"})
    assert line == (
        "Thing (thing-1.0-good) was built on c, because a and b could not: a: configure: error: no compiler; b: it had failed before"
    )
