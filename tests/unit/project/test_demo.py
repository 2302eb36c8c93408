"""`make demo` changes nothing but its throw-away hosts or its own folder, unless other hosts are named to it, and says which it took."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from provision import inventory

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def demo(tmp_path: Path):
    """Runs `make demo` with a `provision` that notes how it is called and with which state folder; `check`: what can run hosts,
    `up`: what the command that makes them does.

    (what make ended with, the calls)
    """
    program = tmp_path / "provision"
    stamp = tmp_path / "toolkit"
    stamp.touch()

    def run(
        *words: str, check: str = "", up: str = "echo /two/hosts.ini", **environment: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        answer = f"echo {check!r}" if check else "echo 'no engine answers' >&2; exit 1"
        program.write_text(
            f"""#!/bin/sh
echo "$* $PROVISION_HOME" >> {tmp_path}/calls
case "$*" in
"sandbox check") {answer} ;;
"sandbox up"*) {up} ;;
esac
"""
        )
        program.chmod(0o755)
        command = ["make", f"--old-file={stamp}", f"TOOLKIT_STAMP={stamp}", f"BIN={tmp_path}", f"DEMO={tmp_path}/demo", "demo", *words]
        env = {**os.environ, "PROVISION_HOME": "", "PIP_FIND_LINKS": "", **environment}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done, [call.strip() for call in (tmp_path / "calls").read_text().splitlines()]

    return run


@pytest.mark.parametrize("check", ["containers: a container engine answers", "namespaces of this machine: no container engine answers"])
@pytest.mark.parametrize("environment", [{}, {"HOSTS": "localhost"}], ids=["nothing is named", "a variable of the shell is no requirement"])
def test_it_installs_on_two_throw_away_hosts_and_says_of_which_kind(demo, check: str, environment: dict[str, str]) -> None:
    done, calls = demo(check=check, **environment)
    assert done.returncode == 0, done.stderr
    assert calls == ["sandbox check", "sandbox up -n 2", "up /two/hosts.ini"]
    assert f"demo: two throw-away hosts in {check}" in done.stdout


def test_where_no_host_can_be_made_it_installs_without_root_in_a_folder_of_its_own(demo, tmp_path: Path) -> None:
    done, calls = demo()
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "demo"
    assert calls == ["sandbox check", f"up {folder}/hosts.ini {folder}/state"]
    assert "no engine answers" in done.stdout
    assert f"demo: on this machine without root, in {folder}" in done.stdout
    assert f"run {folder}/hosts.ini examples/pytorch_mnist.py" in done.stdout
    (host,) = inventory.load(str(folder / "hosts.ini")).hosts
    assert (host.name, host.connection, host.prefix, host.variables["provision_sudo"]) == ("localhost", "local", f"{folder}/prefix", "no")


def test_where_the_hosts_cannot_be_started_it_does_the_same(demo, tmp_path: Path) -> None:
    done, calls = demo(check="containers: a container engine answers", up="echo 'no image' >&2; exit 1")
    assert done.returncode == 0, done.stderr
    assert calls[2] == f"up {tmp_path}/demo/hosts.ini {tmp_path}/demo/state"
    assert "no image" in done.stderr


def test_it_takes_the_pytorch_that_is_in_a_folder_of_wheels(demo, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "torch-2.90.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    done, calls = demo(check="containers: a container engine answers", PIP_FIND_LINKS=str(tmp_path / "wheels"))
    assert calls[-1] == "up /two/hosts.ini --torch 2.90.0"
    assert "demo: PyTorch 2.90.0, of which" in done.stdout


def test_ctrl_c_ends_it(demo) -> None:
    done, calls = demo(check="containers: a container engine answers", up="exit 130")
    assert done.returncode != 0
    assert calls == ["sandbox check", "sandbox up -n 2"]


def test_hosts_that_are_named_are_what_it_installs_on(demo) -> None:
    done, calls = demo("HOSTS=localhost")
    assert (done.returncode, calls) == (0, ["up localhost"]), done.stderr
