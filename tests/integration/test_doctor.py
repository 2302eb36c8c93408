"""Real faults on real hosts: doctor finds them, fixes what it can, and checks that they are gone."""

from __future__ import annotations

import json
import re
import tarfile

import pytest
from hosts import as_machine, container, good, provision, root

from provision.sandbox import Sandbox

OPEN_KEY = "chmod 755 /home/trainer/.ssh && install -m 644 -o trainer /dev/null /home/trainer/.ssh/id_ed25519"


@pytest.fixture(scope="module")
def cluster(sandbox_factory) -> Sandbox:
    return sandbox_factory(2, "debian:12", name="doctor")


def doctor(cluster: Sandbox, *words: str) -> dict[str, list[dict]]:
    """The findings by id, whatever the exit code."""
    result = provision("doctor", str(cluster.inventory), *words, "--json")
    assert result.returncode in (0, 1), result.stderr
    found: dict[str, list[dict]] = {}
    for finding in json.loads(result.stdout)["findings"]:
        found.setdefault(finding["id"], []).append(finding)
    return found


def hosts_of(found: dict[str, list[dict]], name: str) -> set[str]:
    return {finding["host"] for finding in found.get(name, [])}


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_found_and_without_gpus_nothing_of_nccl(cluster):
    found = doctor(cluster)
    assert not [name for name in found if "nccl" in name]
    assert hosts_of(found, "too-many-open-files") == {"node1", "node2"}


def test_the_limit_of_open_files_is_raised(cluster):
    result = provision("doctor", str(cluster.inventory), "--only", "too-many-open-files", "--fix", "--yes", "--json")
    assert json.loads(result.stdout)["findings"] == [], result.stderr
    assert result.returncode == 0
    assert "fixed: node1: too-many-open-files" in result.stderr


def test_without_consent_nothing_is_changed(cluster):
    root(cluster.hosts[0], OPEN_KEY)
    result = provision("doctor", str(cluster.inventory), "--only", "ssh-permission-denied", "--fix", stdin="n\n")
    assert "this will run:" in result.stderr
    assert root(cluster.hosts[0], "stat -c %a /home/trainer/.ssh/id_ed25519") == "644"


def test_wrong_modes_of_ssh_files_are_found_and_fixed(cluster):
    root(cluster.hosts[0], OPEN_KEY)
    assert hosts_of(doctor(cluster), "ssh-permission-denied") == {"node1"}
    good(provision("doctor", str(cluster.inventory), "--only", "ssh-permission-denied", "--fix", "--yes"))
    assert root(cluster.hosts[0], "stat -c %a /home/trainer/.ssh/id_ed25519") == "600"


@pytest.mark.slow
def test_keys_that_sshd_refuses_are_found(cluster):
    root(cluster.hosts[1], "chmod 666 /home/trainer/.ssh/authorized_keys")
    try:
        assert hosts_of(doctor(cluster), "ssh-permission-denied") == {"node2"}
    finally:
        root(cluster.hosts[1], "chmod 600 /home/trainer/.ssh/authorized_keys")


def test_a_host_name_that_resolves_to_loopback_is_found_and_fixed(cluster):
    # In place: the container engine mounts the file.
    root(cluster.hosts[0], "sed 's/.*[[:space:]]node1.*/127.0.1.1 node1/' /etc/hosts > /tmp/h && cat /tmp/h > /etc/hosts")
    assert hosts_of(doctor(cluster), "hostname-loopback-mpi") == {"node1"}
    good(provision("doctor", str(cluster.inventory), "--only", "hostname-loopback-mpi", "--fix", "--yes"))
    assert cluster.hosts[0].address in root(cluster.hosts[0], "getent hosts node1")


@pytest.mark.slow
def test_two_hosts_of_one_name_are_found(cluster):
    as_machine(cluster.hosts[1], "uts", "hostname node1")
    try:
        assert hosts_of(doctor(cluster), "nccl-cuda-ipc-hostname") == {"node2"}
    finally:
        as_machine(cluster.hosts[1], "uts", "hostname node2")


def test_a_held_package_lock_is_found(cluster):
    hold = """
import fcntl, os, time
lock = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
with open("/run/held", "w") as note:
    note.write(str(os.getpid()))
time.sleep(900)
"""
    container(cluster.hosts[0]).exec_run(["python3", "-c", hold], detach=True)
    root(cluster.hosts[0], "until [ -s /run/held ]; do sleep 0.1; done")
    try:
        assert hosts_of(doctor(cluster), "apt-lock") == {"node1"}
    finally:
        root(cluster.hosts[0], "kill $(cat /run/held)")
    assert "apt-lock" not in doctor(cluster)


@pytest.mark.slow
def test_a_full_disk_is_found(cluster):
    """A small file system of its own, so that the machine's disk stays as it is."""
    as_machine(cluster.hosts[1], "mount", "mkdir -p /opt/provision && mount -t tmpfs -o size=16m none /opt/provision")
    try:
        assert hosts_of(doctor(cluster), "disk-full") == {"node2"}
    finally:
        as_machine(cluster.hosts[1], "mount", "umount /opt/provision")


@pytest.mark.slow
def test_blocked_ports_are_found(cluster):
    """The kernel's nftables, through the iptables that every container engine needs. ssh goes on: it is below the blocked ports."""
    as_machine(cluster.hosts[1], "net", "iptables -A INPUT -p tcp --syn --dport 1024:65535 -j DROP")
    try:
        assert hosts_of(doctor(cluster), "btl-tcp-firewall") == {"node2"}
    finally:
        as_machine(cluster.hosts[1], "net", "iptables -F INPUT")
    assert "btl-tcp-firewall" not in doctor(cluster)


@pytest.mark.slow
def test_a_clock_that_is_wrong_is_found(cluster):
    """Containers share the machine's clock, so the fake is what Python says of it: all that a host tells us of its time."""
    place = root(cluster.hosts[1], "python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))'") + "/sitecustomize.py"
    root(cluster.hosts[1], f"mv {place} {place}.kept; echo 'import time; now = time.time; time.time = lambda: now() + 3600' > {place}")
    try:
        found = doctor(cluster)["clock-skew-make"]
    finally:
        root(cluster.hosts[1], f"mv {place}.kept {place}")
    assert len({finding["host"] for finding in found}) == 1
    assert re.search(r"its clock is (1 h|59 min)", found[0]["cause"])


@pytest.mark.slow
def test_a_driver_mismatch_is_found(cluster):
    """Only the driver's answer is fake: there is no GPU to ask."""
    says = "Failed to initialize NVML: Driver/library version mismatch"
    root(
        cluster.hosts[0],
        f"printf '#!/bin/sh\necho \"{says}\"\nexit 18\n' > /usr/local/bin/nvidia-smi && chmod 755 /usr/local/bin/nvidia-smi",
    )
    try:
        assert hosts_of(doctor(cluster), "nvml-driver-mismatch") == {"node1"}
    finally:
        root(cluster.hosts[0], "rm /usr/local/bin/nvidia-smi")


def test_a_log_is_confirmed_or_ruled_out_by_the_hosts(cluster, tmp_path):
    log = tmp_path / "job.log"
    log.write_text("trainer@node2: Permission denied (publickey).\nbash: orted: command not found\n", encoding="utf-8")
    root(cluster.hosts[0], OPEN_KEY)
    try:
        found = doctor(cluster, "--log", str(log))
    finally:
        root(cluster.hosts[0], "chmod 700 /home/trainer/.ssh && chmod 600 /home/trainer/.ssh/id_ed25519")
    assert hosts_of(found, "ssh-permission-denied") == {"node1"}
    assert all("confirms" in finding["cause"] for finding in found["ssh-permission-denied"])
    assert "do not show it now" in found["orted-not-found"][0]["cause"]


def test_a_bundle_contains_no_secret(cluster, tmp_path):
    log = tmp_path / "job.log"
    planted = ["hf_" + "a" * 30, "hunter2secret", "s3cr3tpw", "AKIA" + "B" * 16]
    log.write_text(
        f"export HF_TOKEN={planted[0]}\npassword: {planted[1]}\nhttps://bob:{planted[2]}@example.org/simple\n{planted[3]}\n"
        "/home/trainer/train.py: trainer@node1 failed\n",
        encoding="utf-8",
    )
    good(provision("doctor", "bundle", str(cluster.inventory), "-o", str(tmp_path / "b.tar.gz"), "--log", str(log)))
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        files = {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}
    assert {"facts.json", "findings.json"} < set(files)
    for name, text in files.items():
        for secret in (*planted, "trainer", "bob", "ssh-ed25519 AAAA"):
            assert secret not in text, (name, secret)


# ------------------------------------------------------------------------------------------------- where something is installed


@pytest.fixture(scope="module")
def installed(ready_sandbox) -> Sandbox:
    return ready_sandbox("doctor-installed")


def fixed(cluster: Sandbox, *names: str) -> None:
    """Doctor finds them, fixes them, looks again and finds them no more."""
    only = [word for name in names for word in ("--only", name)]
    found = doctor(cluster, *only)
    assert {name: hosts_of(found, name) for name in names} == {name: {"node1"} for name in names}
    result = good(provision("doctor", str(cluster.inventory), *only, "--fix", "--yes"))
    for name in names:
        assert f"fixed: node1: {name}" in result.stderr


@pytest.mark.slow
def test_hosts_that_can_run_a_job_reach_each_other(installed):
    found = doctor(installed)
    assert not [name for name in found if name.startswith("ssh-") or name == "btl-tcp-firewall"]


@pytest.mark.slow
def test_libraries_missing_in_the_linkers_cache(installed):
    host = installed.hosts[0]
    root(host, "rm /etc/ld.so.conf.d/00-provision.conf && ldconfig")
    fixed(installed, "libopen-rte-missing")
    assert "/opt/provision/venv/lib/libmpi.so.40" in root(host, "ldconfig -p")


@pytest.mark.slow
def test_another_open_mpi_before_ours(installed, ssh):
    host = installed.hosts[0]
    root(host, "apt-get update -qq && apt-get install -y -qq --no-install-recommends openmpi-bin")
    fixed(installed, "mpi-lib-mixed")
    assert ssh(installed, host, "command -v mpirun").stdout.strip() == "/opt/provision/venv/bin/mpirun"


@pytest.mark.slow
def test_an_engine_that_was_built_for_another_python_and_host_keys_that_changed(installed):
    """Two faults that one installation fixes."""
    host = installed.hosts[0]
    root(
        host,
        "cd /opt/provision/venv/lib && mkdir -p python3.9/site-packages"
        " && mv python3.11/site-packages/collective_core* python3.9/site-packages/"
        " && cd /home/trainer/.ssh && ssh-keygen -q -t ed25519 -N '' -f /tmp/other"
        ' && sed -i "s|ssh-ed25519 .*|$(cut -d" " -f1,2 /tmp/other.pub)|" provision_known_hosts',
    )
    fixed(installed, "engine-other-python", "ssh-host-key-changed")
    root(host, "/opt/provision/venv/bin/python -c 'import collective_core'")


# ------------------------------------------------------------------------------------------ what the distributions bring differs


@pytest.mark.slow
def test_different_open_mpi_on_two_hosts(sandbox_factory):
    mixed = sandbox_factory(2, ["debian:12", "debian:13"], name="doctor-mixed")
    for host in mixed.hosts:
        root(host, "apt-get update -qq && apt-get install -y -qq --no-install-recommends openmpi-bin")
    (found,) = doctor(mixed)["ompi-version-mismatch"]
    assert "the Open MPI that mpirun finds first is" in found["cause"]
