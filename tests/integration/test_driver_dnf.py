"""NVIDIA's driver installed for real by dnf from the streams of a signed repository that the test serves, up to the reboot.

No host of RHEL's family can be had everywhere: this one is Debian with Debian's dnf and rpm, and says that it is Rocky Linux (see
driver_rpms.py). Its facts say that it is a machine with a GPU. Tests run in order.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import driver_rpms
import nccl_packages
import pytest
from hosts import RUN_S, good, root

from provision.sandbox import Sandbox, names

pytestmark = pytest.mark.slow

OLDEST, PLANNED, NEWER = "570.211.01", "580.126.20", "595.71.05"
H100 = {"pci_devices": ["0000:41:00.0"], "pci_ids": ["2330"]}
KERNEL = "5.14.0-570.12.1.el9_6.x86_64"

Play = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def host(sandbox_factory) -> Sandbox:
    made: Sandbox = sandbox_factory(1, "debian:12", name="driver-dnf", slots=1)
    return made


@pytest.fixture(scope="module")
def catalogue(host, tmp_path_factory) -> Iterator[Path]:
    """The catalogue's facts about the repository that the test serves."""
    site, path = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("catalogue") / "catalogue.json"
    (site / "rhel9/x86_64").mkdir(parents=True)
    key = driver_rpms.make(host.hosts[0], site / "rhel9/x86_64", (OLDEST, PLANNED, NEWER), OLDEST)
    gateway = docker.from_env().networks.get(names.network(host.name)).attrs["IPAM"]["Config"][0]["Gateway"]
    with nccl_packages.served(site, gateway) as address:
        keys = {"rhel9": {"file": driver_rpms.KEY, "sha256": hashlib.sha256(key).hexdigest()}}
        path.write_text(json.dumps({"cuda_repositories": {"base": address + "/{system}/{arch}", "rpm": {"keys": keys}}}))
        yield path


@pytest.fixture(scope="module")
def play(host, catalogue, tmp_path_factory) -> Play:
    """The driver's playbook for a branch, up to the reboot, for facts that say that the host has a GPU."""

    def provision(*words: str) -> str:
        command = [sys.executable, str(Path(__file__).with_name("other_catalogue.py")), str(catalogue), *words, str(host.inventory)]
        return good(subprocess.run(command, input="", capture_output=True, text=True, timeout=RUN_S, check=False)).stdout

    facts = json.loads(provision("survey", "--json"))
    (found,) = facts["hosts"].values()
    found.update(container=None, nvidia=H100)
    found["os"]["kernel"] = KERNEL
    (tmp_path_factory.getbasetemp() / "facts.json").write_text(json.dumps(facts))

    def run(branch: str, *options: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("book") / "book"
        facts = str(tmp_path_factory.getbasetemp() / "facts.json")
        provision("plan", "--torch", "none", "--facts", facts, "--driver", branch, "--out", str(folder))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(host.inventory), "driver.yml", "-e", "@vars.json"]
        words = [*command, "--skip-tags", "driver_reboot", *options]
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False)

    return run


def installed(host: Sandbox) -> dict[str, str]:
    said = root(host.hosts[0], "rpm --query --all --queryformat '%{NAME} %{VERSION}\\n' '*nvidia*'")
    return dict(line.split() for line in said.splitlines())


def locked(host: Sandbox) -> list[str]:
    return sorted(root(host.hosts[0], "dnf -q versionlock list 2>/dev/null").split())


def of_branch(version: str) -> tuple[dict[str, str], list[str]]:
    """What is installed of a version with open modules, and what is locked."""
    wanted = (*driver_rpms.DRIVER, driver_rpms.MODULES["open"])
    return dict.fromkeys(wanted, version), sorted(f"{name}-3:{version}-1.el9.*" for name in wanted)


def test_a_dry_run_says_what_would_be_installed_and_changes_nothing(host, play):
    done = good(play("580", "--check"))
    said = " ".join(done.stdout.split())
    assert (
        "would enable nvidia-driver:580-open, install epel-release, kernel-devel-matched, nvidia-driver-cuda, kmod-nvidia-open-dkms" in said
    )
    assert installed(host) == {}
    assert root(host.hosts[0], "ls /etc/modprobe.d/provision-nouveau.conf /etc/yum.repos.d/cuda-* 2>/dev/null || true") == ""


def test_packages_of_others_are_not_removed(host, play):
    # What a container lacks of a machine with a kernel; NVIDIA's proprietary modules of another branch, and what needs them.
    root(
        host.hosts[0],
        f"""set -e; mkdir -p /etc/modprobe.d && printf '#!/bin/sh\n' > /usr/bin/dracut && chmod 755 /usr/bin/dracut
        printf '[by-hand]\nname=by-hand\nbaseurl=file://{driver_rpms.WORK}/nvidia\ngpgcheck=0\n' > /etc/yum.repos.d/by-hand.repo
        dnf -q -y module enable nvidia-driver:570-dkms && dnf -q -y install gpu-monitor nvidia-driver-cuda
        rm /etc/yum.repos.d/by-hand.repo""",
    )
    before = installed(host)
    refused = play("580")
    assert refused.returncode != 0
    assert "the driver would remove gpu-monitor, and provision removes no packages of others" in refused.stdout, refused.stdout[-3000:]
    assert installed(host) == before == dict.fromkeys((*driver_rpms.DRIVER, driver_rpms.MODULES["dkms"]), OLDEST)
    root(host.hosts[0], "dnf -q -y remove --noautoremove gpu-monitor")


def test_the_branch_is_installed_and_held_in_place_of_another_one(host, play):
    done = play("580")
    assert done.returncode == 0, done.stdout[-3000:]
    assert (installed(host), locked(host)) == of_branch(PLANNED)
    assert root(host.hosts[0], "nvidia-smi") == PLANNED
    assert "blacklist nouveau" in root(host.hosts[0], "cat /etc/modprobe.d/provision-nouveau.conf")


def test_a_second_run_changes_nothing(play):
    done = play("580")
    assert "changed=0" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize(("branch", "version"), [("595", NEWER), ("580", PLANNED)], ids=["newer", "older"])
def test_another_branch_takes_the_place_of_a_held_one(host, play, branch, version):
    done = play(branch)
    assert done.returncode == 0, done.stdout[-3000:]
    assert (installed(host), locked(host)) == of_branch(version)
    assert root(host.hosts[0], "nvidia-smi") == version
