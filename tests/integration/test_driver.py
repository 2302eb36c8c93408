"""NVIDIA's driver installed for real on a host, by apt from a signed repository that the test serves; then `provision up --driver`.

The host has a simulated GPU, which nouveau has taken, and is made to look like a machine (see gpu_machine.py). The packages are stand-ins
with the real names and dependencies (see driver_packages.py); apt, its choice, the holds and the signature are real. Tests run in order.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import driver_packages
import gpu_machine
import nccl_packages
import pytest
from hosts import RUN_S, good, report, root

from provision.sandbox import Sandbox, names
from provision.sandbox.gpus.model import Gpus, HostFault
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate

pytestmark = pytest.mark.slow

PLANNED, NEWER, OLDER = "580.126.20-1", "595.71.05-1", "570.211.01-1"
NOUVEAU = Simulation(Gpus.requested("h100:1"), (HostFault("nouveau", "node1"),))
HEALTHY = Simulation(Gpus.requested("h100:1", driver=PLANNED.split("-")[0]))
NAMED = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms")

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def host(sandbox_factory) -> Sandbox:
    made: Sandbox = sandbox_factory(1, "debian:12", name="driver", slots=1)
    simulate(made.name, NOUVEAU, say=lambda _line: None)
    gpu_machine.disguise(made.hosts[0], f"6.1.0-37-{driver_packages.FLAVOUR}")
    # What a container lacks of a machine with a kernel.
    initramfs = "/usr/sbin/update-initramfs"
    root(made.hosts[0], f"mkdir -p /etc/modprobe.d && printf '#!/bin/sh\n' > {initramfs} && chmod 755 {initramfs}")
    return made


@pytest.fixture(scope="module")
def address(host, tmp_path_factory) -> Iterator[str]:
    """Where the test serves the folder `site` in place of NVIDIA."""
    site = tmp_path_factory.getbasetemp() / "site"
    site.mkdir()
    gateway = docker.from_env().networks.get(names.network(host.name)).attrs["IPAM"]["Config"][0]["Gateway"]
    with nccl_packages.served(site, gateway) as served:
        yield served


@pytest.fixture(scope="module")
def catalogue(address, tmp_path_factory) -> Iterator[Path]:
    """The catalogue's facts about the repository that the test serves."""
    work = tmp_path_factory.mktemp("nvidia")
    folder = tmp_path_factory.getbasetemp() / "site/debian12/x86_64"
    folder.mkdir(parents=True)
    key = nccl_packages.Key(work / "gpg")
    for version in (PLANNED, NEWER, OLDER):
        driver_packages.driver(folder, work / "trees", version)
    for branch in ("580", "595"):
        driver_packages.pinning(folder, work / "trees", branch)
    driver_packages.surroundings(folder, work / "trees")
    (work / "trees/monitor").mkdir()
    nccl_packages.package(folder, "gpu-monitor", "1.0-1", work / "trees/monitor", depends=f"nvidia-kernel-dkms (= {OLDER})")
    nccl_packages.index(folder, key)
    keyring = nccl_packages.keyring_package(folder, work, key)
    place = {
        "base": address + "/{system}/{arch}",
        "apt": {"sha256": {"debian12": {"x86_64": hashlib.sha256(keyring.read_bytes()).hexdigest()}}},
    }
    path = work / "catalogue.json"
    path.write_text(json.dumps({"cuda_repositories": place}))
    yield path
    key.close()


@pytest.fixture(scope="module")
def provision(catalogue) -> Command:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(Path(__file__).with_name("other_catalogue.py")), str(catalogue), *words]
        return subprocess.run(command, input="", capture_output=True, text=True, timeout=RUN_S, check=False)

    return call


@pytest.fixture(scope="module")
def play(host, provision, tmp_path_factory) -> Command:
    """The driver's playbook, up to the reboot."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "facts.json").write_text(good(provision("survey", str(host.inventory), "--json")).stdout)
    words = ("--torch", "none", "--facts", str(folder / "facts.json"), "--driver", "580", "--out", str(folder / "book"))
    good(provision("plan", str(host.inventory), *words))
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(host.inventory), "driver.yml", "-e", "@vars.json"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        words = [*command, "--skip-tags", "driver_reboot", *options]
        return subprocess.run(words, cwd=folder / "book", capture_output=True, text=True, timeout=RUN_S, check=False)

    return run


def installed(host: Sandbox) -> dict[str, tuple[str, str]]:
    """Package → (version, wanted state) of the driver's packages as dpkg has them."""
    form = "'${db:Status-Status} ${Package} ${Version} ${db:Status-Want}\\n'"
    said = root(host.hosts[0], f"dpkg-query -W -f {form} '*nvidia*' libcuda1 2>/dev/null | sed -n 's/^installed //p'")
    return {name: (version, want) for name, version, want in (line.split() for line in said.splitlines())}


def changed(done: subprocess.CompletedProcess[str]) -> Any:
    return next(line for line in reversed(done.stdout.splitlines()) if "changed=" in line).split("changed=")[1].split()[0]


def test_a_dry_run_says_what_would_be_installed_and_changes_nothing(host, play):
    done = good(play("--check"))
    assert "would install nvidia-driver-pinning-580, linux-image-provision-amd64" in done.stdout
    assert "nvidia-kernel-open-dkms, and reboot" in done.stdout
    assert installed(host) == {}
    assert root(host.hosts[0], "ls /etc/modprobe.d/provision-nouveau.conf /etc/apt/sources.list.d/cuda-* 2>/dev/null || true") == ""


def test_packages_of_others_are_not_removed(host, play, address):
    line, path = f"deb [trusted=yes] {address}/debian12/x86_64/ /", "/etc/apt/sources.list.d/by-hand.list"
    older = " ".join(f"{name}={OLDER}" for name in ("nvidia-kernel-dkms", "firmware-nvidia-gsp", "nvidia-kernel-support"))
    root(host.hosts[0], f"echo '{line}' > {path} && apt-get -q update && apt-get -q -y install gpu-monitor {older} && rm {path}")
    refused = play()
    assert refused.returncode != 0
    assert "the driver would remove gpu-monitor, and provision removes no packages of others" in refused.stdout
    assert installed(host)["nvidia-kernel-dkms"][0] == OLDER
    root(host.hosts[0], "dpkg --purge gpu-monitor")


def test_the_branch_is_installed_and_held_in_place_of_another_one(host, play):
    done = play()
    assert done.returncode == 0, done.stdout[-3000:]
    found = installed(host)
    assert "nvidia-kernel-dkms" not in found
    assert {found[name] for name in (*NAMED, "libcuda1", "libnvidia-ml1", "nvidia-persistenced")} == {(PLANNED, "hold")}
    assert "blacklist nouveau" in root(host.hosts[0], "cat /etc/modprobe.d/provision-nouveau.conf")


def test_a_second_run_changes_nothing(play):
    done = play()
    assert (done.returncode, changed(done)) == (0, "0"), done.stdout[-3000:]


def test_an_upgrade_of_the_system_leaves_the_driver(host):
    before = installed(host)
    root(host.hosts[0], "dpkg --purge nvidia-driver-pinning-580 && apt-get -q update && apt-get -q -y dist-upgrade")
    after = installed(host)
    assert {name: state for name, state in before.items() if "pinning" not in name} == after


def test_up_reboots_the_host_and_plans_the_rest_for_the_driver_that_runs(host, provision):
    words = ("up", str(host.inventory), "--driver", "580", "--torch", "none", "--no-smoke", "--nccl", "wheel", "--json")
    with gpu_machine.boots(host, HEALTHY):
        done = good(provision(*words))
    assert root(host.hosts[0], f"cat {gpu_machine.REBOOTS}").count("provision has installed NVIDIA's driver") == 1
    found = report(done)
    assert any("NVIDIA's driver was installed and the host rebooted; nvidia-smi answers" in note for note in found["notes"])
    again = report(good(provision(*words)))
    assert root(host.hosts[0], f"cat {gpu_machine.REBOOTS} | wc -l") == "1"
    assert [entry["changed"] for entry in again["hosts"]] == [0]


def test_removal_leaves_the_driver_and_says_so(host, provision):
    removed = report(good(provision("remove", str(host.inventory), "--yes", "--json")))
    (entry,) = removed["hosts"]
    assert entry["state"] == "removed"
    assert [one["why"] for one in entry["left"] if one["what"].startswith("NVIDIA's driver (nvidia-driver-cuda 580.126.20-1)")]
    assert {installed(host)[name] for name in NAMED} == {(PLANNED, "hold")}
