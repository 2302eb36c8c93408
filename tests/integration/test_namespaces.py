"""Hosts of Linux namespaces, as where no container engine answers: the main job runs on them, and nothing of them is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import missing
from hosts import good, provision, report, root, wait_until

from provision import sandbox as sandboxes
from provision.sandbox import Sandbox, names, namespaces

NAME = f"it{os.getpid()}-spaces"


@pytest.fixture(scope="module", autouse=True)
def possible(own_state: Path) -> None:
    if why := namespaces.missing():
        missing(why)


@pytest.fixture(scope="module")
def pair(sandbox_factory) -> Sandbox:
    return sandbox_factory(2, "debian:12", name="pair", engine="namespaces")


def world(name: str) -> dict[str, object]:
    """What a sandbox of that name could leave on this machine."""
    bridge = namespaces._bridge(name)
    ruled = subprocess.run(["sh", "-c", "iptables-save; nft list ruleset"], capture_output=True, text=True, check=False).stdout
    return {
        "namespaces": sorted(path.name for path in Path("/run/netns").glob(f"provision-{name}-*")),
        "links": sorted(path.name for path in Path("/sys/class/net").glob(f"{bridge}*")),
        "rules": [line for line in ruled.splitlines() if bridge in line],
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"sandbox/{name}/" in line],
        "processes": processes_in(names.folder(name)),
        "files": names.folder(name).exists(),
    }


def processes_in(folder: Path) -> list[str]:
    """Processes whose working folder or arguments are in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in os.readlink(process / "cwd") or str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:  # it has ended
            continue
    return found


def test_they_are_hosts_apart_from_this_machine_and_from_each_other(pair, ssh):
    one, two = pair.hosts
    for user in ("trainer", "root"):
        assert ssh(pair, one, "hostname; id -un", user=user).stdout.split() == ["node1", user]
    assert ssh(pair, one, f"getent hosts {two.name}").stdout.split()[0] == two.address
    assert ssh(pair, one, "sudo -n id -u").stdout.strip() == "0"
    assert "sshd" in root(one, "ps -p 1 -o args=")
    for forbidden in (
        "echo 1 >/proc/sys/vm/swappiness",
        "mount -t tmpfs none /mnt",
        "mknod /tmp/disk b 8 0",
        f"ls {names.folder(pair.name)}",
    ):
        assert ssh(pair, one, forbidden, user="root").returncode != 0, forbidden
    root(one, "touch /etc/only-here")
    assert root(two, "ls /etc/only-here 2>/dev/null || echo none") == "none"
    assert not Path("/etc/only-here").exists()


def test_up_again_is_the_same_sandbox_and_other_values_are_refused(pair):
    again = good(provision("sandbox", "up", "--name", pair.name, "--engine", "namespaces"))
    assert again.stdout.strip() == str(pair.inventory)
    assert "is up already" in again.stderr
    assert provision("sandbox", "up", "--name", pair.name, "-n", "3").returncode == 1
    shown = good(provision("sandbox", "ls")).stdout
    assert any(line.split()[:4] == [pair.name, "2", "namespaces", "running"] for line in shown.splitlines()), shown


@pytest.mark.slow
def test_the_training_job_runs_on_them(pair):
    document = report(good(provision("up", str(pair.inventory), "--json")))
    assert [host["state"] for host in document["hosts"]] == ["ready", "ready"]
    assert (document["smoke"]["size"], document["smoke"]["ok"]) == (4, True)


@pytest.fixture
def begun() -> Iterator[subprocess.Popen[str]]:
    """`up` of a sandbox in a process of its own, which ends by itself; what it made is removed after the test."""
    code = """
        import sys
        from provision import sandbox
        sandbox.up(count=2, base="debian:12", name=sys.argv[1], say=lambda line: print(line, flush=True), engine="namespaces")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process
        process.kill()
    sandboxes.down(NAME, say=lambda _line: None)


def test_a_killed_controller_leaves_nothing_that_down_does_not_remove(begun):
    before = world(NAME)
    assert not any(before.values())
    assert begun.stdout is not None
    assert any("waiting for sshd" in line for line in begun.stdout)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    left = world(NAME)
    assert (len(left["namespaces"]), left["files"]) == (2, True)
    assert all(left[what] for what in ("links", "rules", "processes"))
    assert "host node1 (namespaces)" in sandboxes.down(NAME, say=lambda _line: None)
    wait_until(lambda: world(NAME) == before)
    assert sandboxes.down(NAME, say=lambda _line: None) == []


@pytest.mark.slow
def test_hosts_outlive_the_command_that_made_them_and_down_needs_no_files(begun):
    begun.communicate(timeout=600)
    assert begun.returncode == 0
    made = sandboxes.status(NAME)
    assert made is not None
    assert made.running
    shutil.rmtree(names.folder(NAME))
    sandboxes.down(NAME, say=lambda _line: None)
    wait_until(lambda: not any(world(NAME).values()))


@pytest.mark.slow
def test_ctrl_c_removes_what_was_made(begun):
    assert begun.stdout is not None
    assert any("starting 2 host" in line for line in begun.stdout)
    begun.send_signal(signal.SIGINT)
    begun.wait(timeout=120)
    wait_until(lambda: not any(world(NAME).values()))


@pytest.mark.slow
def test_after_a_reboot_only_files_are_left_and_down_removes_them(begun, monkeypatch):
    begun.communicate(timeout=600)
    with monkeypatch.context() as patched:  # a reboot ends processes, links and rules
        patched.setattr(sandboxes.lifecycle.shutil, "rmtree", lambda _folder: None)
        sandboxes.down(NAME, say=lambda _line: None)
    assert sandboxes.status(NAME) is None
    assert NAME not in [one.name for one in sandboxes.every()]
    assert sandboxes.down(NAME, say=lambda _line: None) == [f"folder {names.folder(NAME)}"]


@pytest.mark.slow
def test_where_debootstrap_cannot_run_hosts_see_this_machines_programs(sandbox_factory, ssh, monkeypatch, tmp_path):
    if not shutil.which("apt-get"):
        pytest.skip("this machine is not Debian or derived from it")
    monkeypatch.setattr(sandboxes.lifecycle.debootstrap, "missing", lambda: "debootstrap is not installed (package debootstrap)")
    monkeypatch.setattr(namespaces.debootstrap, "missing", lambda: "debootstrap is not installed (package debootstrap)")
    probe = Path("/opt/provision-test-probe")
    probe.mkdir()
    try:
        own = sandbox_factory(1, None, name="own", engine="namespaces")
        assert own.hosts[0].base == namespaces.THIS_MACHINE
        assert root(own.hosts[0], f"ls {probe} /root/.bashrc 2>/dev/null || echo hidden") == "hidden"
        root(own.hosts[0], "touch /usr/bin/only-here /opt/only-here")
        assert not Path("/usr/bin/only-here").exists()
        assert ssh(own, own.hosts[0], "sudo -n id -u").stdout.strip() == "0"
    finally:
        probe.rmdir()


RANK = """
import os, socket, sys, time
if os.environ["RANK"] == "0":
    listening = socket.create_server(("", 29500))
    print("LISTEN", flush=True)
    other, _ = listening.accept()
    other.recv(1)
else:
    print("LISTEN", flush=True)
    other = socket.create_connection((sys.argv[1], 29500))
    os.mkfifo("/tmp/batches")
    open("/tmp/batches")
"""


def test_the_rank_that_keeps_a_job_waiting_is_named_across_hosts(pair, ssh):
    """By the hosts' login user, who may become root; Python is the only thing that is there."""
    one, two = pair.hosts
    pids = {}
    for rank, host in enumerate(pair.hosts):
        root(host, f"cat >/tmp/rank.py <<'END'\n{RANK}\nEND")
        variables = f"RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR={one.address} MASTER_PORT=29500"
        command = f"{variables} setsid nohup python3 /tmp/rank.py {one.address} >/tmp/rank.log 2>&1 </dev/null & echo $!"
        pids[host.name] = int(ssh(pair, host, command).stdout)
        wait_until(lambda host=host: "LISTEN" in root(host, "cat /tmp/rank.log"), 20)
    try:
        wait_until(lambda: root(two, "ls /tmp/batches 2>/dev/null || true"), 20)
        found = provision("doctor", "--job", str(pair.inventory))
        lines = found.stdout.splitlines()
        assert found.returncode == 1, found.stderr
        assert lines[0].startswith("rank 1 on node2 waits in openat of /tmp/batches on ")
        assert " at rank.py:12; rank 0 waits for it in recvfrom for " in lines[0]
        assert lines[0].endswith(" at rank.py:7")
    finally:
        for host in pair.hosts:
            root(host, f"kill -KILL {pids[host.name]}; rm -f /tmp/rank.* /tmp/batches")
    none = provision("doctor", "--job", str(pair.inventory))
    assert none.returncode == 2
    assert "no job has ranks on node[1-2]" in none.stderr
