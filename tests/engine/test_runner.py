"""A function on several ranks: results, errors with their rank, output, and nothing left running, here and over a real sshd."""

from __future__ import annotations

import functools
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cases import slow_but_last
from collective_core.errors import CollectiveError
from collective_core.launch import cluster, frames, function, horovod_run, processes
from collective_core.launch.frames import Frame
from collective_core.launch.hosts import Host, place_ranks, read
from collective_core.launch.outcomes import Outcomes
from collective_core.launch.processes import rank_settings, start_code
from collective_core.launch.remote import SSH
from processes import GONE, processes_with, wait_for, wait_until_gone

from collective_core import NotSendableError, RankFailedError, Runner, run


def script(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A program of the user's that calls Runner."""
    path = tmp_path / "program.py"
    path.write_text(body)
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True)
def as_a_user_has_it(monkeypatch):
    """Without what may hide that output waits in a buffer."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


# ----------------------------------------------------------------------------------------------------- on this machine


@pytest.mark.parametrize("np", [1, -3])
def test_every_ranks_result_comes_back_in_order(np):
    def train(scale, *, shift=0):
        import numpy

        import collective_core as cc

        cc.init()
        total = cc.allreduce(numpy.full(3, cc.rank() + 1.0), op=cc.Sum)
        return cc.rank(), cc.size(), (total * scale + shift).tolist()

    size = abs(np)
    expected = sum(range(1, size + 1)) * 10 + 5.0
    assert Runner(np=np).run(train, 10, shift=5) == [(rank, size, [expected] * 3) for rank in range(size)]


def test_run_as_in_horovod():
    assert run(lambda a, b: a + b, args=(1,), kwargs={"b": 2}, np=2) == [3, 3]


def test_hosts_of_the_cluster_are_reached_as_the_toolkit_has_left_it_unless_the_user_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cluster.reached([Host("node2", 1)], SSH) == [Host("node2", 1)]
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/provision_config").write_text("Host node2 10.0.0.2\n    HostName 10.0.0.2\nHost *\n    BatchMode yes\n")
    config = ("-F", f"{tmp_path}/.ssh/provision_config")
    hosts = [Host("10.0.0.2", 1), Host("localhost", 1), Host("elsewhere", 2), Host("two", 1, ("-F", "mine", "-p", "2", "node2"))]
    ways = [(*config, "10.0.0.2"), (), (), (*config, "-F", "mine", "-p", "2", "node2")]  # of two files ssh reads the last
    for ssh in (SSH, [*SSH, "-p", "22"]):
        assert [host.way for host in cluster.reached(hosts, ssh)] == ways
    for own in (["ssh"], [*SSH, "-F", "mine"], ["kubectl", "exec"]):
        assert cluster.reached(hosts, own) == hosts


#: Every argument of horovod.run (0.28.1), in its order, with a value that it has nowhere by default.
HOROVODS = {
    "num_proc": 2,
    "min_num_proc": 1,
    "max_num_proc": 4,
    "slots": 3,
    "reset_limit": 5,
    "cooldown_range": (6, 7),
    "hosts": "a,b:2",
    "hostfile": None,
    "host_discovery_script": None,
    "start_timeout": 8,
    "ssh_port": 9,
    "ssh_identity_file": "key",
    "disable_cache": True,
    "output_filename": "out",
    "verbose": True,
    "use_gloo": True,
    "use_mpi": None,
    "mpi_args": "--x",
    "network_interface": "eth0",
    "network_interfaces": None,
    "executable": "/py",
    "np": None,
    "min_np": None,
    "max_np": None,
}


def test_the_arguments_of_horovods_run(monkeypatch, tmp_path):
    seen = {}

    class Noted:
        def __init__(self, *args, **more):
            bound = inspect.signature(Runner).bind(*args, **more)
            seen.update(bound.arguments)

        def run(self, function, *args, **kwargs):
            return [function(*args, **kwargs)]

    monkeypatch.setattr(horovod_run, "Runner", Noted)
    assert list(inspect.signature(run).parameters)[:27] == ["func", "args", "kwargs", *HOROVODS]
    with pytest.warns(UserWarning, match="mpi_args has no effect"):
        assert run(lambda *words: words, (1,), {}, *HOROVODS.values()) == [(1,)]
    assert (seen["np"], seen["min_np"], seen["max_np"], seen["reset_limit"], seen["cooldown_range"]) == (2, 1, 4, 5, (6, 7))
    assert (seen["hosts"], seen["env"], seen["python"]) == (["a:3", "b:2"], {"COLLECTIVE_NETWORK": "eth0"}, "/py")
    assert (list(seen["ssh"][-4:]), seen["start_timeout"]) == (["-p", "9", "-i", "key"], 8)
    assert (seen["output_filename"], seen["verbose"]) == ("out", True)
    run(max, (1, 2), np=3, min_np=2, max_np=5, network_interfaces=["eth0", "eth1"], elastic_timeout=4)
    assert (seen["np"], seen["min_np"], seen["max_np"], seen["elastic_timeout"]) == (3, 2, 5, 4)
    assert seen["env"] == {"COLLECTIVE_NETWORK": "eth0,eth1"}
    run(max, (1, 2), num_proc=3, max_num_proc=5)
    assert (seen["min_np"], seen["max_np"]) == (None, None), "elastic is what has a minimum or a script"
    for wrong in ({"hosts": "a", "hostfile": "b"}, {"use_gloo": True, "use_mpi": True}, {"hostfile": str(tmp_path / "none")}):
        with pytest.raises(CollectiveError) as error:
            run(max, (1, 2), **wrong)
        assert error.value.kind == "invalid"


def test_run_with_a_script_that_says_where(tmp_path):
    def train():
        import collective_core.torch as hvd

        hvd.init()
        return hvd.elastic.run(lambda _: (hvd.rank(), hvd.size()))(hvd.elastic.ObjectState(step=0))

    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    assert run(train, num_proc=2, slots=2, host_discovery_script=str(script)) == [(0, 2), (1, 2)]
    assert run(train, num_proc=2, min_num_proc=1, slots=2, host_discovery_script=str(script)) == [(0, 2)], "as many as it has at least"
    with pytest.raises(CollectiveError, match="the script that lists the hosts failed"):
        run(train, host_discovery_script=str(tmp_path / "none"))


def test_what_ranks_print_is_kept_by_rank(tmp_path):
    def speak():
        import os
        import sys

        print("good", os.environ["HOROVOD_LOCAL_RANK"])
        print("bad", file=sys.stderr)

    Runner(np=2, output_filename=str(tmp_path / "kept")).run(speak)
    assert [(tmp_path / f"kept/rank.{rank}/stdout").read_text() for rank in range(2)] == ["good 0\n", "good 1\n"]
    assert (tmp_path / "kept/rank.1/stderr").read_text() == "bad\n"


def test_the_rank_that_failed_first_is_blamed_and_not_the_one_that_was_heard_first():
    outcomes = Outcomes({0: "a", 1: "b"})
    outcomes.note(frames.exit_of(0, 3, ago=0.1))
    outcomes.note(frames.exit_of(1, 4, ago=2.0))
    assert outcomes.failed == [1, 0]
    with pytest.raises(RankFailedError, match="rank 1 on b ended with exit code 4"):
        outcomes.results()


def test_the_environment_and_the_output_of_ranks(capfd):
    def speak():
        print("hello from", os.environ["FRUIT"])
        print("and a complaint", file=sys.stderr)
        sys.stdout.write("no newline")

    Runner(np=2, env={"FRUIT": "pear"}).run(speak)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] hello from pear", "[0] no newline", "[1] hello from pear", "[1] no newline"]
    assert sorted(err.splitlines()) == ["[0] and a complaint", "[1] and a complaint"]


def test_the_rank_that_raised_is_named_and_not_those_that_lost_it():
    def train():
        import numpy

        import collective_core as cc

        cc.init()
        cc.barrier()
        if cc.rank() == 1:
            raise ValueError("a learning rate of -1")
        cc.allreduce(numpy.ones(3))

    with pytest.raises(RankFailedError) as caught:
        Runner(np=3).run(train)
    error = caught.value
    assert (error.rank, error.host, error.exception) == (1, "localhost", "ValueError")
    assert "rank 1 on localhost raised ValueError: a learning rate of -1" in str(error)
    assert 'raise ValueError("a learning rate of -1")' in str(error)
    assert "launch/rank.py" not in str(error), "our own frames are nobody's business"


@pytest.mark.parametrize(
    ("end", "words"), [(lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (lambda: os._exit(7), "exit code 7")]
)
def test_a_rank_that_dies_is_named(end, words):
    def train():
        import numpy

        import collective_core as cc

        cc.init()
        cc.barrier()
        if cc.rank() == 2:
            end()
        cc.allreduce(numpy.ones(3))

    with pytest.raises(RankFailedError, match=f"rank 2 on localhost .*{words}"):
        Runner(np=3).run(train)


def test_the_first_cause_is_named_when_others_wrap_its_consequence():
    def train():
        import atexit
        import time

        import numpy

        import collective_core as cc

        cc.init()
        cc.barrier()
        if cc.rank() == 1:
            atexit.register(time.sleep, 1.0)
            raise ValueError("the real cause")
        try:
            cc.allreduce(numpy.ones(3))
        except cc.CollectiveError as error:
            raise RuntimeError("the step failed") from error

    with pytest.raises(RankFailedError, match="rank 1 on localhost raised ValueError: the real cause"):
        Runner(np=2).run(train)


def test_a_failure_ends_the_job_although_others_go_on_printing():
    def train(own):
        import time

        if os.environ["COLLECTIVE_RANK"] == "1":
            raise ValueError("no more")
        while True:
            print("still here")
            time.sleep(0.001)

    begun = time.monotonic()
    with pytest.raises(RankFailedError, match="no more"):
        Runner(np=2).run(train, None)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("fails", [True, False])
def test_a_thread_that_never_ends_does_not_keep_the_job(monkeypatch, fails):
    monkeypatch.setattr("collective_core.launch.runner.LEAVING", 1.0)

    def train():
        import threading

        threading.Thread(target=threading.Event().wait).start()
        if fails:
            raise ValueError("and a thread left")
        return 5

    if fails:
        with pytest.raises(RankFailedError, match="and a thread left"):
            Runner(np=1).run(train)
    else:
        assert Runner(np=1).run(train) == [5]


def test_lines_appear_when_they_are_printed_and_nothing_of_them_is_lost(capfd, tmp_path):
    seen = []

    class Screen:
        encoding = "ascii"

        def write(self, text):
            seen.append(text)
            (tmp_path / "seen").touch()

        def flush(self):
            pass

    def train(file):
        import time

        print("café")
        sys.stdout.write("10 %\r20 %\r")
        sys.stdout.flush()
        end = time.monotonic() + 30
        while not os.path.exists(file) and time.monotonic() < end:
            time.sleep(0.01)
        print("last words" if os.path.exists(file) else "the first line waited for the last")
        os._exit(3)

    screen, sys.stdout = sys.stdout, Screen()
    try:
        with pytest.raises(RankFailedError, match="exit code 3 before"):
            Runner(np=1).run(train, str(tmp_path / "seen"))
    finally:
        sys.stdout = screen
    assert seen == ["[0] caf\\xe9\n", "[0] 10 %\r", "[0] 20 %\r", "[0] last words\n"]


def test_odd_exceptions_and_a_closed_output_are_told_all_the_same():
    class Odd(Exception):
        kind = object()

        def __str__(self):
            raise ZeroDivisionError

    def odd():
        raise Odd

    def closes(value):
        sys.stdout.close()
        if value is None:
            raise ValueError("after closing")
        return value

    with pytest.raises(RankFailedError, match="raised Odd: "):
        Runner(np=1).run(odd)
    assert Runner(np=1).run(closes, 42) == [42]
    with pytest.raises(RankFailedError, match="after closing"):
        Runner(np=1).run(closes, None)
    with pytest.raises(RankFailedError, match="was ended by signal 40") as caught:
        Runner(np=1).run(lambda: os.kill(os.getpid(), 40))
    assert (copy := pickle.loads(pickle.dumps(caught.value))).rank == 0  # noqa: S301
    assert str(copy) == str(caught.value)


def test_a_file_in_the_working_directory_is_no_module_of_a_rank(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('foreign code ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [tmp_path.parent, *(entry for entry in sys.path if entry)])
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    assert Runner(np=1).run(lambda: (os.getcwd(), sys.argv)) == [(str(tmp_path), ["train.py", "--epochs", "3"])]


def test_a_secret_of_another_job_does_not_disturb(monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("a secret of another job altogether")
    monkeypatch.setenv("COLLECTIVE_SECRET_FILE", str(tmp_path / "secret"))

    def train():
        import collective_core as cc

        cc.init()
        return cc.size()

    assert Runner(np=2).run(train) == [2, 2]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"directory": "/no/such/folder"}, "ranks cannot be started.*/no/such/folder"),
        ({"python": "/no/such/python"}, "ranks cannot be started.*/no/such/python"),
        ({"env": {"A=B": "1"}}, "ranks cannot be started"),
        ({"hosts": "elsewhere", "ssh": ["/no/such/ssh"]}, "host elsewhere cannot be reached.*/no/such/ssh"),
    ],
)
def test_what_cannot_be_started_is_one_clear_error(options, complaint):
    with pytest.raises(CollectiveError, match=complaint):
        Runner(np=1, **options).run(print)


def test_runs_one_after_the_other_leave_no_threads_and_no_open_files(tmp_path):
    def train(mark):
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60)  # {mark}"], start_new_session=True)
        return 1

    mark = f"daemon-{tmp_path.name}"
    Runner(np=2).run(int)
    time.sleep(0.5)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(3):
            assert Runner(np=2).run(train, mark) == [1, 1]
        end = time.monotonic() + 10
        while (threading.active_count(), len(os.listdir("/proc/self/fd"))) > (threads, files) and time.monotonic() < end:
            time.sleep(0.1)
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
    finally:
        subprocess.run(["pkill", "-f", mark], check=False)


def test_sys_exit_is_an_end_and_not_a_traceback():
    assert Runner(np=1).run(lambda: sys.exit()) == [None]
    with pytest.raises(RankFailedError, match="raised SystemExit: 3"):
        Runner(np=1).run(lambda: sys.exit(3))


def test_what_cannot_be_sent_is_named_with_the_way_to_it():
    lock = threading.Lock()

    def guarded():
        with lock:
            return 1

    with pytest.raises(NotSendableError, match=r"the variable 'lock' that guarded uses is of type _thread.lock.*make it inside"):
        Runner(np=1).run(guarded)
    with pytest.raises(NotSendableError, match=r"argument settings of <lambda>\['model'\]\[1\] is of type _thread.lock"):
        Runner(np=1).run(lambda settings: settings, settings={"model": [1, lock]})
    with pytest.raises(NotSendableError, match=r"argument 1 of the function is of type _thread.lock"):
        Runner(np=1).run(functools.partial(print, lock))
    with pytest.raises(RankFailedError, match=r"what <lambda> returned is of type _thread.lock"):
        Runner(np=1).run(lambda: threading.Lock())


def test_nothing_that_a_rank_has_started_outlives_the_job(tmp_path):
    def train(mark):
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {mark}"])
        raise RuntimeError("enough")

    with pytest.raises(RankFailedError, match="enough"):
        Runner(np=2).run(train, tmp_path.name)
    assert wait_until_gone(tmp_path.name) == []


def assert_ranks_end_with(number: signal.Signals, tmp_path: Path, runner: str) -> None:
    """A program whose two ranks wait, each for a child of its own, is sent a signal: nothing of it is left in time."""
    mark = f"sleeper-{tmp_path.name}-{number.name}"
    program = script(
        tmp_path,
        f"""
import subprocess, sys, time
from collective_core import Runner

def train():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # {mark}"])
    print("started", flush=True)
    time.sleep(600)

{runner}.run(train)
""",
    )
    assert program.stdout.readline().endswith("started\n")
    assert program.stdout.readline().endswith("started\n")
    assert wait_for(mark, 2)
    begun = time.monotonic()
    program.send_signal(number)
    program.communicate(timeout=30)
    assert wait_until_gone(mark) == []
    assert time.monotonic() - begun < GONE + 1
    assert program.returncode != 0


@pytest.mark.parametrize("number", [*slow_but_last(signal.SIGTERM, signal.SIGINT), signal.SIGKILL])
def test_ranks_end_with_the_program_that_started_them(tmp_path, number):
    assert_ranks_end_with(number, tmp_path, "Runner(np=2)")


def test_a_second_ctrl_c_does_not_leave_ranks_behind(tmp_path):
    mark = f"stubborn-{tmp_path.name}"
    program = script(
        tmp_path,
        f"""
import signal, subprocess, sys, time
from collective_core import Runner

def train():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)  # {mark}"])
    print("started", flush=True)
    time.sleep(600)

try:
    Runner(np=2).run(train)
except KeyboardInterrupt:
    print("interrupted", flush=True)
time.sleep(600)
""",
    )
    assert program.stdout.readline().endswith("started\n")
    assert program.stdout.readline().endswith("started\n")
    program.send_signal(signal.SIGINT)
    time.sleep(0.5)
    program.send_signal(signal.SIGINT)
    assert "interrupted" in program.stdout.readline()
    left = wait_until_gone(mark)
    program.kill()
    program.communicate()
    assert left == []


# -------------------------------------------------------------------------------------------------------- other hosts


def test_hosts_are_read_in_every_form(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=2\nb:3  # ours\n\nc\n")
    expected = [Host("a", 2), Host("b", 3), Host("c", 1)]
    assert read("a:2,b:3,c") == read(["a:2", "b:3", "c"]) == read({"a": 2, "b": 3, "c": 1}) == read(str(file)) == expected
    file.write_text("[fe80::1]:4\n[fe80::3]\n")
    assert read(str(file)) == [Host("fe80::1", 4), Host("fe80::3", 1)]
    assert read("[fe80::1]:4,fe80::2") == [Host("fe80::1", 4), Host("fe80::2", 1)]
    assert place_ranks(expected, None) == {"a": [0, 1], "b": [2, 3, 4], "c": [5]}
    assert place_ranks(expected, 3) == {"a": [0, 1], "b": [2]}


@pytest.mark.parametrize(
    ("hosts", "np", "complaint"),
    [
        ("a:0", None, "slots of host a is '0'"),
        ("a:2,a:1", None, "a is there twice"),
        ("-oProxyCommand=x", None, "not the name of a host"),
        ("a:2", 3, "3 ranks do not fit into the 2 slots"),
        (None, None, "say how many ranks"),
        (None, 0, "at least 1"),
        ("", None, "not the name of a host"),
    ],
)
def test_hosts_and_numbers_that_make_no_sense(hosts, np, complaint):
    with pytest.raises(CollectiveError, match=complaint):
        Runner(np=np, hosts=hosts)


INVENTORY = """
# a cluster
gpu[01:02] slots=2            ; both
[all:vars]
ansible_user=ann
[west]
gpu02 ansible_host=10.0.0.7 ansible_port=2222
big.site ansible_ssh_common_args="-o 'ProxyJump=gate way'" slots=4
[far:children]
west
[far:vars]
ansible_user = 'bob'
ansible_ssh_private_key_file=/keys/far
[west:vars]
ansible_ssh_private_key_file=/keys/west
"""


def test_the_hosts_of_an_inventory(tmp_path):
    file = tmp_path / "hosts.ini"
    file.write_text(INVENTORY)
    assert read(str(file)) == [
        Host("gpu01", 2, ("-l", "ann", "gpu01")),
        Host("gpu02", 2, ("-p", "2222", "-l", "bob", "-i", "/keys/west", "10.0.0.7")),
        Host("big.site", 4, ("-l", "bob", "-i", "/keys/west", "-o", "ProxyJump=gate way", "big.site")),
    ]
    file.write_text("[ours]\nnode9 ansible_connection=local slots=3\n")
    assert read(str(file)) == [Host("localhost", 3)]
    assert read(str(file))[0].is_here


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a]\nnode1 slots=two\n", "slots of host node1 is 'two'"),
        ("node1 ansible_host=-oProxyCommand=x\n", "'-oProxyCommand=x' is not the name of a host"),
        ("[a]\nnode1 and more\n", r"hosts.ini:2: 'and' is not NAME=VALUE"),
        ("[a\nnode1 ansible_user=x\n", r"hosts.ini:1: '\[a' is no section"),
        ("[a:vars]\nansible_user=x\n", "names no host"),
        ("node1 ansible_host={{ it }}\n", "hosts.ini:1: ansible_host is a template"),
        ("node1 ansible_password=secret\n", "host node1: ansible_password is not read here"),
        ("node1 ansible_connection=docker\n", "host node1: ansible_connection is not read here"),
        ("node1\n[all:vars]\nansible_ssh_common_args=-o 'x\n", "node1: ansible_ssh_common_args: No closing quotation"),
        ("all:\n  hosts:\n    node1:\n", "this is YAML.*provision run --hosts"),
        ("[a:children]\nb\n[b:children]\na\n[c]\nnode1\n", "children of each other"),
        ("[a:children]\nb\n[c]\nnode1\n", "names b, and there is no such group"),
        ("[a]\nnode1 ansible_user='x\n", "hosts.ini:2: .*No closing quotation"),
    ],
)
def test_an_inventory_that_cannot_be_meant(tmp_path, text, complaint):
    (tmp_path / "hosts.ini").write_text(text)
    with pytest.raises(CollectiveError, match=complaint):
        Runner(hosts=str(tmp_path / "hosts.ini"))


def test_variables_beside_an_inventory_are_not_passed_over(tmp_path):
    (tmp_path / "hosts.ini").write_text("[a]\nnode1\n")
    (tmp_path / "group_vars").mkdir()
    with pytest.raises(CollectiveError, match=r"variables in group_vars beside it.*provision run --hosts"):
        Runner(hosts=str(tmp_path / "hosts.ini"))


def test_ranks_on_all_slots_of_an_inventory(ssh, tmp_path):
    """With nothing but the inventory saying how the hosts are reached."""

    def train():
        import collective_core as cc

        cc.init()
        return cc.rank(), cc.size(), bool(os.environ.get("SSH_CONNECTION"))

    said = dict(line.split(None, 1) for line in Path(ssh[2]).read_text().splitlines())
    (tmp_path / "hosts.ini").write_text(
        f"[ours]\nnode1 ansible_host={said['HostName']} slots=2\nnode2 ansible_host={said['HostName']}\n[all:vars]\n"
        f"ansible_port={said['Port']}\nansible_user={said['User']}\nansible_ssh_private_key_file={said['IdentityFile']}\n"
        f"ansible_ssh_common_args='-F /dev/null -o UserKnownHostsFile={said['UserKnownHostsFile']} -o IdentitiesOnly=yes'\n"
    )
    assert Runner(hosts=str(tmp_path / "hosts.ini")).run(train) == [(0, 3, True), (1, 3, True), (2, 3, True)]
    assert Runner(np=2, hosts=str(tmp_path / "hosts.ini"), min_np=2).run(train) == [(0, 2, True), (1, 2, True)]


@pytest.mark.parametrize("hosts", ["other:2,third:1", "localhost:1,other:2"])
def test_ranks_on_other_hosts(ssh, hosts, capfd):
    def train(values):
        import collective_core as cc

        cc.init()
        print("here")
        return cc.allreduce(values, op=cc.Sum).tolist(), bool(os.environ.get("SSH_CONNECTION"))

    import numpy

    found = Runner(hosts=hosts, ssh=ssh, env={"COLLECTIVE_TIMEOUT": "30"}).run(train, numpy.ones(2))
    assert [values for values, _ in found] == [[3.0, 3.0]] * 3
    assert [remote for _, remote in found] == [not hosts.startswith("localhost"), True, True]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] here", "[1] here", "[2] here"]


def test_without_any_word_the_ranks_are_on_all_slots_of_this_hosts_cluster(ssh, tmp_path, monkeypatch):
    """As on a host that the toolkit made ready: its environment lies beside the manifest."""

    def train():
        import collective_core as cc

        cc.init()
        return cc.size(), bool(os.environ.get("SSH_CONNECTION"))

    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    with pytest.raises(CollectiveError, match="say how many ranks"):
        Runner()
    monkeypatch.setattr("collective_core.launch.cluster.SSH_CONFIG", ssh[2])
    manifest = {"host": {"name": "node1", "slots": 2}, "members": {"other": {"slots": 1}, "node1": {"slots": 2}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert Runner().run(train) == [(3, True), (3, False), (3, False)]
    assert Runner(hosts="localhost:1,other:1").run(train) == [(2, False), (2, True)]
    (tmp_path / "manifest.json").write_text(json.dumps({"host": {"name": "node1", "slots": 2}}))
    assert Runner().run(train) == [(2, False), (2, False)]


def test_a_rank_that_fails_on_another_host(ssh):
    def train():
        import collective_core as cc

        cc.init()
        if cc.rank() == 1:
            raise KeyError("weights")
        cc.barrier()

    with pytest.raises(RankFailedError, match="rank 1 on other raised KeyError: 'weights'") as caught:
        Runner(hosts="localhost:1,other:1", ssh=ssh).run(train)
    assert 'raise KeyError("weights")' in caught.value.remote_traceback


def test_hosts_that_cannot_be_used_are_named(ssh):
    with pytest.raises(CollectiveError, match=r"no agent could be started on host other.*no/such/python"):
        Runner(hosts="other:1", ssh=ssh, python="/no/such/python").run(print)
    with pytest.raises(CollectiveError, match=r"no agent could be started on host nowhere\.invalid"):
        Runner(hosts="nowhere.invalid", ssh=ssh, start_timeout=20).run(print)
    with pytest.raises(CollectiveError, match="host other did not answer in time"):
        Runner(hosts="other", ssh=("sh", "-c", "sleep 5"), start_timeout=0.5).run(print)


def test_what_a_hosts_shell_prints_first_does_not_matter(ssh, tmp_path):
    chatty = tmp_path / "chatty"
    chatty.write_text(f"#!/bin/sh\necho 'Welcome to this host, use it well'\nexec {' '.join(ssh)} \"$@\"\n")
    chatty.chmod(0o755)
    assert Runner(hosts="other:1", ssh=[str(chatty)]).run(lambda: 1) == [1]
    chatty.write_text("#!/bin/sh\necho 'This account is closed'\n")
    with pytest.raises(CollectiveError, match="no agent could be started on host other: This account is closed"):
        Runner(hosts="other:1", ssh=[str(chatty)]).run(lambda: 1)


def test_a_rank_that_a_signal_has_stopped_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(processes, "STOPPED_RANK", 1.0)

    def stop():
        import collective_core as cc

        cc.init()
        if cc.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        cc.barrier()

    with pytest.raises(RankFailedError, match=r"rank 1 on localhost: process \d+ has been stopped for 1 s") as failed:
        Runner(np=2).run(stop)
    assert failed.value.rank == 1


def test_a_folder_that_another_host_lacks_is_named(ssh):
    with pytest.raises(RankFailedError, match=r"rank 0 on other could not be started.*/no/such/folder"):
        Runner(hosts="other:1", ssh=ssh, directory="/no/such/folder").run(print)


def test_hosts_that_do_not_answer_are_waited_for_together():
    begun = time.monotonic()
    with pytest.raises(CollectiveError, match="did not answer in time"):
        Runner(hosts="a,b,c,d", ssh=("sh", "-c", "sleep 60"), start_timeout=0.5).run(print)
    assert time.monotonic() - begun < 8


def test_an_agent_that_hears_nothing_of_its_controller_ends_its_ranks(tmp_path):
    """As when the controller's machine or the network is gone: the connection stays open and silent."""
    mark = f"forgotten-{tmp_path.name}"
    code = start_code("agent", here=True).replace("; main()", "; import collective_core.launch.agent as a; a.SILENCE = 3.0; main()")

    def train(mark):
        subprocess.run([sys.executable, "-c", f"import time; time.sleep(600)  # {mark}"], check=False)

    settings = rank_settings({"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "1", "COLLECTIVE_STORE": "local:x"}, sys.path, 1)
    plan = {"ranks": {"0": settings.decode()}, "environment": {}, "directory": None, "program": []}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        call = function.pack_call(train, (mark,), {})
        frames.write(agent.stdin, Frame("plan", -1, json.dumps(plan).encode()), Frame("call", -1, call))
        end = time.monotonic() + 30
        while not processes_with(mark) and agent.poll() is None and time.monotonic() < end:
            frames.write(agent.stdin, Frame("pulse", -1, b""))
            time.sleep(0.02)
        assert processes_with(mark)
        assert agent.wait(timeout=20) == 1
    assert wait_until_gone(mark) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_of_other_hosts_end_with_the_program_too(ssh, tmp_path, number):
    assert_ranks_end_with(number, tmp_path, f'Runner(hosts="other:1,third:1", ssh={ssh!r})')


def test_no_secret_is_on_a_command_line_or_in_an_environment(ssh):
    def look():
        import collective_core as cc

        cc.init()
        secret = os.environ["COLLECTIVE_SECRET"].encode()
        seen = []
        for place_ in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
            try:
                if secret in place_.read_bytes():
                    seen.append(str(place_))
            except OSError:
                continue
        cc.barrier()
        return seen

    assert Runner(hosts="other:1,third:1", ssh=ssh).run(look) == [[], []]
