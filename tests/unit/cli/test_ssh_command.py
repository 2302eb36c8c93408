"""`provision ssh`: how it connects, what it runs there, and which host it takes. A fake ssh runs the command here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from status_of import end_of

from provision.cli import main

_SSH = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/argv
for command; do :; done
exec sh -c "$command"
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    program = tmp_path / "ssh"
    program.write_text(_SSH.format(folder=tmp_path))
    program.chmod(0o755)
    venv = tmp_path / "a prefix/venv/bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text("#!/bin/sh\necho the installed one\n")
    (venv / "python").chmod(0o755)
    (tmp_path / "key").write_text("")
    file = tmp_path / "hosts.ini"
    file.write_text(
        f"node1 ansible_host=10.0.0.7 ansible_port=2222 ansible_user=trainer ansible_ssh_private_key_file={tmp_path}/key "
        f"ansible_ssh_executable={program} ansible_ssh_common_args='-o ProxyJump=gate'\nnode2\n"
    )
    return file


Ssh = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch) -> Ssh:
    """What it would become runs as a process."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        started: list[list[str]] = []
        monkeypatch.setattr(os, "execvpe", lambda _program, argv, _environment: started.append(argv))
        assert end_of("ssh", *words) == 0
        return subprocess.run(started[0], input="", capture_output=True, text=True, check=False)

    return call


def test_it_connects_as_the_inventory_says_and_ends_as_the_command(hosts: Path) -> None:
    command = [sys.executable, "-m", "provision", "ssh", str(hosts), "node1", "--", "echo a  b | tr a-z A-Z; exit 7"]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "A B\n"), done.stderr
    argv = (hosts.parent / "argv").read_text().splitlines()
    said = " ".join(argv[:-1])
    for each in ("-o ProxyJump=gate", f"-i {hosts.parent}/key", "-p 2222", "-l trainer"):
        assert each in said
    assert argv[argv.index("10.0.0.7") + 1].startswith("exec /bin/sh -c ")
    assert "BatchMode" not in said, "a person can answer what ssh asks"
    assert "-t" not in argv, "there is no terminal here"


def test_python_is_the_installed_one(hosts: Path, tmp_path: Path, ssh: Ssh) -> None:
    (tmp_path / "prefix").symlink_to(tmp_path / "a prefix")
    text = hosts.read_text().replace("node1 ", f"node1 provision_prefix={tmp_path}/prefix ")
    hosts.write_text(text)
    assert ssh(str(hosts), "node1", "python").stdout == "the installed one\n"


def ran_on(hosts: Path) -> None:
    folder = hosts.parent / "home/runs/20261126-190000-abcdef"
    folder.mkdir(parents=True)
    report = {"inventory": str(hosts), "hosts": [{"host": "node1", "state": "ready"}]}
    (folder / "report.json").write_text(json.dumps(report))


def test_without_an_inventory_it_is_that_of_the_last_run(hosts: Path, ssh: Ssh) -> None:
    ran_on(hosts)
    assert ssh("node1", "echo", "here").stdout == "here\n"


def test_a_command_keeps_its_own_dashes(hosts: Path, tmp_path: Path, ssh: Ssh) -> None:
    (tmp_path / "f").write_text("-x\n-y\n")
    assert ssh(str(hosts), "node1", "grep", "--", "-x", f"{tmp_path}/f").stdout == "-x\n"
    assert ssh(str(hosts), "node1", "--", "grep", "--", "-x", f"{tmp_path}/f").stdout == "-x\n"


def test_a_host_of_the_last_run_is_no_file(hosts: Path, tmp_path: Path, ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_on(hosts)
    (tmp_path / "node1").write_text("a log\n")
    monkeypatch.chdir(tmp_path)
    assert ssh("node1", "echo", "here").stdout == "here\n"
    assert ssh("hosts.ini", "node1", "echo", "there").stdout == "there\n"


def test_what_is_written_into_a_file_comes_from_no_terminal(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ends``: those of standard input and output that are terminals."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _program, argv, _environment: started.append(argv))
    for ends, command, has_terminal in (
        ((0,), ["tar", "cz", "d"], False),
        ((0, 1), ["top"], True),
        ((1,), ["cat"], False),
        ((0,), [], True),
        ((), [], False),
    ):
        with monkeypatch.context() as here:
            here.setattr(os, "isatty", lambda end, ends=ends: end in ends)
            assert end_of("ssh", str(hosts), "node1", *command) == 0
        assert ("-t" in started[-1]) == has_terminal, (ends, command)


def test_wrong_hosts_are_named(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, what in (
        (["--hosts", str(hosts), "nod1"], "did you mean `node1`?"),
        ([str(hosts), "node3"], "its hosts are node1, node2"),
        (["node1"], "name HOSTS"),
        (["--hosts", str(hosts), "node1", "--limit", "x"], "options go before it"),
        (["--hosts", str(hosts), "--", "ls"], "no host ls"),
    ):
        assert end_of("ssh", *words) == 2
        assert what in capsys.readouterr().err


def test_what_follows_the_host_is_the_commands(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _program, argv, _environment: started.append(argv))
    monkeypatch.setattr(sys, "argv", ["provision", "ssh", str(hosts), "node1", "printf", "%s-", "--debug", "--help"])
    with pytest.raises(SystemExit):
        main.main()
    assert subprocess.run(started[0], input="", capture_output=True, text=True, check=False).stdout == "--debug---help-"
