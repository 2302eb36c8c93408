"""Bare hosts: a dry run, a playbook that runs by hand, and hosts on which `provision up` changes nothing because something is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hosts import good, provision, report, root

from provision.sandbox import Sandbox

# Everything that a run may touch; Ansible's own scratch folder and the logs of logins are not part of what a dry run promises.
FINGERPRINT = (
    r"find /etc /opt /usr /home /root /var/lib -xdev \( -path '*/.ansible*' -o -path /var/lib/systemd -o -path /var/lib/sudo \) -prune -o "
    r"\( -type d -printf '%p %m %U\n' -o -printf '%p %s %m %U %T@\n' \) | sort"
)


def files(cluster: Sandbox) -> set[str]:
    """Every file of every host with size, mode, owner and time."""
    return {f"{host.name} {line}" for host in cluster.hosts for line in root(host, FINGERPRINT).splitlines()}


@pytest.fixture(scope="module")
def bare(sandbox_factory) -> Sandbox:
    return sandbox_factory(2, "debian:12", name="bare")


def test_a_dry_run_on_bare_hosts_fails_nowhere_and_changes_nothing(bare):
    before = files(bare)
    result = good(provision("up", str(bare.inventory), "--check", "--json"))
    assert sorted(files(bare) ^ before) == []
    assert {host["state"] for host in report(result)["hosts"]} == {"would change"}
    steps = report(result)["hosts"][0]["steps"]
    assert (steps["packages"], steps["engine"], steps["nccl"]) == ("will change", "will change", "will not change")
    assert steps["manifest"] == "will change"
    assert report(result)["smoke"] is None


@pytest.mark.slow
def test_a_plan_is_shown_and_its_playbook_runs_by_hand(bare, tmp_path):
    shown = good(provision("plan", str(bare.inventory), "--out", str(tmp_path / "book")))
    assert "4.1.8" in shown.stdout
    ansible_playbook = str(Path(sys.executable).with_name("ansible-playbook"))
    words = ["-i", str(bare.inventory), "site.yml", "-e", "@vars.json", "--check", "--limit", "node1"]
    by_hand = subprocess.run([ansible_playbook, *words], cwd=tmp_path / "book", capture_output=True, text=True, check=False)
    assert by_hand.returncode == 0, by_hand.stdout[-4000:]


def test_a_wrong_key_is_explained(bare, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    text = bare.inventory.read_text().replace(str(bare.key), str(tmp_path / "other"))
    (tmp_path / "hosts.ini").write_text(text)
    result = provision("up", str(tmp_path / "hosts.ini"), "--limit", "node1")
    assert result.returncode == 1
    assert "ssh refused the login" in result.stdout
    assert "ansible_ssh_private_key_file" in result.stdout


def test_a_host_with_another_key_than_the_known_one_is_refused(bare, tmp_path):
    known = tmp_path / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "impostor")], check=True)
    public = (tmp_path / "impostor.pub").read_text().rsplit(" ", 1)[0]
    known.write_text("".join(f"{host.address} {public}\n" for host in bare.hosts))
    (tmp_path / "hosts.ini").write_text(bare.inventory.read_text().replace(str(bare.known_hosts), str(known)))
    result = provision("survey", str(tmp_path / "hosts.ini"))
    assert result.returncode == 1
    assert result.stdout.count("its host key is not the one that was known") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [("yes 0123456789", "its answer was too large and was cut off"), ("sleep 600", "it let us in, and then did not answer in time")],
)
def test_a_host_that_answers_without_end_or_never_is_named_and_the_other_is_surveyed(bare, tmp_path, text, said):
    root(bare.hosts[0], f"printf '#!/bin/sh\n{text}\n' > /tmp/odd-python; chmod 755 /tmp/odd-python")
    (tmp_path / "hosts.ini").write_text(bare.inventory.read_text().replace("node1 ", "node1 provision_python=/tmp/odd-python ", 1))
    result = provision("survey", str(tmp_path / "hosts.ini"))
    assert result.returncode == 1
    assert f"node1: error: {said}" in result.stdout
    assert "\nnode2  debian 12" in result.stdout
    if "sleep" in text:
        assert "waiting for node1: Collect facts" in result.stderr


def test_a_full_disk_is_seen_before_anything_is_changed(bare, tmp_path):
    host = bare.hosts[0]
    text = bare.inventory.read_text().replace("slots=2", "slots=2 provision_prefix=/dev/shm/small", 1)  # 64 MB, the engine's default
    (tmp_path / "hosts.ini").write_text(text)
    result = provision("up", str(tmp_path / "hosts.ini"), "--limit", "node1")
    assert result.returncode == 1
    assert "the disk is full: /dev/shm" in result.stdout
    assert root(host, "ls /dev/shm") == ""
