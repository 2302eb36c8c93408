"""Jobs that stream their output and end with the controller. Real processes on this machine; ssh itself is tested with real hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from loading import load

from provision import remote, resources
from provision.inventory import Host
from provision.remote import Job

HERE = Host(name="localhost", address="localhost", connection="local")


def run(job: Job, run_id: str = "unit-remote") -> tuple[remote.JobResult, list[str]]:
    lines: list[str] = []
    return remote.run_job(HERE, job, python=sys.executable, run_id=run_id, on_line=lines.append), lines


def marked(run_id: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"PROVISION_RUN_ID={run_id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_output_exit_code_environment_files_and_report_come_through() -> None:
    script = 'cat hello; echo "$WORD" >&2; echo \'{"answer": 42}\' > report.json; exit 3'
    result, lines = run(Job(["sh", "-c", script], {"WORD": "quiet $x"}, {"hello": "first\nsecond\n"}, report="report.json"))
    assert (result.code, result.report, result.interrupted) == (3, {"answer": 42}, False)
    assert [line for line in lines if line] == ["first", "second", "quiet $x"]


def test_the_jobs_folder_is_private_and_gone_afterwards() -> None:
    _, lines = run(Job(["sh", "-c", "pwd; stat -c %a {job}; test {job} = $PWD && echo same"]))
    folder, mode, same = lines
    assert (mode, same) == ("700", "same")
    assert not Path(folder).exists()


def test_what_a_variable_holds_already_stays_behind_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PATH", "/own")
    monkeypatch.delenv("NO_PATH", raising=False)
    given = {"SOME_PATH": "/a:/b:{inherited}", "NO_PATH": "/a:{inherited}", "WORD": "a:"}
    assert run(Job(["sh", "-c", "echo $SOME_PATH $NO_PATH $WORD"], given))[1] == ["/a:/b:/own /a a:"]


def test_nothing_of_the_environment_shows_in_a_process_list() -> None:
    _, lines = run(
        Job(["sh", "-c", "cat /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c 's3cr3t-w0r[d]' || true"], {"SECRET": "s3cr3t-w0rd"})
    )
    assert lines == ["0"]


def test_a_program_that_is_not_there_ends_with_an_error_and_no_report() -> None:
    result, lines = run(Job(["/no/such/program"], report="report.json"))
    assert result.code != 0
    assert result.report is None
    assert any("/no/such/program" in line for line in lines)


def test_when_the_controller_is_killed_the_job_ends() -> None:
    program = textwrap.dedent("""
        import sys
        from provision import remote
        from provision.inventory import Host
        host = Host(name="localhost", address="localhost", connection="local")
        job = remote.Job(["sh", "-c", "sleep 300 & echo started; wait"])
        remote.run_job(host, job, python=sys.executable, run_id="unit-orphan", on_line=lambda line: print(line, flush=True))
    """)
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    assert controller.stdout.readline().strip() == "started"
    assert marked("unit-orphan")
    controller.kill()
    controller.wait()
    deadline = time.monotonic() + 10
    while marked("unit-orphan") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked("unit-orphan")


def test_an_interrupt_ends_the_job_and_is_reported() -> None:
    program = textwrap.dedent("""
        import sys
        from provision import remote
        from provision.inventory import Host
        host = Host(name="localhost", address="localhost", connection="local")
        job = remote.Job(["sh", "-c", "echo started; sleep 300"])
        result = remote.run_job(host, job, python=sys.executable, run_id="unit-interrupt", on_line=lambda line: print(line, flush=True))
        print("interrupted", result.interrupted, flush=True)
    """)
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    assert controller.stdout.readline().strip() == "started"
    controller.send_signal(signal.SIGINT)
    rest, _ = controller.communicate(timeout=20)
    assert rest.strip().splitlines()[-1] == "interrupted True"
    assert not marked("unit-interrupt")


def test_the_sweep_ends_what_carries_the_mark_and_nothing_else() -> None:
    environment = dict(os.environ)
    ours = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; sleep 300; :"], env={**environment, "PROVISION_RUN_ID": "unit-sweep"}, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "300"], env={**environment, "PROVISION_RUN_ID": "unit-sweep-not"})
    try:
        said = subprocess.run(
            [sys.executable, str(resources.hostside("sweep.py")), "unit-sweep"], capture_output=True, text=True, check=True
        ).stdout
        assert "sleep (pid" in said
        assert ours.wait(timeout=10) != 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_sweep_ends_parents_before_children_whatever_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers begin anew at 300 after the highest one, so a child may have the smaller."""
    script = load("sweep_on_hosts", resources.hostside("sweep.py"))
    found = {}
    for name in ("parent", "child"):
        found[subprocess.Popen(["sleep", "300"]).pid] = name
        time.sleep(0.05)  # the kernel notes beginnings in hundredths of a second
    ended: list[int] = []
    try:
        monkeypatch.setattr(script, "marked", lambda _run_id: {} if ended else dict(reversed(found.items())))
        monkeypatch.setattr(script, "signal_all", lambda pids, _number: ended.extend(pids))
        script.sweep("a run")
        assert [found[pid] for pid in ended] == ["parent", "child"]
    finally:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_ssh_gets_the_inventorys_own_settings() -> None:
    host = Host(
        name="n",
        address="10.0.0.7",
        port=2222,
        user="trainer",
        key_file="/keys/id",
        variables={"ansible_ssh_common_args": "-o UserKnownHostsFile='/a b/known' -o StrictHostKeyChecking=yes"},
    )
    argv = remote.ssh_argv(host)
    assert argv[-1] == "10.0.0.7"
    assert "UserKnownHostsFile=/a b/known" in argv
    assert argv[argv.index("-p") + 1] == "2222"
    assert argv[argv.index("-l") + 1] == "trainer"
    assert argv[argv.index("-i") + 1] == "/keys/id"
