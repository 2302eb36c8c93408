"""What is said of a known error that has ended a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision import inventory as inventories
from provision.launch import known_error
from provision.launch.launchers import RunOptions
from provision.launch.rank_output import RankTraceback
from provision.remote.progress import Progress
from provision.remote.session import Session

NO_TIMM = "ModuleNotFoundError: No module named 'timm'"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    return Session(inventories.load("localhost"), Progress(), {})


def explained(session: Session, folder: Path, error: str, **options: object) -> list[str]:
    command = ("python", str(folder / "train.py"))
    return known_error.explained(RankTraceback(1, [error]), folder / "run.log", session, RunOptions(command, **options))  # type: ignore[arg-type]


def test_the_list_of_packages_next_to_the_program_is_named(session: Session, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert any("--env requirements.txt" in line for line in explained(session, tmp_path, NO_TIMM))
    (tmp_path / "pyproject.toml").touch()
    assert any(f"--env {tmp_path}/pyproject.toml" in line for line in explained(session, tmp_path, NO_TIMM))
    assert not any("--env" in line for line in explained(session, tmp_path, NO_TIMM, project=tmp_path / "uv.lock")), "it lacks the package"


def test_an_unchanged_program_for_horovod_gets_its_names(session: Session, tmp_path: Path) -> None:
    title, first, *_ = explained(session, tmp_path, "ModuleNotFoundError: No module named 'horovod'")
    assert title.endswith("[horovod-names-missing]")
    assert first.startswith("→ provision up localhost --horovod-names")


def test_without_a_traceback_the_end_of_the_log_tells(session: Session, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    assert known_error.explained(None, log, session, RunOptions(("train",))) == [], "there is no log"
    log.write_text("step 1\n" * 20_000 + "Segmentation fault (core dumped)\n")
    assert known_error.explained(None, log, session, RunOptions(("train",)))[0].endswith("[process-segfault]")


def test_nothing_is_said_of_an_error_of_the_program(session: Session, tmp_path: Path) -> None:
    assert explained(session, tmp_path, "ValueError: a bad batch") == []


def test_an_error_that_the_job_has_survived_is_not_the_reason(session: Session, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("RuntimeError: CUDA out of memory. Tried to allocate 20 MiB\n" + "step 1\n" * 100 + "train.py: error: no data\n")
    assert known_error.explained(None, log, session, RunOptions(("train",))) == []


@pytest.mark.parametrize("folder", ["/root/private", "x" * 300])
def test_a_folder_that_cannot_be_looked_at_has_no_list(session: Session, tmp_path: Path, folder: str) -> None:
    found = known_error.explained(RankTraceback(1, [NO_TIMM]), tmp_path / "log", session, RunOptions(("python", f"{folder}/train.py")))
    assert any("--env requirements.txt" in line for line in found)


def test_what_is_to_be_pasted_is_quoted(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "a b; rm"
    folder.mkdir()
    (folder / "uv.lock").touch()
    (folder / "train.py").touch()
    assert any(f"--env '{folder}/uv.lock'" in line for line in explained(session, folder, NO_TIMM))
