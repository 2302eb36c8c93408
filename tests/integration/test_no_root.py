"""Hosts on which nobody can be root: everything goes into the login user's home, works from there, and goes again without root."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hosts import good, marked_processes, provision, report, root

from provision.base import engine_source
from provision.sandbox import Sandbox, SandboxHost

ROOT = Path(__file__).parents[2]
LEAN = (
    "--torch",
    "none",
)  # the engine's own check over all ranks ends the run
BROUGHT_BY_AN_ADMINISTRATOR = "g++ openssh-client"
PREFIX = "/home/trainer/provision"

# Everything outside the login user's home with owner, mode, size and time, and what the linker and dpkg know; sudo notes who has tried.
OUTSIDE = (
    r"find /etc /opt /usr /root /home /srv /var/lib /var/cache -xdev \( -path /home/trainer -o -path /var/lib/sudo \) -prune -o "
    r"\( -type d -printf '%p %m %U\n' -o -printf '%p %s %m %U %T@\n' \); ls -A /run /tmp | grep -i -e provision -e ansible; "
    r"ldconfig -p; dpkg-query -W"
)
INSIDE = r"find /home/trainer -printf '%p %y %m %u\n' | sort; find /home/trainer -type f -exec sha256sum {} + | sort"


def seen(cluster: Sandbox, command: str) -> set[str]:
    return {f"{host.name} {line}" for host in cluster.hosts for line in root(host, command).splitlines()}


def administrator(host: SandboxHost, command: str) -> str:
    """What somebody with root does on a host behind our back."""
    return root(host, f"export DEBIAN_FRONTEND=noninteractive; {command}")


@pytest.fixture(scope="module")
def cluster(sandbox_factory) -> Sandbox:
    made: Sandbox = sandbox_factory(2, "debian:12", name="noroot", sudo="none")
    administrator(made.hosts[0], f"apt-get -q update && apt-get -q install -y --no-install-recommends {BROUGHT_BY_AN_ADMINISTRATOR}")
    return made


@pytest.fixture(scope="module")
def homes(cluster) -> set[str]:
    """The homes as they were before anything ran."""
    return seen(cluster, INSIDE)


@pytest.fixture(scope="module")
def equipped(cluster, homes) -> Sandbox:
    """The hosts once an administrator has brought what is missing on the second, too."""
    administrator(cluster.hosts[1], f"apt-get -q update && apt-get -q install -y --no-install-recommends {BROUGHT_BY_AN_ADMINISTRATOR}")
    return cluster


@pytest.fixture(scope="module")
def installed(equipped, homes) -> tuple[dict, set[str]]:
    """The report of the installation, and what was outside the homes before it."""
    before = seen(equipped, OUTSIDE)
    return report(good(provision("up", str(equipped.inventory), *LEAN, "--json"))), before


def test_host_without_a_compiler_is_refused_unchanged(cluster, homes, tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))  # where no build of the engine is kept
    outside = seen(cluster, OUTSIDE)
    result = provision("up", str(cluster.inventory), "--limit", "node2", *LEAN)
    assert result.returncode == 1
    assert "node2" in result.stdout
    assert "packages that only root can install are missing: g++" in result.stdout
    assert "apt-get install g++" in result.stdout
    assert sorted(seen(cluster, OUTSIDE) ^ outside) == []
    assert sorted(seen(cluster, INSIDE) ^ homes) == []


@pytest.mark.slow
def test_plan_names_what_is_left_out(equipped):
    shown = good(provision("plan", str(equipped.inventory), *LEAN, "--why")).stdout
    assert f"prefix {PREFIX}, without root" in shown
    assert "node1 and node2: without root everything is installed in" in shown


@pytest.mark.slow
def test_installation_trains_and_touches_only_the_home(cluster, installed):
    document, before = installed
    assert [host["state"] for host in document["hosts"]] == ["ready", "ready"]
    assert document["smoke"]["size"] == 4
    assert sorted(seen(cluster, OUTSIDE) ^ before) == []
    manifest = json.loads(root(cluster.hosts[0], f"cat {PREFIX}/manifest.json"))
    assert (manifest["host"]["root"], manifest["host"]["packages"]) == (False, [])
    assert marked_processes(cluster) == []
    assert root(cluster.hosts[0], "ls /home/trainer/.provision.lock 2>/dev/null || true") == ""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A wheel of the engine, built here and named by this machine's glibc, as `auditwheel` names a release's; Debian 13 runs it."""
    folder: Path = tmp_path_factory.mktemp("wheels")
    words = ["pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT / "collective_core")]
    subprocess.run([str(ROOT / ".venv-engine/bin/python"), "-m", *words], check=True)
    (made,) = folder.glob("*.whl")
    glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[-1].replace(".", "_")
    name = made.name.replace("-py3-", f"-{engine_source.pack().build}-py3-").replace("-linux_", f"-manylinux_{glibc}_")
    made.rename(made.with_name(name))
    return folder


@pytest.mark.slow
def test_a_host_without_a_compiler_takes_the_wheel_of_a_release(sandbox_factory, wheels, tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))  # where no build of the engine is kept
    cluster = sandbox_factory(2, "debian:13", name="nocompiler", sudo="none")
    for host in cluster.hosts:
        administrator(host, "apt-get -q update && apt-get -q install -y --no-install-recommends openssh-client")
    refused = provision("plan", str(cluster.inventory), *LEAN)
    assert "or give a wheel of the engine, of the same sources (`make dist`): --wheels DIR" in refused.stderr
    good(provision("up", str(cluster.inventory), *LEAN, "--wheels", str(wheels), "--limit", "node1", "--no-smoke"))
    made = tmp_path / "hosts.bundle"
    good(provision("bundle", str(cluster.inventory), *LEAN, "--wheels", str(wheels), "--out", str(made)))
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "elsewhere"))
    done = report(good(provision("up", str(cluster.inventory), *LEAN, "--bundle", str(made), "--json")))
    assert done["smoke"]["size"] == 4
    assert root(cluster.hosts[0], "command -v g++ || echo none").strip() == "none"
    later = good(provision("up", str(cluster.inventory), *LEAN, "--no-smoke"))
    assert "up to date; nothing to do" in later.stderr
    good(provision("doctor", str(cluster.inventory)))  # which would name a compiler that is missing


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_programs_started_by_hand_have_a_file_with_the_paths(cluster, ssh):
    said = ssh(
        cluster, cluster.hosts[0], f". {PREFIX}/env.sh && mpirun --version && python -c 'import mpi4py.MPI as m; print(m.COMM_WORLD.size)'"
    )
    assert "4.1.8" in said.stdout, said.stderr
    assert said.stdout.splitlines()[-1] == "1", said.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_second_run_has_nothing_to_do_and_a_full_one_changes_nothing(cluster):
    again = good(provision("up", str(cluster.inventory), *LEAN, "--no-smoke"))
    assert "up to date; nothing to do" in again.stderr
    full = report(good(provision("up", str(cluster.inventory), *LEAN, "--no-smoke", "--full", "--limit", "node1", "--json")))
    assert [(host["state"], host["changed"]) for host in full["hosts"]] == [("unchanged", 0)]


@pytest.mark.slow
def test_hosts_with_and_without_root_need_one_prefix(equipped):
    cluster = equipped
    one = cluster.hosts[0]
    administrator(one, "echo 'trainer ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/trainer && chmod 440 /etc/sudoers.d/trainer")
    try:
        refused = provision("plan", str(cluster.inventory), *LEAN)
        assert refused.returncode == 1
        assert f"{PREFIX} on node2, /opt/provision on node1" in refused.stderr
        assert f"provision_prefix={PREFIX}" in refused.stderr
        cluster.inventory.write_text(cluster.inventory.read_text() + f"\nprovision_prefix={PREFIX}\n")
        plan = json.loads(good(provision("plan", str(cluster.inventory), *LEAN, "--json")).stdout)
        assert [(host["prefix"], host["root"]) for host in plan["hosts"].values()] == [(PREFIX, True), (PREFIX, False)]
        assert len({host["openmpi"]["version"] for host in plan["hosts"].values()}) == 1
        without = cluster.inventory.read_text() + "provision_sudo=no\n"
        cluster.inventory.write_text(without.replace(f"provision_prefix={PREFIX}\n", ""))
        plan = json.loads(good(provision("plan", str(cluster.inventory), *LEAN, "--json")).stdout)
        assert [(host["prefix"], host["root"]) for host in plan["hosts"].values()] == [(PREFIX, False)] * 2
    finally:
        administrator(one, "rm /etc/sudoers.d/trainer")


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_remove_leaves_the_home_as_it_was(cluster, homes):
    removed = report(good(provision("remove", str(cluster.inventory), "--yes", "--json")))
    assert [(host["state"], host["left"]) for host in removed["hosts"]] == [("removed", [])] * 2
    assert sorted(seen(cluster, INSIDE) ^ homes) == []
