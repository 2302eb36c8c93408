"""Jobs that stream their output and end with the controller. Real processes on this machine; ssh itself is tested with real hosts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading import load, load_script

from provision.base import resources
from provision.inventory import Host
from provision.launch import jobs
from provision.launch.jobs import Ended, Job, JobResult, Verdict

HERE = Host(name="localhost", address="localhost", connection="local")


def session(run_id: str) -> Any:
    """One on this machine, of two ranks."""
    inventory, record = SimpleNamespace(host=lambda _name: HERE), SimpleNamespace(ranks={"localhost": 2})
    progress = SimpleNamespace(stage=lambda _title: None, starting=lambda *_: None)
    return SimpleNamespace(run_id=run_id, passwords={}, inventory=inventory, progress=progress, record=record)


#: In ssh's place: the guard of "another host", which is this machine under another run's name and with another folder.
OTHER_HOST = """
import json, os, sys
def line():
    found = b""
    while not found.endswith(b"\\n"):
        found += os.read(0, 1)
    return json.loads(found.decode())
script, order = line(), line()
sys.stdout.write(eval(sys.argv[1]))
sys.stdout.flush()
os.environ["PROVISION_RUN_ID"] += "-another-host"
order["folder"] += "-of-another"
guard = {"__name__": "guard"}
exec(script, guard)
guard["read_order"] = lambda: order
sys.exit(guard["guard"]())
"""


#: A controller in a process of its own: runs a shell command as the job of a run.
CONTROLLER = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from provision.inventory import Host
from provision.launch import jobs
inventory = SimpleNamespace(host=lambda _: Host(name="localhost", address="localhost", connection="local"))
progress = SimpleNamespace(stage=lambda _: None)
session = SimpleNamespace(run_id=sys.argv[1], passwords={}, inventory=inventory, progress=progress, record=SimpleNamespace(ranks={}))
job = jobs.Job(["sh", "-c", sys.argv[2]], python=sys.executable)
result = jobs.run(session, job, "", Path(os.devnull), lambda line: print(line, flush=True))
print("interrupted", result.interrupted, flush=True)
"""


def controller(run_id: str, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CONTROLLER, run_id, script], stdout=subprocess.PIPE, text=True)


def beside(argv: list[str], before: str = "''", **more: Any) -> Job:
    """A job with another host, whose shell says something first."""
    return Job(argv, hosts=["other"], ssh=[sys.executable, "-c", OTHER_HOST, before], **more)


#: Of this process alone: what carries it is ended at the end of a job, and tests run next to each other.
RUN_ID = f"unit-remote-{os.getpid()}"


def run(job: Job, run_id: str = RUN_ID, python: str = sys.executable, on_line: Any = None) -> tuple[JobResult, list[str]]:
    lines: list[str] = []
    result = jobs.run(session(run_id), replace(job, python=python), "", Path(os.devnull), on_line or lines.append)
    return result, lines


def until_ended(rank: int, folder: str = ".") -> str:
    """A shell waits until the end of another rank is recorded, for a minute at most."""
    return f"""n=0; until grep -qs '"code"' {folder}/provision-rank-{rank} || [ $n -gt 6000 ]; do n=$((n + 1)); sleep 0.01; done"""


def changed_scripts(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]) -> None:
    """Other constants in what runs on hosts: each is in one of the scripts."""
    script = resources.script
    assert all(sum(old in script(name) for name in ("job.py", "guard.py")) == 1 for old in changes)

    def changed(name: str) -> str:
        text = script(name)
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(resources, "script", changed)


def marked(run_id: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"PROVISION_RUN_ID={run_id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def until_gone(run_id: str, kill: bool = False) -> None:
    """With ``kill``, whatever a process starts between two looks is killed, too."""
    deadline = time.monotonic() + 60
    while pids := marked(run_id):
        assert time.monotonic() < deadline, "its processes go on"
        for pid in pids if kill else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def test_output_exit_code_environment_files_and_report() -> None:
    script = 'cat hello; echo "$WORD" >&2; echo \'{"answer": 42}\' > report.json; exit 3'
    result, lines = run(
        Job(["sh", "-c", script], environment={"WORD": "quiet $x"}, files={"hello": "first\nsecond\n"}, report="report.json")
    )
    assert (result.code, result.report, result.interrupted) == (3, {"answer": 42}, False)
    assert [line for line in lines if line] == ["first", "second", "quiet $x"]


def test_the_jobs_folder_is_private_and_removed_afterwards() -> None:
    _, lines = run(Job(["sh", "-c", "pwd; stat -c %a {job}; test {job} = $PWD && echo same"]))
    folder, mode, same = lines
    assert (mode, same) == ("700", "same")
    assert not Path(folder).exists()


def test_inherited_value_of_a_variable_is_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PATH", "/own")
    monkeypatch.delenv("NO_PATH", raising=False)
    given = {"SOME_PATH": "/a:/b:{inherited}", "NO_PATH": "/a:{inherited}", "WORD": "a:"}
    assert run(Job(["sh", "-c", "echo $SOME_PATH $NO_PATH $WORD"], environment=given))[1] == ["/a:/b:/own /a a:"]


def test_the_jobs_folder_is_not_in_the_first_hosts_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert Path(run(Job(["pwd"]))[1][0]).parent == Path("/tmp")


def test_a_host_that_refuses_is_not_called_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here because it is this machine: "ssh" runs what it is given."""
    ours = '("", [sys.executable, "-c", '
    changed_scripts(monkeypatch, {ours: ours + '"import time; time.sleep(0.5)\\n" + '})  # the other could be faster
    result, _ = run(Job(["true"], hosts=["other"], ssh=["sh", "-c", 'exec sh -c "$2"']))
    assert result.verdict is not None
    assert (result.verdict.kind, result.verdict.host) == ("refused", "other")
    assert "it is the same machine as another host of this job, or shares /" in result.verdict.output[0]


def test_process_list_shows_no_value_of_the_environment() -> None:
    _, lines = run(
        Job(
            ["sh", "-c", "cat /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c 's3cr3t-w0r[d]' || true"],
            environment={"SECRET": "s3cr3t-w0rd"},
        )
    )
    assert lines == ["0"]


def test_missing_program_is_an_error_without_a_report() -> None:
    result, lines = run(Job(["/no/such/program"], report="report.json"))
    assert result.code != 0
    assert result.report is None
    assert any("/no/such/program" in line for line in lines)


def test_the_job_ends_when_the_controller_is_killed() -> None:
    process = controller(f"{RUN_ID}-orphan", "sleep 300 & echo started; wait")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "started"
    assert marked(f"{RUN_ID}-orphan")
    process.kill()
    process.wait()
    until_gone(f"{RUN_ID}-orphan")


def test_interrupt_ends_the_job() -> None:
    process = controller(f"{RUN_ID}-interrupt", "echo started; sleep 300")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "started"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert rest.strip().splitlines()[-1] == "interrupted True"
    assert not marked(f"{RUN_ID}-interrupt")


def test_job_ends_when_its_output_can_no_longer_be_shown(tmp_path: Path) -> None:
    def closed(_line: str) -> None:
        raise BrokenPipeError

    started = time.monotonic()
    with pytest.raises(BrokenPipeError):
        jobs.run(session("closed"), Job(["sh", "-c", "echo shown; sleep 600"]), "a job", tmp_path / "log", closed)
    assert time.monotonic() - started < 300, "it was waited for"


def test_heartbeats_continue_while_the_output_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a pager that is not read on, or a terminal held with Ctrl-S. In the job's place: who ends when it has heard of us thrice."""
    monkeypatch.setattr(jobs, "_HEARTBEAT_S", 0.1)
    (tmp_path / "python").write_text(f"#!/bin/sh\nread -r order; echo held; read -r a; read -r b; read -r c; touch {tmp_path}/heard\n")
    (tmp_path / "python").chmod(0o700)

    def hold(_line: str) -> None:
        deadline = time.monotonic() + 20
        while not (tmp_path / "heard").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (tmp_path / "heard").exists()

    run(Job([]), "unit-held", str(tmp_path / "python"), hold)


def test_job_ends_without_heartbeats_from_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    script = resources.script
    monkeypatch.setattr(resources, "script", lambda name: script(name).replace("CONTROLLER_SILENT_S = 60.0", "CONTROLLER_SILENT_S = 0.5"))
    monkeypatch.setattr(jobs, "_HEARTBEAT_S", 1000.0)
    result, _ = run(Job(["sleep", "300"]))
    assert (result.code, result.verdict) == (1, Verdict("controller", "", seconds=0.5))


@pytest.mark.parametrize(
    "said", ["'hello'", """'{}\\n'""", """'[' * 9000 + '\\n'""", """'{"stopped": 1}\\n{"ended": [{}]}\\n'""", "'x' * (3 << 20)"]
)
def test_output_of_another_hosts_shell_does_not_disturb_the_job(said: str) -> None:
    """The last before the guard's own lines may have no end, as after ``echo -n`` in a .bashrc."""
    result, lines = run(beside(["echo", "ran"], said))
    assert (result.code, result.verdict, lines) == (0, None, ["ran"])


@pytest.mark.parametrize(
    "outcome",
    [
        "{",
        "[" * 9000,
        "null",
        '{"code": 0}',
        '{"code": "0", "verdict": null, "report": null}',
        '{"code": 1, "verdict": null, "report": []}',
        *(
            f'{{"code": 1, "report": null, "verdict": {verdict}}}'
            for verdict in (
                '{"kind": "boom", "host": ""}',
                '{"kind": [], "host": ""}',
                '{"kind": "lost"}',
                '{"kind": "lost", "host": []}',
                '{"kind": "lost", "host": "", "more": 1}',
                '{"kind": "lost", "host": "", "output": [1]}',
                '{"kind": "silent", "host": "", "seconds": "1"}',
                f'{{"kind": "silent", "host": "", "seconds": {10**400}}}',
            )
        ),
    ],
)
def test_invalid_outcome_of_a_job_is_not_believed(tmp_path: Path, outcome: str) -> None:
    (tmp_path / "outcome").write_text(outcome)
    answer = "import json, sys; print(json.loads(sys.stdin.readline())['mark'] + open(sys.argv[1]).read())"
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c {shlex.quote(answer)} {tmp_path}/outcome\n")
    (tmp_path / "python").chmod(0o700)
    result, _ = run(Job([]), "unit-answer", str(tmp_path / "python"))
    assert (result.code, result.report, result.verdict) == (1, None, Verdict("gone", ""))


def test_very_long_line_comes_in_parts() -> None:
    result, lines = run(Job(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"]))
    assert result.code == 0
    assert len(lines) > 1
    assert "".join(lines) == "x" * 3000000


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds are silence, and messages come all the time: the job's own guard, which is heard, needs a second on a busy machine."""
    shorter = {
        "\nSILENT_S = 45.0": "\nSILENT_S = 5.0",
        "BEAT_S = 5.0\nTICK_S": "BEAT_S = 0.0\nTICK_S",  # job.py's
        "BEAT_S = 5.0\nSILENT_S": "BEAT_S = 0.1\nSILENT_S",  # guard.py's
    }
    changed_scripts(monkeypatch, shorter)


@pytest.mark.usefixtures("hurried")
def test_guard_that_never_starts_ends_the_job() -> None:
    result, _ = run(Job(["true"], hosts=["other"], ssh=["sh", "-c", "while echo a quota is exceeded; do sleep 0.1; done"]))
    assert result.verdict == Verdict("silent", "other", seconds=5.0, output=("a quota is exceeded",) * 5)


def test_lost_host_is_blamed_before_the_rank_that_ended_because_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is faster here: it ends before the other guard's connection does."""
    changed_scripts(monkeypatch, {"AFTERMATH_S = 0.5": "AFTERMATH_S = 30.0"})
    died = beside(["sh", "-c", f"touch {tmp_path}/ended; kill -9 $$"])
    watch = f"while [ ! -e {tmp_path}/ended ]; do sleep 0.01; done; sleep 0.1; kill -9 $$"
    way = f"sh -c {shlex.quote(watch)} & exec {shlex.join(died.ssh)}".replace("$$", "$GUARD")
    result, _ = run(replace(died, ssh=["sh", "-c", f"export GUARD=$$; {way}"]))
    assert result.verdict == Verdict("lost", "other", output=())
    assert result.code == 137


@pytest.mark.usefixtures("hurried")
def test_host_of_a_silent_guard_is_named() -> None:
    """What ssh has started, as its ProxyCommand, may hold its output open for longer."""
    result, _ = run(
        Job(["sleep", "300"], hosts=["other"], ssh=["sh", "-c", "echo; echo '{\"ready\": true}'; env -u PROVISION_RUN_ID sleep 30; :"])
    )
    assert result.verdict == Verdict("silent", "other", seconds=5.0, output=())


def test_other_hosts_use_the_interpreter_by_its_given_name() -> None:
    """``env`` finds this one by its name, which is not what the process calls itself."""
    result, _ = run(Job(["true"], hosts=["other"], ssh=["sh", "-c", 'echo "$2" | head -n 1 | cut -d " " -f 3; exit 1']), python="python3")
    assert result.verdict == Verdict("unreachable", "other", output=("python3",))


def test_next_job_removes_folders_without_a_guard_only() -> None:
    killed, living = (controller(run_id, "echo {job}; echo {shm}; sleep 300") for run_id in (f"{RUN_ID}-killed", f"{RUN_ID}-living"))
    try:
        assert killed.stdout is not None
        assert living.stdout is not None
        left, kept = ([Path(stdout.readline().strip()) for _ in range(2)] for stdout in (killed.stdout, living.stdout))
        killed.kill()
        until_gone(f"{RUN_ID}-killed", kill=True)  # the guard as well, before it can act
        run(Job(["true"]))  # unless a job of another test that runs next to this one was faster
        assert not any(folder.exists() for folder in left)
        assert all(folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700 for folder in kept)
    finally:
        for each in (killed, living):
            each.terminate()
            each.communicate(timeout=30)
    assert not any(folder.exists() for folder in kept)


def test_program_cannot_forge_the_end_of_its_job() -> None:
    said = '===PROVISION-JOB-ENDED==={"code": 0, "verdict": null, "report": null}'
    result, lines = run(Job(["sh", "-c", f"printf %s '{said}'; exit 3"]))
    assert (result.code, lines) == (3, [said])


def test_first_failure_names_rank_and_signal() -> None:
    """Without a launcher: a shell starts the two ranks, the first of which goes on."""
    start = f"{sys.executable} -I -S {{job}}/rank.py"
    ranks = f"COLLECTIVE_RANK=0 {start} & COLLECTIVE_RANK=1 {start}; wait $!; exit 9"
    die = f"if [ $PROVISION_RANK = 1 ]; then kill -SEGV $$; fi; {until_ended(1)}; exit 3"
    result, _ = run(Job(["sh", "-c", ranks], program=["sh", "-c", die]))
    assert (result.code, result.verdict) == (9, Verdict("ended", "", rank=1, code=-signal.SIGSEGV))


def test_how_every_rank_ended_is_known_in_their_order() -> None:
    """Also of one that succeeded, which others may have waited for; of a job that succeeded nobody asks."""
    start = f"{sys.executable} -I -S {{job}}/rank.py"
    ranks = f"COLLECTIVE_RANK=0 {start} & COLLECTIVE_RANK=1 {start}; COLLECTIVE_RANK=2 {start}; wait; exit $CODE"
    end = f"case $PROVISION_RANK in 0) {until_ended(2)}; exit 3;; 1) exit 0;; *) kill -SEGV $$;; esac"
    job = Job(["sh", "-c", ranks], program=["sh", "-c", end], environment={"CODE": "9"})
    assert run(job)[0].ended == (Ended(1, "", 0), Ended(2, "", -signal.SIGSEGV), Ended(0, "", 3))
    assert run(replace(job, environment={"CODE": "0"}))[0].ended == ()


def test_it_is_said_how_many_ranks_have_started(tmp_path: Path) -> None:
    """The second rank starts, and then both end, once that was said of the one before."""
    of_two = session(RUN_ID)
    of_two.progress.starting = lambda started, ranks: (tmp_path / f"{started} of {ranks}").touch()
    start = f"{sys.executable} -I -S {{job}}/rank.py"
    until = 'n=0; until [ -e "{}" ] || [ $n -gt 6000 ]; do n=$((n + 1)); sleep 0.01; done'
    ranks = f"COLLECTIVE_RANK=0 {start} & {until.format(tmp_path / '1 of 2')}; COLLECTIVE_RANK=1 {start}; wait"
    job = Job(["sh", "-c", ranks], python=sys.executable, program=["sh", "-c", until.format(tmp_path / "2 of 2")], sample=0.05)
    assert jobs.run(of_two, job, "", Path(os.devnull), str).code == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1 of 2", "2 of 2"]


def test_a_rank_that_was_killed_with_what_records_its_end_is_known_to_be_gone() -> None:
    """As mpirun does it to a rank that hangs on its way out."""
    start = f"{sys.executable} -I -S {{job}}/rank.py"
    ranks = f"COLLECTIVE_RANK=0 {start} & first=$!; COLLECTIVE_RANK=1 {start}; kill -9 $first; exit 9"
    die = "if [ $PROVISION_RANK = 1 ]; then until [ -s provision-rank-0 ]; do sleep 0.01; done; exit 3; fi; exec sleep 60"
    result = run(Job(["sh", "-c", ranks], program=["sh", "-c", die]))[0]
    assert (result.verdict, result.ended) == (Verdict("ended", "", rank=1, code=3), (Ended(1, "", 3), Ended(0, "", -signal.SIGKILL)))


@pytest.mark.parametrize("continues", [True, False])
def test_host_that_lost_its_launcher_is_named(tmp_path: Path, continues: bool) -> None:
    """What started rank 1 is killed; the launcher ends rank 0 by SIGTERM while rank 1 goes on, or before it has ended."""
    start = f"exec {sys.executable} -I -S {{job}}/rank.py"
    starter = f"echo $$ > starter; (COLLECTIVE_RANK=1 {start}) & wait"
    after = "sleep 0.4" if continues else until_ended(1, "{job}")
    launcher = f"""
        (COLLECTIVE_RANK=0 {start}) & first=$!
        sh -c {shlex.quote(starter)} &
        while [ ! -s 0 ] || [ ! -s 1 ]; do sleep 0.01; done
        kill -9 $(cat starter); kill $(cat 0); wait $first; touch ended; {after}; exit 205
    """
    lost = "exec sleep 300" if continues else "while [ ! -e ended ]; do sleep 0.01; done; exit 7"
    program = f"echo $$ > $PROVISION_RANK; if [ $PROVISION_RANK = 0 ]; then exec sleep 300; fi; {lost}"
    result, _ = run(Job(["sh", "-c", f"cd {tmp_path}; {launcher}"], program=["sh", "-c", program]))
    assert (result.code, result.verdict) == (205, Verdict("orphaned", ""))


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        ((1.0, 1, 3, False), {"kind": "ended", "host": "b", "rank": 1, "code": 3}),  # by itself, whatever befell its host later
        ((1.0, 1, 3, True), {"kind": "orphaned", "host": "b"}),
        ((1.0, 1, -signal.SIGTERM, False), {"kind": "orphaned", "host": "b"}),
        ((9.0, 1, 3, True), {"kind": "ended", "host": "a", "rank": 0, "code": 1}),
    ],
)
def test_lost_launcher_is_blamed_only_if_its_ranks_failed_first(first: Any, verdict: Any) -> None:
    a = SimpleNamespace(host="a", ended=[(5.0, 0, 1, False), (6.0, 2, 0, False)], has_orphans=False)
    b = SimpleNamespace(host="b", ended=[first, (7.0, 3, -signal.SIGTERM, True)], has_orphans=True)
    first_failure = load("job_on_hosts", resources.hostside("job.py")).Watch.first_failure
    assert first_failure(SimpleNamespace(guards=[a, b])) == verdict


@pytest.mark.parametrize(
    "message",
    [
        '{"ended": [{"ago": 0, "rank": Infinity, "code": 1, "orphaned": false}]}',
        '{"ended": [{"ago": 0, "rank": -1, "code": 1, "orphaned": false}]}',
        '{"ended": [{"ago": 0, "rank": 1, "code": 1e9, "orphaned": false}]}',
        '{"ended": [{"ago": 0, "rank": 1, "code": 1000000000, "orphaned": false}]}',
        '{"ended": [{"ago": NaN, "rank": 1, "code": 1, "orphaned": false}]}',
        f'{{"ended": [{{"ago": {10**400}, "rank": 1, "code": 1, "orphaned": false}}]}}',
        '{"killed": [-1]}',
        '{"killed": 7}',
        '{"ranks": [{"rank": 1, "signs": {"cpu": NaN}}]}',
        '{"ranks": [{"rank": "1", "signs": {}}]}',
        '{"ranks": [{"rank": 1, "signs": [[]]}]}',
        '{"started": -1}',
        '{"quiet": -5}',
        '{"quiet": NaN}',
        '{"quiet": "long"}',
        '{"stopped": [{"pid": "1", "rank": null, "name": "orted"}]}',
        '{"stopped": [{"pid": 1e400, "rank": null, "name": "orted"}]}',
        '{"stopped": [{"pid": 1, "rank": true, "name": "orted"}]}',
    ],
)
def test_invalid_message_of_a_guard_is_ignored(message: str) -> None:
    guard = load("job_on_hosts", resources.hostside("job.py")).Guard("b", ["echo", message], [])
    while guard.read():
        pass
    assert (guard.ended, guard.killed, guard.stopped, guard.printed, guard.quiet, guard.ranks) == ([], [], {}, [message[:500]], None, [])
    assert guard.started is None
    guard.process.communicate()


def test_messages_of_a_guard_are_valid_text() -> None:
    """The controller refuses a lone surrogate, and all of the outcome with it."""
    message = '{"stopped": [{"pid": 7, "rank": null, "name": "\\ud800"}]}\n{"error": "\\ud800"}'
    guard = load("job_on_hosts", resources.hostside("job.py")).Guard("b", ["echo", message], [])
    while guard.read():
        pass
    assert (guard.stopped, guard.refusal) == ({7: (0.0, None, "?")}, "?")
    guard.process.communicate()


def test_parent_that_is_dying_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections close before its children have another parent. A process that nobody has waited for has the same flag."""
    script = load("rank_on_hosts", resources.hostside("rank.py"))
    with subprocess.Popen(["sleep", "20"]) as starter:
        monkeypatch.setattr(script.os, "getppid", lambda: starter.pid)
        assert not script.is_dead(starter.pid)
        starter.kill()
        os.waitid(os.P_PID, starter.pid, os.WEXITED | os.WNOWAIT)
        assert script.is_dead(starter.pid)
    monkeypatch.undo()
    assert not script.is_dead(os.getppid())
    assert script.is_dead(starter.pid)


def test_a_free_port_of_the_first_host() -> None:
    _, lines = run(Job(["sh", "-c", "echo $MASTER_PORT $X"], environment={"X": "{port}"}, free_ports=["MASTER_PORT"]))
    port, of_user = lines[0].split()
    assert 0 < int(port) < 1 << 16
    assert of_user == "{port}"


SAYS = """
import json, os, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()
names += ["WORD", "MALLOC_TRIM_THRESHOLD_"]
json.dump([os.environ.get(name) for name in names], open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize(
    ("networks", "given", "interfaces"),
    [
        ("127.0.0.0/8", {}, ["lo", "=lo"]),
        ("no0,lo", {"NCCL_SOCKET_IFNAME": "ib0"}, ["lo", "ib0"]),
        ("198.51.100.0/24", {"GLOO_SOCKET_IFNAME": "eth7"}, ["eth7", None]),
        ("", {}, [None, None]),
    ],
)
def test_ranks_of_mpirun_get_the_variables_of_torch(tmp_path: Path, networks: str, given: dict[str, str], interfaces: list[str]) -> None:
    """On the second of two hosts, as Open MPI 4.1 tells its ranks."""
    (tmp_path / "rank.py").write_text(resources.script("rank.py"))
    (tmp_path / "program.json").write_text(json.dumps([sys.executable, "-c", SAYS, str(tmp_path / "said")]))
    (tmp_path / "place.json").write_text(
        json.dumps({"host": 1, "hosts": 2, "tuned": {"RANK": "9", "WORD": "ours", "MALLOC_TRIM_THRESHOLD_": "1"}})
    )
    of_mpi = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environment = {f"OMPI_COMM_WORLD_{name}": value for name, value in of_mpi.items()} | {
        "COLLECTIVE_NETWORK": networks,
        "MALLOC_ARENA_MAX": "2",
        **given,
    }
    subprocess.run([sys.executable, "-I", "-S", str(tmp_path / "rank.py")], env=environment, check=True)
    assert json.loads((tmp_path / "said").read_text()) == ["3", "4", "1", "2", "1", "2", *interfaces, "ours", None]


def test_each_host_is_told_which_of_the_jobs_it_is() -> None:
    _, lines = run(beside(["sh", "-c", "cat {job}/place.json; echo; cat {job}-of-another/place.json"], tuned={"other": {"A": "1"}}))
    places = [{"host": 0, "hosts": 2, "tuned": {}}, {"host": 1, "hosts": 2, "tuned": {"A": "1"}}]
    assert [json.loads(line) for line in lines if line] == places


@pytest.mark.parametrize("code", [0, 3])
def test_rank_that_succeeded_is_no_orphan(tmp_path: Path, code: int) -> None:
    (tmp_path / "rank.py").write_text(resources.script("rank.py"))
    (tmp_path / "program.json").write_text(json.dumps(["sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; exit {code}"]))
    (tmp_path / "place.json").write_text(json.dumps({"host": 0, "hosts": 1, "tuned": {}}))
    record = tmp_path / "provision-rank-0"
    starter = f"COLLECTIVE_RANK=0 {sys.executable} -I -S {tmp_path}/rank.py & while [ ! -e {record} ]; do sleep 0.01; done"
    subprocess.run(["sh", "-c", starter], check=True)
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 20
    while "code" not in json.loads(record.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = json.loads(record.read_text())
    assert (ended["code"], ended["orphaned"]) == (code, code != 0)


def test_only_running_ranks_can_lose_their_launcher(tmp_path: Path) -> None:
    script = load_script("guard.py")
    with subprocess.Popen(["sleep", "20"]) as parent:
        one = {"rank": 0, "pid": parent.pid, "parent": parent.pid, "starter": os.getpid()}
        lost = {**one, "starter": os.getpid() + 1}
        assert (script.is_orphan(one), script.is_orphan(lost)) == (False, True)
        parent.kill()
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        assert not script.is_orphan(lost)
    assert not script.is_orphan(lost)


RECORD_OF_7 = {"rank": 7, "pid": 2, "parent": 2, "starter": 2}
END = {"code": 1, "at": 1.0, "orphaned": False}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1, 2]",
        '{"rank": 2}',
        *(json.dumps({**RECORD_OF_7, **END, **wrong}) for wrong in ({"code": "x"}, {"code": None}, {"code": True}, {"code": 10**9})),
        *(json.dumps({**RECORD_OF_7, **END, **wrong}) for wrong in ({"at": True}, {"at": float("inf")}, {"at": -5.0}, {"orphaned": 1})),
        *(json.dumps({**RECORD_OF_7, **wrong}) for wrong in ({"rank": 10**12}, {"rank": -1}, {"pid": 1.5}, {"parent": None})),
        "[" * 9000,
        " " * 100000 + json.dumps(RECORD_OF_7),
    ],
)
def test_files_of_the_program_are_no_records(tmp_path: Path, text: str) -> None:
    script = load_script("guard.py")
    for name in ("rank-loss.json", "provision-rank-7.new", "provision-rank-7"):
        (tmp_path / name).write_text(text)
    running = {"rank": 0, "pid": os.getpid(), "parent": os.getpid(), "starter": os.getppid()}
    ended = {**running, **END, "rank": 8, "code": -9}
    for record in (running, ended):
        (tmp_path / f"provision-rank-{record['rank']}").write_text(json.dumps(record))
    assert script.ranks_in(str(tmp_path)) == [running, ended]
    assert script.stopped(script.of_run("unit-records"), [running, ended]) == []
    assert script.ranks_in(str(tmp_path / "removed")) == []


def test_only_regular_files_are_records(tmp_path: Path) -> None:
    script = load_script("guard.py")
    (tmp_path / "record").write_text(json.dumps(RECORD_OF_7))
    (tmp_path / "provision-rank-0").symlink_to("/dev/zero")
    (tmp_path / "provision-rank-1").symlink_to(tmp_path / "record")
    os.mkfifo(tmp_path / "provision-rank-2")
    (tmp_path / "provision-rank-3").mkdir()
    assert script.ranks_in(str(tmp_path)) == []


def test_guard_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("guard.py")
    swept: list[str] = []
    monkeypatch.setattr(script, "sweep", lambda run_id, _spared, _grace: swept.append(run_id))
    monkeypatch.setattr(script, "wait_for_end", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script.attend("a run", "/no/such/folder", 0)
    assert swept == ["a run"]


@pytest.mark.parametrize(("module", "function"), [("os", "open"), ("fcntl", "flock")])
def test_folder_that_was_removed_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, function: str
) -> None:
    """As by the remove_abandoned() of another guard."""
    script = load_script("guard.py")
    folder, real, removed = tmp_path / "provision-job-1", getattr(getattr(script, module), function), []

    def late(*args: Any) -> Any:
        if not removed:
            folder.rmdir()
            removed.append(folder)
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(getattr(script, module), function, late)
        script.make_locked(str(folder))
    opened = os.open(folder, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(opened)
    with pytest.raises(FileExistsError):
        script.make_locked(str(folder))


@pytest.fixture
def abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`abandoned.py` as the guard has it, for which all folders are below one of our own."""
    script = load_script("guard.py")
    monkeypatch.setattr(script, "PLACE", str(tmp_path))
    monkeypatch.setattr(script, "SHARED", str(tmp_path))
    monkeypatch.setattr(script.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("SUDO_UID", raising=False)
    return script


def test_abandoned_folders_of_other_users_stay(abandoned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, folders = os.getuid(), [tmp_path / "provision-job-1", tmp_path / "ansible_owned_file_payload_a1b2_c3d"]
    for folder in folders:
        folder.mkdir()
        os.utime(folder, (0, 0))
    monkeypatch.setattr(abandoned.os, "getuid", lambda: owner + 1)
    assert abandoned.remove_abandoned() == []
    assert all(folder.exists() for folder in folders)
    monkeypatch.setenv("SUDO_UID", str(owner))
    assert sorted(abandoned.remove_abandoned()) == sorted(map(str, folders))
    assert not any(folder.exists() for folder in folders)


def test_folders_of_killed_modules_go_when_they_are_old(abandoned: Any, tmp_path: Path) -> None:
    payloads = ["ansible_ansible.legacy.command_payload", "ansible_stat_payload", "ansible_copy_payload"]
    killed, living, other = (tmp_path / f"{name}_k2jx9_ab" for name in payloads)
    for folder in (killed, living, other):
        folder.mkdir()
    (killed / f"{payloads[0]}.zip").touch()
    (other / "notes").touch()  # a user's
    (tmp_path / "ansible_payload").mkdir()
    for folder, age_s in ((killed, 90_000), (living, 80_000), (other, 90_000)):
        os.utime(folder, (time.time() - age_s,) * 2)
    assert abandoned.remove_abandoned(dry_run=True) == [str(killed)]
    assert killed.exists()
    assert abandoned.remove_abandoned() == [str(killed)]
    assert not killed.exists()
    assert living.exists()
    assert other.exists()


def test_folders_of_killed_examinations_go_when_they_are_old(abandoned: Any, tmp_path: Path) -> None:
    killed, living, other = (tmp_path / f"provision-stall-{name}" for name in ("killed", "living", "other"))
    for folder, file, age_s in ((killed, "py-spy", 400), (living, "py-spy", 200), (other, "notes", 400)):
        folder.mkdir()
        (folder / file).touch()
        os.utime(folder, (time.time() - age_s,) * 2)
    assert abandoned.remove_abandoned() == [str(killed)]
    assert [folder.exists() for folder in (killed, living, other)] == [False, True, True]


def test_a_restart_kills_ranks_of_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program can write records, too."""
    script, run_id = load_script("guard.py"), f"unit-restart-{os.getpid()}"
    environments: list[dict[str, str]] = [{"PROVISION_RANK": "0", "PROVISION_RUN_ID": run_id}, {"PROVISION_RUN_ID": run_id}, {}]
    started = [subprocess.Popen(["sleep", "60"], env=environment) for environment in environments]
    records = [{"pid": pid, "rank": 0, "parent": 1, "starter": 1} for pid in (0, 1, *(each.pid for each in started))]
    for at, record in enumerate(records):
        (tmp_path / f"provision-rank-{at}").write_text(json.dumps(record))
    killed: list[int] = []

    def restarts(_beat: float, _report: Any, restart: Any, _glance: Any) -> bool:
        restart()
        return True

    monkeypatch.setattr(script, "wait_for_end", restarts)
    monkeypatch.setattr(script, "sweep", lambda *_: None)
    monkeypatch.setattr(script, "signal_all", lambda pids, number: killed.extend(pids if number == signal.SIGKILL else ()))
    try:
        script.attend(run_id, str(tmp_path), 0)
        assert killed == [started[0].pid]
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.fixture
def watch_of_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, int, list[Any]]]:
    """job.py's, with one guard; the other end of its standard input; and what it says."""
    script, said = load("job_on_hosts", resources.hostside("job.py")), list[Any]()
    monkeypatch.setattr(script, "TICK_S", 0.01)
    monkeypatch.setattr(script, "say", lambda _mark, about: said.append(about))
    ours, theirs = os.pipe()
    real_read, selector = os.read, script.selectors.DefaultSelector()
    monkeypatch.setattr(script.os, "read", lambda number, size: real_read(ours if number == 0 else number, size))
    monkeypatch.setattr(selector, "register", lambda *_: type(selector).register(selector, ours, 1))
    monkeypatch.setattr(script.selectors, "DefaultSelector", lambda: selector)
    watch = script.Watch("mark", 5.0)
    yield watch, theirs, said
    selector.close()
    os.close(ours)
    os.close(theirs)


def test_a_job_that_goes_on_is_said_at_once(watch_of_hosts: tuple[Any, int, list[Any]]) -> None:
    watch, _, said = watch_of_hosts
    watch.guards = [SimpleNamespace(quiet=None, silent=0.0, started=0)]
    for quiet in (None, 0.0, 2.5, 60.0, 61.0, None, 0.0, 0.0, 3.0, 0.0):
        watch.guards[0].quiet = quiet
        watch._tick()
    assert said == [{"quiet": 60.0}, {"quiet": 0.0}], "without ranks, no rank goes on"


def test_where_the_time_of_ranks_goes_is_said_once_with_their_host(watch_of_hosts: tuple[Any, int, list[Any]]) -> None:
    watch, _, said = watch_of_hosts
    script = load("job_on_hosts", resources.hostside("job.py"))
    ranks = [{"rank": 3, "signs": {"cpu": 0.5}}]
    guard = script.Guard("b", ["echo", json.dumps({"ranks": ranks})], [])
    ready = [(SimpleNamespace(data=guard, fileobj=None), 1)]
    watch._selector = SimpleNamespace(select=lambda _seconds: ready, unregister=lambda _file: None, close=watch._selector.close)
    while not guard.is_over:
        watch._tick()
    assert said == [{"host": "b", "ranks": ranks}]
    guard.process.communicate()


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ({"host": "other", "ranks": [{"rank": 1, "signs": {"cpu": 0.5}}]}, [("node2", 1)]),
        ({"host": "", "ranks": [{"rank": 0, "signs": {}}]}, [("node1", 0)]),
        ({"host": "elsewhere", "ranks": [{"rank": 1, "signs": {}}]}, []),
        ({"host": "", "ranks": [{"rank": 1, "signs": {"luck": 1.0}}]}, []),
        ({"host": "", "ranks": [{"rank": 1, "signs": {"cpu": 1e9}}]}, []),
        ({"host": "", "ranks": [{"rank": 1, "signs": {}}] * 300}, []),
    ],
)
def test_of_what_hosts_say_of_their_ranks_only_what_is_valid_is_heard(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], heard: list[tuple[str, int]]
) -> None:
    taken: list[tuple[str, int]] = []
    watch: Any = SimpleNamespace(
        action=None, attend=lambda: None, ranks=lambda host, ranks: taken.extend((host, one.rank) for one in ranks)
    )

    def stream(_session: Any, _host: str, _command: str, _feed: Any, take: Any, _stopping: Any) -> int:
        take(f"===PROVISION-JOB-ENDED-known==={json.dumps(said)}")
        return 0

    monkeypatch.setattr(jobs.secrets, "token_hex", lambda _size: "known")
    monkeypatch.setattr(jobs.ssh, "stream", stream)
    job = Job([], "node1", hosts=["other"], names={"other": "node2"})
    jobs.run(session("unit-signs"), job, "", Path(os.devnull), str, watch=watch)
    assert taken == heard


def test_a_restart_that_comes_in_parts_is_read(watch_of_hosts: tuple[Any, int, list[Any]]) -> None:
    watch, pipe, _ = watch_of_hosts
    told: list[str] = []
    watch.guards = [SimpleNamespace(quiet=None, silent=0.0, started=0, tell=told.append)]
    for part in (b"\nres", b"tart", b"\n\n"):
        assert told == []
        os.write(pipe, part)
        watch._tick()
    assert told == ["restart"]


def test_a_restart_that_is_asked_for_during_a_heartbeat_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe to the host is ours here: it decides when."""
    watch: Any = SimpleNamespace(action=None, attend=lambda: None, line=lambda _text: None)
    written: list[bytes] = []

    def stream(_session: Any, _host: str, _command: str, feed: Any, _take: Any, stopping: Any) -> int:
        def write(data: bytes) -> None:
            written.append(data)
            if data == b"\n" and written.count(data) == 1:
                watch.action = "restart"
                stopping()

        pipe = SimpleNamespace(write=write, flush=lambda: None)
        feeder = threading.Thread(target=feed, args=(pipe,), daemon=True)
        feeder.start()
        deadline = time.monotonic() + 3
        while b"restart\n" not in written and time.monotonic() < deadline:
            time.sleep(0.01)
        watch.action = "kill"
        stopping()
        feeder.join()
        return 0

    monkeypatch.setattr(jobs.ssh, "stream", stream)
    jobs.run(session("unit-restart"), Job([]), "", Path(os.devnull), str, watch=watch)
    assert written[1:] == [b"\n", b"restart\n"]


def test_a_stalled_job_that_does_not_end_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the job's place: who does not end with its standard input."""
    monkeypatch.setattr(jobs, "_END_S", 0.05)
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o700)
    watch: Any = SimpleNamespace(action="kill", attend=lambda: None, line=lambda _text: None)
    started = time.monotonic()
    result = jobs.run(session("unit-stalled"), Job([], python=str(tmp_path / "python")), "", Path(os.devnull), str, watch=watch)
    assert time.monotonic() - started < 30
    assert (result.verdict, result.interrupted) == (Verdict("gone", "", code=result.code), False)


def test_sweep_ends_marked_processes_only() -> None:
    environment = dict(os.environ)
    ours = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo trapped; sleep 300; :"],
        env={**environment, "PROVISION_RUN_ID": f"{RUN_ID}-sweep"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    other = subprocess.Popen(["sleep", "300"], env={**environment, "PROVISION_RUN_ID": f"{RUN_ID}-sweep-not"})
    try:
        assert ours.stdout is not None
        assert ours.stdout.readline() == b"trapped\n"
        said = subprocess.run(
            [sys.executable, "-c", resources.script("guard.py"), f"{RUN_ID}-sweep"], capture_output=True, text=True, check=True
        ).stdout
        assert "sleep (pid" in said
        assert ours.wait(timeout=10) != 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_sweep_ends_parents_before_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers begin again at 300 after the highest one, so a child may have the smaller."""
    script = load_script("guard.py")
    found = {}
    for name in ("parent", "child"):
        found[subprocess.Popen(["sleep", "300"]).pid] = name
        time.sleep(0.05)  # the kernel notes beginnings in hundredths of a second
    ended: list[int] = []
    try:
        monkeypatch.setattr(script, "marked", lambda _run_id, _spared: {} if ended else dict(reversed(found.items())))
        monkeypatch.setattr(script, "signal_all", lambda pids, _number: ended.extend(pids))
        script.sweep("a run", set(), 1.0)
        assert [found[pid] for pid in ended] == ["parent", "child"]
    finally:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_sweep_waits_for_killed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard holds the locks of its folders until it is gone; they are looked for right after."""
    script = load_script("guard.py")
    left = [{1: "guard"}] * 4
    monkeypatch.setattr(script, "marked", lambda _run_id, _spared: left.pop() if left else {})
    monkeypatch.setattr(script, "signal_all", lambda _pids, _number: None)
    script.sweep("a run", set(), 0.0)
    assert not left


def test_program_does_not_start_after_its_parent_was_killed(tmp_path: Path) -> None:
    script = load("rank_on_hosts", resources.hostside("rank.py"))
    pid = os.fork()
    if pid == 0:
        try:
            script.become(["touch", str(tmp_path / "begun")], set(), os.getpid())  # our parent is another
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    assert not (tmp_path / "begun").exists()
