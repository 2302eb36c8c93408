"""Simulated GPU hosts: NVIDIA's own nvidia-smi, the survey and the doctor on real hosts that only seem to have GPUs.

Simulated is what no test machine has: the devices, the driver's library (``nvml.c``) and the kernel's log. The rest is real.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hosts import good, provision, report, root

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.catalog import OURS
from provision.diagnosis.findings import Finding
from provision.doctor.checks import examine
from provision.doctor.health.collect import HealthRequest, parse
from provision.doctor.health.model import Health
from provision.sandbox import Sandbox, SandboxHost
from provision.sandbox.gpus import model
from provision.sandbox.gpus.model import Gpus, HostFault
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate
from provision.survey import Facts, parse_survey

PROFILES = model.profiles().profiles
#: What a healthy simulated host shows of the machine below it: limits and packages are not simulated.
OF_THIS_MACHINE = {"rdma-memlock", "too-many-open-files", "nvidia-container-libml"}
#: Findings that a fault has besides its own, and that may be those of another host's fault. A host's only port may be the faulty one.
ALSO = {
    "gpu-missing": {"gpu-lost"},
    "fabric-manager-down": {"nvlink-fabric-state"},
    "ib-down": {"rdma-port"},
    "ib-init": {"openib-no-active-ports"},
}


@pytest.fixture(scope="module")
def gpu_hosts(sandbox_factory) -> Sandbox:
    made: Sandbox = sandbox_factory(3, "debian:12", name="gpus")
    return made


def show(hosts: Sandbox, gpus: Gpus, *faults: HostFault) -> None:
    simulate(hosts.name, Simulation(gpus, faults), say=lambda _line: None)


def looked_at(hosts: Sandbox, host: SandboxHost, ssh: Any, scripts: str) -> tuple[Facts, Health]:
    """What the survey and the check of health find there, in one login."""
    done = good(ssh(hosts, host, scripts))
    facts = parse_survey(done.stdout, OURS)
    assert isinstance(facts, Facts), facts
    return facts, parse(done.stdout, HealthRequest())


def findings(hosts: Sandbox, ssh: Any) -> dict[str, list[Finding]]:
    """Host → the doctor's findings on its GPUs and fabric, but for what the machine itself lacks."""
    order = json.dumps({"tests": [], "dcgm_level": 1})
    scripts = f"{resources.inline_command('survey')}; echo '{order}' | {resources.inline_command('gpu_health.py')}"
    with ThreadPoolExecutor(len(hosts.hosts)) as pool:
        answers = pool.map(lambda host: looked_at(hosts, host, ssh, scripts), hosts.hosts)
        seen = dict(zip((host.name for host in hosts.hosts), answers, strict=True))
    facts = {name: each[0] for name, each in seen.items()}
    found = examine(facts, healths={name: each[1] for name, each in seen.items()}, catalog=OURS)
    return {name: [each for each in found if each.host == name and each.id not in OF_THIS_MACHINE] for name in facts}


def possible(gpus: Gpus) -> list[str]:
    return [name for name, fault in model.faults().items() if model.refusal(fault, gpus, 3) is None]


def wrong_with(gpus: Gpus, faults: dict[str, str], found: dict[str, list[Finding]]) -> list[str]:
    """What is not as it should be, as sentences. ``faults``: host → its fault, of which no two have a finding in common."""
    said = []
    for host, seen in found.items():
        name, ids = faults.get(host), {each.id for each in seen}
        own = set(model.faults()[name].finds) if name else set[str]()
        others = {each for other, fault in faults.items() if other != host for each in model.faults()[fault].finds} - ALSO.get(
            name or "", own
        )
        if missing := own - ids:
            said.append(f"{gpus.profile} × {name} on {host}: {sorted(missing)} missing, found {sorted(ids)}")
        if strange := ids & (others - own) | ids & {"gpu-health-unreadable"}:
            said.append(f"{gpus.profile} × {name} on {host}: {[(each.id, each.observed) for each in seen if each.id in strange]}")
    return said


def test_six_faults_are_set_named_on_their_hosts_and_cleared(gpu_hosts, ssh):
    """As a user does it: the command that sets faults, and the doctor."""
    show(gpu_hosts, Gpus.requested("h100:8", fabric="ib"))
    for faults in (
        {"node1": "xid79", "node2": "fabric-manager-down", "node3": "ib-slow"},
        {"node1": "version-mismatch", "node2": "secure-boot", "node3": "power-brake"},
    ):
        words = [f"{name}@{host}" for host, name in faults.items()]
        assert "set: " + ", ".join(words) in good(provision("sandbox", "fault", *words, "--name", gpu_hosts.name)).stdout
        found = report(provision("doctor", str(gpu_hosts.inventory), "--gpu", "--json"))
        ids = {host: {each["id"] for each in found["findings"] if each["host"] == host} for host in faults}
        assert all(set(model.faults()[name].finds) <= ids[host] for host, name in faults.items()), ids
        assert not any("gpu-health-unreadable" in each for each in ids.values()), found
        good(provision("sandbox", "fault", "--clear", "--name", gpu_hosts.name))
    healthy = findings(gpu_hosts, ssh)
    assert not any(healthy.values()), healthy


def test_an_archive_without_nvidia_smi_is_an_error_that_names_it(gpu_hosts, ssh):
    host, kept = gpu_hosts.hosts[2], "/etc/provision-sandbox/nvidia-smi"
    lists = "/etc/apt/sources.list /etc/apt/sources.list.d"
    script = f"sudo sh -c 'cp -a {kept} /root/kept 2>/dev/null; rm -f {kept}; tar -cf /root/lists.tar {lists}; rm -rf {lists}; {{}}'"
    good(
        ssh(gpu_hosts, host, script.format("mkdir -p /etc/apt/sources.list.d; echo deb file:/nothing bookworm main >/etc/apt/sources.list"))
    )
    try:
        with pytest.raises(ProvisionError) as caught:
            show(gpu_hosts, Gpus.requested("t4:1"))
        assert "nvidia-smi is not in the archive's part non-free: file:/nothing bookworm" in caught.value.what
        assert caught.value.hint
        assert "non-free" in caught.value.hint
    finally:
        good(ssh(gpu_hosts, host, f"sudo sh -c 'rm -rf {lists}; tar -xf /root/lists.tar -C /; mv /root/kept {kept} || true'"))
    show(gpu_hosts, Gpus.requested("t4:1"))


@pytest.mark.slow
def test_mig_instances_are_listed_surveyed_and_planned_as_one_rank(gpu_hosts, ssh):
    show(gpu_hosts, Gpus.requested("h100:2"), HostFault("mig-instances", "node1"))
    listed = good(ssh(gpu_hosts, gpu_hosts.hosts[0], "nvidia-smi -L")).stdout
    assert len(set(re.findall(r"MIG 1g\.10gb +Device +\d: \(UUID: (MIG-[0-9a-f-]{36})\)", listed))) == 7, listed
    facts, _health = looked_at(gpu_hosts, gpu_hosts.hosts[0], ssh, resources.inline_command("survey"))
    assert [(gpu.mig, gpu.mig_instances) for gpu in facts.gpus] == [("Enabled", 7), ("Disabled", 0)]
    (found,) = findings(gpu_hosts, ssh)["node1"]
    assert (found.id, "1 of 2 GPUs, with 7 instances" in found.observed) == ("mig-enabled", True)
    planned = report(good(provision("plan", str(gpu_hosts.inventory), "--json")))
    assert any("MIG mode on" in note and "one rank" in note for note in planned["notes"]), planned["notes"]


@pytest.mark.slow
def test_amd_hosts_get_a_plan_and_one_whose_user_may_not_use_its_gpus_the_reason(gpu_hosts):
    show(gpu_hosts, Gpus.requested("mi300x:2"))
    planned = report(good(provision("plan", str(gpu_hosts.inventory), "--json")))
    assert {name: "+rocm" in host["torch"]["version"] for name, host in planned["hosts"].items()} == dict.fromkeys(
        ("node1", "node2", "node3"), True
    )
    scan = json.loads(root(gpu_hosts.hosts[0], resources.inline_command("gpu_code.py")).splitlines()[-1])
    assert scan["gpus"] == [{"name": "AMD GPU", "architecture": "gfx942"}] * 2
    root(gpu_hosts.hosts[1], "chmod 600 /dev/kfd")
    try:
        refused = provision("plan", str(gpu_hosts.inventory))
    finally:
        root(gpu_hosts.hosts[1], "chmod 666 /dev/kfd")
    assert (refused.returncode, "node2: no plan fits: it has 2 x AMD GPU, and trainer may not use /dev/kfd" in refused.stderr) == (1, True)


@pytest.mark.slow
def test_a_driver_is_planned_and_not_installed_where_a_reboot_would_be_this_machines(gpu_hosts):
    show(gpu_hosts, Gpus.requested("h100:8"), HostFault("nouveau", "node1"))
    words = (str(gpu_hosts.inventory), "--driver", "580", "--torch", "none", "--json")
    planned = report(good(provision("plan", *words)))
    drivers = {name: (host["driver"]["version"], host["driver"]["services"]) for name, host in planned["hosts"].items()}
    assert drivers == {"node1": ("580", ["nvidia-fabricmanager"]), "node2": ("580.65.06", []), "node3": ("580.65.06", [])}
    refused = report(provision("up", *words))
    assert {each["id"] for each in refused["failures"]} == {"own-reboot"}
    assert root(gpu_hosts.hosts[0], "ls /etc/modprobe.d/provision-nouveau.conf /opt/provision 2>/dev/null || true") == ""


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_every_fault_of_a_profile_is_named_on_its_host_alone(profile, gpu_hosts, ssh):
    gpus = Gpus.requested(profile, fabric="ib")
    names = [host.name for host in gpu_hosts.hosts]
    show(gpu_hosts, gpus)
    healthy = {host: {each.id for each in found} for host, found in findings(gpu_hosts, ssh).items()}
    assert all(ids <= ({"other-accelerators"} if PROFILES[profile].vendor == "amd" else set()) for ids in healthy.values()), healthy
    said: list[str] = []
    left = possible(gpus)
    while left:
        batch, left = left[: len(names)], left[len(names) :]
        faults = dict(zip(names, batch, strict=False))
        show(gpu_hosts, gpus, *(HostFault(name, host) for host, name in faults.items()))
        said += wrong_with(gpus, faults, findings(gpu_hosts, ssh))
    assert not said, "\n".join(said)
