"""`provision doctor` as a user runs it: what it prints, and how it ends."""

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from provision.base.errors import UsageError
from provision.base.problems import Severity
from provision.base.terminal import Console
from provision.catalog import OURS
from provision.cli import doctor as command
from provision.cli.main import app
from provision.diagnosis.findings import Finding
from provision.diagnosis.signatures import known_error
from provision.doctor import show
from provision.doctor.host_checks import Examination, examine_this_machine


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("log", "status", "said"),
    [
        ("epoch 1\nepoch 2\n", 0, f"2 lines read, {sum(bool(each.patterns) for each in show.listed())} known errors"),
        ("epoch 1", 0, "1 line read"),
        ("", 0, "0 lines read"),
        ("epoch 1\nnode1:71:88 [0] NCCL WARN the ring is broken\n", 1, "NCCL WARN the ring is broken"),
        ("Host key verification failed.\n", 1, "[ssh-host-key-verification]"),
    ],
)
def test_a_log_ends_with_0_only_where_nothing_was_found(tmp_path: Path, log: str, status: int, said: str) -> None:
    file = tmp_path / "job.log"
    file.write_text(log)
    code, printed = doctor("--log", str(file))
    assert code == status
    assert said in printed
    assert ("no known errors found" in printed) == (code == 0)


def test_a_log_in_the_place_of_hosts_is_read_as_a_log(tmp_path: Path) -> None:
    file = tmp_path / "slurm-7.out"
    file.write_text("Host key verification failed.\n")
    code, printed = doctor(str(file))
    assert code == 1
    assert "[ssh-host-key-verification]" in printed


def test_the_document_of_a_log_says_how_much_was_read(tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    file.write_text("epoch 1\nHost key verification failed.\n")
    document = json.loads(doctor("--log", str(file), "--json")[1])
    assert document["logs"] == {"lines": 2, "complete": True}
    assert [each["id"] for each in document["findings"]] == ["ssh-host-key-verification"]


def test_list_keeps_to_a_layer() -> None:
    code, printed = doctor("list", "--layer", "nccl")
    assert code == 0
    assert "nccl-shm-too-small" in printed
    assert "apt-lock" not in printed
    assert isinstance(CliRunner().invoke(app, ["doctor", "list", "--layer", "nonsense"]).exception, UsageError)


def test_one_error_on_several_hosts_is_one_block(capsys) -> None:
    error = known_error("too-many-open-files")
    found = [
        Finding.of(error, severity="warning", host=f"n{number}", observed=f"ulimit -n is {1024 if number < 3 else 512}", expected="4096")
        for number in range(5)
    ]
    show.findings(found, Console(), examined="on 5 of 5 hosts", searched="73 checks")
    printed = capsys.readouterr().out
    assert printed.count("[too-many-open-files]") == 1
    assert "n0, n1, n2, n3, n4: warning:" in printed
    assert "observed on n0, n1, n2: ulimit -n is 1024; expected 4096" in printed
    assert "observed on n3, n4: ulimit -n is 512; expected 4096" in printed
    assert printed.count(error.fix[0]) == 1
    assert "1 warning on 5 of 5 hosts" in printed


@pytest.mark.parametrize(("severity", "status"), [(None, 0), ("note", 0), ("warning", 0), ("error", 1)])
def test_on_hosts_only_an_error_ends_with_1(monkeypatch, severity: Severity | None, status: int) -> None:
    found = [Finding.of(known_error("disk-full"), severity=severity, host="localhost", observed="little")] if severity else []
    monkeypatch.setattr(command, "examine_this_machine", lambda _: Examination({}, found, ["localhost"]))
    code, printed = doctor()
    assert code == status
    assert ("no known errors found on this machine" in printed) == (severity is None)


def test_a_log_next_to_hosts_counts(monkeypatch, tmp_path: Path) -> None:
    """An error in a log is one although the hosts have none."""
    log = tmp_path / "job.log"
    log.write_text("NCCL WARN the ring is broken\n")
    monkeypatch.setattr(command, "examine_this_machine", lambda _: Examination({}, [], ["localhost"]))
    assert doctor("--log", str(log), "--gpu")[0] == 1


def test_the_survey_of_this_machine_knows_which_systems_are_managed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the prefix of root on an older system is looked for in /opt, not in its home. The survey itself does not run here."""
    told = []

    def run(*_: object, env: dict[str, str], **__: object) -> None:
        told.append(json.loads(env["PROVISION_SURVEY_OPTIONS"]))
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UsageError, match="this machine cannot be surveyed"):
        examine_this_machine()
    assert told == [{"managed_libc": OURS.os().others.managed_libc}]
