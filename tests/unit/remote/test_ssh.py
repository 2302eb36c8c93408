"""One command on several hosts at once, and the quick look at what they hold. On this machine; ssh itself is tested with real hosts."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from provision import inventory
from provision.base.errors import ProvisionError
from provision.catalog import OURS
from provision.inventory import ENCRYPTED, Host
from provision.remote import progress, ssh
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import collect, installed


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Of three hosts, all of them this machine, each with a prefix of its own."""
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    hosts = tuple(Host(name, "localhost", connection="local", prefix=str(tmp_path / name)) for name in "abc")
    return Session(replace(inventory.load("localhost"), hosts=hosts), Progress())


def test_every_host_gets_its_script_and_the_input(session: Session) -> None:
    scripts = {"a": "cat; exit 3", "b": "wc -c >&2", "c": 'echo "$PROVISION_RUN_ID"; kill -9 $$'}
    answers = ssh.run(session, scripts, stdin=b"x" * 300_000)
    assert list(answers) == ["a", "b", "c"]
    assert (answers["a"].code, answers["a"].out) == (3, "x" * 300_000)
    assert (answers["b"].code, answers["b"].err.strip()) == (0, "300000")
    assert answers["c"].code != 0
    assert answers["c"].out.strip() == session.run_id


@pytest.mark.parametrize(("given", "asks"), [("se'cret", True), ("se'cret", False), (None, False)])
def test_a_script_as_root_gets_its_input_behind_the_password_that_sudo_may_want(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, asks: bool
) -> None:
    programs = {"id": "echo 1000", "sudo": 'echo "$*" >&2; shift 3; [ -z "$ASKS" ] || head -n 1 >&2; exec "$@"'}
    for name, text in programs.items():  # in place of a login that is not root's, and of its sudo
        (tmp_path / name).write_text(f"#!/bin/sh\n{text.replace('head -n 1', 'IFS= read -r word; echo $word')}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKS", "yes" if asks else "")
    session.inventory = replace(session.inventory, hosts=(replace(session.inventory.hosts[0], sudo_password=given),))
    script, feed = ssh.as_root(session, "a", "cat; echo $PROVISION_RUN_ID", lambda pipe: pipe.write(b"first\nsecond\n"))
    answer = ssh.run(session, {"a": script}, stdin=feed)["a"]
    assert (answer.code, answer.out) == (0, f"first\nsecond\n{session.run_id}\n")
    assert answer.err.startswith("-S -p " if given else "-n -p ")
    assert answer.err.endswith("se'cret\n") == asks
    assert "se'cret" not in script


def test_the_password_of_the_inventory_is_typed_and_a_silent_sshpass_explained(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sshpass").write_text(f"#!/bin/sh\necho $SSHPASS >> {tmp_path}/typed\nexit 6\n")
    (tmp_path / "sshpass").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = (Host("a", "10.0.0.9", password="its own"), Host("b", "10.0.0.8"), Host("c", "10.0.0.7", password=ENCRYPTED))  # noqa: S106
    session.inventory, session.passwords = replace(session.inventory, hosts=hosts), {"connection": "typed"}
    for host in hosts:
        answer = ssh.run(session, {host.name: ":"})[host.name]
        assert (answer.code, answer.err) == (ssh.UNREACHABLE, "Host key verification failed")
    assert (tmp_path / "typed").read_text().splitlines()[::2] == ["its own", "typed", "typed"]


def test_many_hosts_share_the_files_that_may_be_open(session: Session) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        assert ssh.at_once() == ssh.PARALLEL
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_cleanup_is_not_waited_for_before_it_takes_long(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    ssh.run_cleanup(session, {"a": "sleep 0.5"})
    assert "waiting for" not in capsys.readouterr().err


def test_a_connection_that_is_lost_is_made_once_more(session: Session, tmp_path: Path) -> None:
    for lost, code in ((1, 0), (2, ssh.UNREACHABLE)):
        program = tmp_path / "ssh"
        program.write_text(f"""#!/bin/sh
echo >> {tmp_path}/tries
[ $(wc -l < {tmp_path}/tries) -gt {lost} ] || {{ echo "Connection reset by peer" >&2; exit 255; }}
for command; do :; done
exec sh -c "$command"
""")
        program.chmod(0o755)
        host = Host("far", "10.0.0.9", variables={"ansible_ssh_executable": str(program)})
        session.inventory = replace(session.inventory, hosts=(host,))
        for content in (b"whole", lambda pipe: pipe.write(b"whole")):
            (tmp_path / "tries").write_text("")
            answer = ssh.run(session, {"far": "cat"}, stdin=content)["far"]  # type: ignore[arg-type]
            assert (answer.code, answer.out) == (code, "" if code else "whole")
            assert "Connection reset" in answer.err or code == 0


def test_late_reader_gets_its_whole_input(session: Session) -> None:
    answers = ssh.run(session, {"a": "sleep 1; wc -c", "b": "sleep 1; wc -c"}, stdin={"a": b"x" * 300_000, "b": b"y"}, timeout=20)
    assert [answer.out.strip() for answer in answers.values()] == ["300000", "1"]


def test_late_script_is_killed(session: Session) -> None:
    answers = ssh.run(session, {"a": "echo begun; exec sleep 600", "b": "echo done"}, timeout=5.0)
    assert (answers["a"].code, answers["a"].out) == (None, "begun\n")
    assert answers["b"].code == 0


def test_a_script_that_prints_without_end_is_cut_off(session: Session) -> None:
    answers = ssh.run(session, {"a": "yes 0123456789", "b": "cat /dev/zero >&2", "c": "echo fine"}, timeout=600)
    assert [(answers[name].code, answers[name].error) for name in "ab"] == [(None, "it printed more than 16 MB")] * 2
    assert max(len(answer.out) for answer in answers.values()) < 20_000_000
    assert (answers["c"].code, answers["c"].out) == (0, "fine\n")


def test_a_process_that_holds_the_output_of_a_late_script_is_not_waited_for(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_WAITS_S", 0.1)
    answer = ssh.run(session, {"a": "setsid sleep 600 & echo $!; sleep 600", "b": ":"}, timeout=3)["a"]
    assert answer.code is None
    os.kill(int(answer.out), signal.SIGKILL)  # it runs
    assert "waiting for a" in capsys.readouterr().err


def test_missing_python_missing_engine_and_late_answer(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match=f"a: the engine is not installed for {sys.executable}"):
        installed.check_python(session, sys.executable)
    with pytest.raises(ProvisionError, match="a: there is no Python at /no/such/python"):
        installed.check_python(session, "/no/such/python")
    (tmp_path / "slow").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "slow").chmod(0o755)
    with pytest.raises(ProvisionError, match="a: it did not answer in time"):
        installed.check_python(session, str(tmp_path / "slow"), timeout=1.0)


def _with_engine(folder: Path) -> None:
    """An environment whose Python finds a package of the engine's name."""
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv/lib").glob("python3*/site-packages")
    (site / "collective_core.py").write_text("raise SystemExit('looking does not import')\n")


def test_host_without_a_usable_installation_is_named(session: Session, tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(ProvisionError) as error:
            installed.read_plan(session)
        return str(error.value)

    assert said().startswith("a, b, c: nothing is installed here yet")
    for name in "abc":
        _with_engine(tmp_path / name)
        (tmp_path / name / "manifest.json").write_text('{"host": {}}')
    assert "a: its manifest was written by another version or is damaged" in said()
    (tmp_path / "b/manifest.json").write_text("{half")
    (tmp_path / "c/venv/bin/python").unlink()
    assert "c: there is no Python at" in said()


def test_ssh_gets_the_inventorys_settings() -> None:
    host = Host(
        name="n",
        address="10.0.0.7",
        port=2222,
        user="trainer",
        key_file="/keys/id",
        variables={"ansible_ssh_common_args": "-o UserKnownHostsFile='/a b/known' -o StrictHostKeyChecking=yes"},
    )
    argv, _ = ssh.login(host, "true")
    assert argv[-2:] == ["10.0.0.7", "true"]
    assert "UserKnownHostsFile=/a b/known" in argv
    assert "-i /keys/id -p 2222 -l trainer" in shlex.join(argv)


@pytest.mark.parametrize("warning", ["no such identity: {}: No such file", "Warning: Identity file {} not accessible: No such file."])
def test_missing_private_key_is_named(warning: str) -> None:
    refusal = "trainer@10.0.0.1: Permission denied (publickey)."
    host = Host("a", "10.0.0.1", key_file="/keys/gone")
    gone = collect.connection_problem(host, f"Failed to connect: Warning: added.\r\n{warning.format('/keys/gone')}\r\n{refusal}", OURS)
    assert "the private key /keys/gone is not there" in gone.what
    assert "ansible_ssh_private_key_file" in str(gone.hint)
    assert "wrong key, user or password" in collect.connection_problem(host, refusal, OURS).what
    assert "nothing listens" in collect.connection_problem(host, f"{warning.format('/keys/gone')}\r\nConnection refused", OURS).what


@pytest.mark.parametrize(
    ("reason", "what"), [("Connection refused", "nothing listens"), ("Name or service not known", "is not known to this machine")]
)
def test_what_a_jump_host_cannot_reach_has_not_broken_off(reason: str, what: str) -> None:
    """The texts are those of OpenSSH 9.2."""
    closed = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535"
    said = f"channel 0: open failed: connect failed: {reason}\r\nstdio forwarding failed\r\n{closed}"
    assert what in collect.connection_problem(Host("a", "10.0.0.1"), said, OURS).what
    assert "broke off" in collect.connection_problem(Host("a", "10.0.0.1"), closed, OURS).what
