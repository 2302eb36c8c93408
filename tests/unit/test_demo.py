"""`make demo` changes nothing but its throw-away hosts, unless other hosts are named to it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(tmp_path: Path):
    """Runs `make demo` with a `provision` that notes how it is called; no container engine answers it. (what make ended with, the calls)"""
    program = tmp_path / "provision"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ "$1" = up ] || {{ echo "no engine answers" >&2; exit 1; }}\n')
    program.chmod(0o755)
    stamp = tmp_path / "toolkit"
    stamp.touch()

    def run(*words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        command = ["make", f"--old-file={stamp}", f"TOOLKIT_STAMP={stamp}", f"BIN={tmp_path}", "demo", *words]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False)
        return done, (tmp_path / "calls").read_text().splitlines()

    return run


@pytest.mark.parametrize("environment", [{}, {"HOSTS": "localhost"}], ids=["nothing is said", "a variable of the shell is no requirement"])
def test_without_a_container_engine_it_installs_nowhere_and_says_what_to_do(demo, environment: dict[str, str]) -> None:
    done, calls = demo(**environment)
    assert done.returncode != 0
    assert calls == ["sandbox check"]
    assert "no engine answers" in done.stderr
    assert "make demo HOSTS=localhost" in done.stderr


def test_hosts_that_are_named_are_what_it_installs_on(demo) -> None:
    done, calls = demo("HOSTS=localhost")
    assert (done.returncode, calls) == (0, ["up localhost"]), done.stderr
