"""What goes wrong while bare hosts are being installed, done for real: and that the next run fixes it.

The hosts get no PyTorch here (``--torch none``), because the faults are the same without and the engine's own check ends the job.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pexpect
import pytest
from hosts import container, good, marked_processes, provision, report, root, running, wait_until

from provision.base import paths
from provision.sandbox import Sandbox

pytestmark = pytest.mark.slow

LEAN = (
    "--torch",
    "none",
)


def last_report() -> dict:
    return json.loads((paths.runs() / "latest" / "report.json").read_text())


# --- a host that dies in the middle, and a hwloc that must go ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(sandbox_factory) -> Sandbox:
    """Debian 12 and Debian 13: the distribution has Open MPI 4.1.4 on one and 5.0.7 on the other."""
    return sandbox_factory(2, ["debian:12", "debian:13"], name="faults")


def old_hwloc(host, *, needed_by: str | None = None) -> None:
    """Install a package ``libhwloc5`` 1.11.9, as an upgraded machine still has it, and one that depends on it."""
    package = textwrap.dedent("""
        set -e
        make() { # name version depends
            mkdir -p /tmp/pkg/DEBIAN /tmp/pkg/usr/share/doc/$1
            printf 'Package: %s\\nVersion: %s\\nArchitecture: all\\n' $1 $2 > /tmp/pkg/DEBIAN/control
            printf 'Maintainer: test <test@example.org>\\nDescription: stand-in\\n' >> /tmp/pkg/DEBIAN/control
            [ -z "$3" ] || echo "Depends: $3" >> /tmp/pkg/DEBIAN/control
            dpkg-deb --build /tmp/pkg /tmp/$1.deb >/dev/null && dpkg --install /tmp/$1.deb && rm -rf /tmp/pkg /tmp/$1.deb
        }
        make libhwloc5 1.11.9-1 ""
    """)
    if needed_by:
        package += f"make {needed_by} 1.0 libhwloc5\n"
    root(host, package)


def installed(host, package: str) -> bool:
    return "ok installed" in root(host, f"dpkg-query -W -f '${{Status}}' {package} 2>/dev/null || true")


def test_a_host_that_dies_in_the_middle_does_not_stop_the_other_and_a_second_run_completes_it(mixed):
    one, two = mixed.hosts
    old_hwloc(one)
    old_hwloc(two, needed_by="simulator")
    with running("up", str(mixed.inventory), *LEAN) as run:
        run.wait_for_task("node2: python: Install Python packages")
        container(two).kill()
        ended = run.finish()
    container(two).start()
    assert ended.returncode == 1
    states = {host["host"]: host["state"] for host in last_report()["hosts"]}
    assert states == {"node1": "installed", "node2": "unreachable"}
    failure = next(entry for entry in last_report()["failures"] if entry["host"] == "node2")
    assert failure["where"].startswith(("openmpi", "nccl", "linker"))  # what comes next
    assert failure["hint"]
    assert "node2: " in ended.stdout
    assert "Traceback" not in ended.stderr + ended.stdout

    again = good(provision("up", str(mixed.inventory), *LEAN, "--json"))
    assert {host["state"] for host in report(again)["hosts"]} == {"ready"}
    assert report(again)["smoke"]["size"] == 4
    third = report(good(provision("up", str(mixed.inventory), *LEAN, "--json")))
    assert [host["changed"] for host in third["hosts"]] == [0, 0]


def test_both_debians_ended_with_the_same_open_mpi(mixed):
    said = {root(host, "/opt/provision/venv/bin/mpirun --version | head -1") for host in mixed.hosts}
    assert said == {"mpirun (Open MPI) 4.1.8"}
    sums = {root(host, "sha256sum /opt/provision/venv/lib/libmpi.so.40") for host in mixed.hosts}
    assert len(sums) == 1


def test_functions_do_not_travel_between_different_pythons_and_programs_run_on_both(mixed, ssh, tmp_path, monkeypatch):
    one, python = mixed.hosts[0], "/opt/provision/venv/bin/python"
    refused = ssh(mixed, one, f"{python} -c 'from collective_core import Runner; Runner().run(int)'")
    assert refused.returncode == 1
    said = refused.stderr.splitlines()[-1]
    assert re.search(r"functions travel between equal Pythons only: this one is 3\.11, \S+ has 3\.13", said), refused.stderr
    assert mixed.hosts[1].address in said or "node2" in said
    for host in mixed.hosts:
        wait_until(lambda host=host: not root(host, f"pgrep -af '^{python}' || true"))
    (tmp_path / "both.py").write_text("import sys, collective_core as cc\ncc.init()\nprint(cc.size(), sys.version_info[:2], flush=True)\n")
    monkeypatch.chdir(tmp_path)
    done = good(provision("run", "--gloo", "--hosts", str(mixed.inventory), "python", "both.py"))
    assert {"[0] 4 (3, 11)", "[2] 4 (3, 13)"} <= set(done.stdout.splitlines())


def test_a_bad_hwloc_went_where_nothing_needs_it_and_stayed_where_something_does(mixed):
    one, two = mixed.hosts
    assert not installed(one, "libhwloc5")
    assert installed(two, "libhwloc5")
    assert installed(two, "simulator")
    events = paths.runs().glob("2*/site/artifacts/ansible/job_events/*.json")
    assert any("simulator depends on libhwloc5" in event.read_text() for event in events)


# --- sudo, locks and interrupts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(sandbox_factory) -> Sandbox:
    """One bare host whose sudo asks for a password."""
    return sandbox_factory(1, "debian:12", sudo="password", name="guarded", slots=1)


def test_a_sudo_password_is_asked_for_and_a_wrong_one_is_refused(guarded, tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))  # with a build of the engine in it the host could do without root
    without = provision("up", str(guarded.inventory), *LEAN)
    assert without.returncode == 1
    assert "--ask-become-pass" in without.stdout
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-password\n")
    refused = provision("up", str(guarded.inventory), *LEAN, "--become-password-file", str(wrong))
    assert refused.returncode == 1
    assert "the sudo password is wrong" in refused.stdout
    assert "provision" not in root(guarded.hosts[0], "ls /opt")


def test_a_host_that_dies_inside_apt_is_explained(guarded):
    host = guarded.hosts[0]
    with running("up", str(guarded.inventory), *LEAN, "--become-password-file", str(guarded.become_password)) as run:
        run.wait_for_task("node1: packages: Record present packages")
        wait_until(lambda: "dpkg-deb" in root(host, "ps -eo comm"))  # in the middle of unpacking
        container(host).kill()
        ended = run.finish()
    container(host).start()
    assert ended.returncode == 1
    assert "packages / Install missing packages (apt)" in ended.stdout
    assert "it goes on where it stopped" in ended.stdout


def test_ctrl_c_in_apt_leaves_no_process_and_the_next_run_waits_for_a_lock_then_completes(guarded):
    host = guarded.hosts[0]
    word = ("--become-password-file", str(guarded.become_password))
    with running("up", str(guarded.inventory), *LEAN, *word) as run:
        run.wait_for_task("node1: packages: Record present packages")
        wait_until(lambda: "dpkg" in root(host, "ps -eo comm"))
        run.process.send_signal(signal.SIGINT)
        ended = run.finish(timeout=90)
    assert ended.returncode == 130
    assert "nothing of this run is left running" in ended.stderr
    assert marked_processes(guarded) == []
    assert not [name for name in root(host, "ps -eo comm").split() if name.startswith(("apt", "dpkg"))]

    hold = "import fcntl; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); open('/run/release').read()"
    root(host, "mkfifo /run/release")
    container(host).exec_run(["python3", "-c", hold], detach=True)
    with running("up", str(guarded.inventory), *LEAN, *word) as run:
        line = run.wait_for("waiting: the package manager is held by")
        assert "python3 (pid " in line
        root(host, "echo > /run/release")
        result = run.finish()
    good(result)
    assert last_report()["ok"]

    secret = guarded.become_password.read_text().strip()
    assert len(secret) >= 8
    for file in (path for path in paths.runs().rglob("*") if path.is_file()):
        assert secret.encode() not in file.read_bytes(), file
    assert secret not in result.stdout + result.stderr


def test_a_package_that_was_cut_off_while_it_was_unpacked_is_brought_again(guarded):
    host, word = guarded.hosts[0], ("--become-password-file", str(guarded.become_password))
    library = "/usr/lib/x86_64-linux-gnu/libubsan.so.1.0.0"
    for state in ("unpacked", "half-installed"):
        status = f"/^Package: libubsan1$/,/^$/ s/^Status: .*/Status: install reinstreq {state}/"
        root(host, f"sed -i '{status}' /var/lib/dpkg/status; rm {library}")
        good(provision("up", str(guarded.inventory), *LEAN, *word))
        assert root(host, f"dpkg --audit; ls {library}") == library


def test_a_full_disk_in_the_middle_is_named_and_the_next_run_fixes_what_was_cut_off(guarded):
    host, word = guarded.hosts[0], ("--become-password-file", str(guarded.become_password))
    root(host, "rm -rf /opt/provision && mkdir /opt/provision")
    pid = container(host).attrs["State"]["Pid"]  # a container may not mount for itself
    mount = ["mount", "-t", "tmpfs", "-o", "size=3g,mode=755", "tmpfs", "/opt/provision"]
    subprocess.run(["nsenter", "-t", str(pid), "-m", *mount], check=True)
    with running("up", str(guarded.inventory), *LEAN, *word) as run:
        run.wait_for_task("node1: guard: Record the prefix")
        # uv itself still fits, its packages do not.
        root(host, "free=$(df --output=avail -B 1M /opt/provision | tail -1) && fallocate -l $((free - 100))M /opt/provision/fill")
        ended = run.finish()
    assert ended.returncode == 1
    assert "No space left on device" in ended.stdout
    assert "provision doctor explain disk-full" in ended.stdout
    root(host, "rm /opt/provision/fill")
    good(provision("up", str(guarded.inventory), *LEAN, *word))


def test_an_ssh_password_is_asked_for_and_kept_to_itself(guarded, tmp_path):
    assert shutil.which("sshpass"), "install sshpass: --ask-pass needs it"
    host, secret = guarded.hosts[0], 'a pass"word of tests'
    settings = "/etc/ssh/sshd_config.d/provision-sandbox.conf"
    root(host, f"sed -i 's/^PasswordAuthentication no/PasswordAuthentication yes/' {settings} && pkill -HUP -o sshd")
    container(host).exec_run(["sh", "-c", 'echo "trainer:$WORD" | chpasswd'], environment={"WORD": secret})
    file = tmp_path / "hosts.ini"
    file.write_text("".join(line for line in guarded.inventory.read_text().splitlines(True) if "private_key_file" not in line))
    for typed, code in (("not-the-password", 1), (secret, 0)):
        command = ["-m", "provision", "up", str(file), *LEAN, "--ask-pass", "--ask-become-pass"]
        terminal = pexpect.spawn(sys.executable, command, timeout=300, encoding="utf-8")
        terminal.expect("SSH password: ")
        terminal.sendline(typed)
        terminal.expect("sudo password.*: ")
        terminal.sendline(secret)
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == code, terminal.before
        assert ("Permission denied" in terminal.before) == bool(code)
        assert secret not in terminal.before
    for path in (path for path in paths.runs().rglob("*") if path.is_file()):
        assert secret.encode() not in path.read_bytes(), path


def test_a_user_without_sudo_rights_is_told_so(sandbox_factory, tmp_path):
    box = sandbox_factory(1, "debian:12", sudo="none", name="powerless", slots=1)
    guess = tmp_path / "guess"
    guess.write_text("whatever\n")
    result = provision("up", str(box.inventory), "--become-password-file", str(guess))
    assert result.returncode == 1
    assert "node1: survey" in result.stdout
    assert "the sudo password is wrong" in result.stdout or "sudo rights" in result.stdout or "may not use sudo" in result.stdout
    assert "provision" not in root(box.hosts[0], "ls /opt")


# --- away from the checkout ----------------------------------------------------------------------------------------------------------


def test_the_installed_toolkit_makes_a_bare_machine_train_by_itself(sandbox_factory, tmp_path, ssh):
    """A wheel of the toolkit on a host that has no checkout, and `provision localhost` there."""
    box = sandbox_factory(1, "debian:12", name="alone", slots=1)
    host = box.hosts[0]
    checkout = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(checkout)], check=True)
    wheel = next(tmp_path.glob("provision_cluster-*.whl"))
    with wheel.open("rb") as file:
        subprocess.run(["docker", "exec", "-i", host.container, "sh", "-c", f"cat > /root/{wheel.name}"], stdin=file, check=True)
    root(
        host, "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null"
    )
    root(host, f"python3 -m venv /root/toolkit && /root/toolkit/bin/pip install -q /root/{wheel.name}")
    catalogue = (Path(os.environ["XDG_CONFIG_HOME"]) / "provision/catalog/pytorch.yaml").read_text()
    root(host, f"mkdir -p ~/.config/provision/catalog && printf %s {shlex.quote(catalogue)} > ~/.config/provision/catalog/pytorch.yaml")
    done = ssh(box, host, "NO_COLOR=1 /root/toolkit/bin/provision localhost", user="root", timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith("ready: 1 host, ")
    assert "parameters bit-identical on all ranks" in done.stdout
    assert (
        root(
            host, '/root/toolkit/bin/python -c \'import importlib.util as u; print(u.find_spec("torch"), u.find_spec("collective_core"))\''
        )
        == "None None"
    )
    assert os.environ["PROVISION_HOME"] not in done.stdout
