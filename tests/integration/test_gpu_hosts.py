"""Simulated GPU hosts: NVIDIA's own nvidia-smi, the survey and the doctor on real hosts that only seem to have GPUs.

Simulated is what no test machine has: the devices, the driver's library (``nvml.c``) and the kernel's log. The rest is real.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hosts import good, provision, report, root
from nvidia_smi_templates import ARGUMENTS, Sample, learn

from provision.base import resources
from provision.catalog import OURS
from provision.diagnosis.findings import Finding
from provision.doctor.checks import examine
from provision.doctor.health import parsers
from provision.doctor.health.collect import HealthRequest, parse
from provision.doctor.health.model import Health
from provision.hostside.survey.nvidia import read_gpu_details
from provision.sandbox import Sandbox, SandboxHost
from provision.sandbox.gpus import model, recorded
from provision.sandbox.gpus.host import files
from provision.sandbox.gpus.model import Gpus, HostFault
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.lifecycle import simulate
from provision.survey import Facts
from provision.survey.document import parse_survey

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


def samples(hosts: Sandbox) -> list[Sample]:
    """What the real nvidia-smi prints for one, two and all GPUs of each profile, with another driver, a GPU missing, and failing."""
    show(hosts, Gpus.requested("h100:8"))
    nvidia = {name: profile.max for name, profile in PROFILES.items() if profile.vendor == "nvidia"}
    tried = [(Gpus.requested(f"{name}:{count}"), "") for name, most in nvidia.items() for count in sorted({1, min(2, most), most})]
    tried += [
        (Gpus.requested("h100"), fault) for fault in ("other-driver", "gpu-missing", "not-loaded", "version-mismatch", "closed-modules")
    ]
    found = []
    for gpus, fault in [*tried, (Gpus.requested("v100"), "gpu-missing")]:
        wrong = [HostFault(fault, "node1", 3)] if fault else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorded, "script", lambda *words: words)
            names, of_host, of_gpus = files("node1", gpus, wrong)["nvidia-smi"]  # type: ignore[misc]
        asked = "".join(f"nvidia-smi {arguments}; printf '\\001%s\\001' $?\n" for arguments in ARGUMENTS)
        state = files("node1", gpus, wrong)["state.txt"]
        said = root(hosts.hosts[0], f"export PROVISION_SIMULATED_GPUS=/tmp/state\ncat >/tmp/state <<'END'\n{state}END\n{asked}true")
        texts = said.split("\1")
        outputs = {each: (int(texts[2 * at + 1]), texts[2 * at]) for at, each in enumerate(ARGUMENTS)}
        found.append(Sample(frozenset(names), of_host, of_gpus, outputs))
    return found


def facts_of(outputs: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """What the survey and the check of health read in the outputs; those that differ in nothing they read are the same."""
    by_query = {arguments: text for arguments, (_, text) in outputs.items() if arguments.startswith("--query")}
    read = {"-q -x": lambda text: (read_gpu_details(text), parsers.nvidia_smi(text)), "topo -m": parsers.topology, "-L": str}
    read |= {"nvlink -s": parsers.nvlink_status, "nvlink -e": parsers.nvlink_errors}
    said = {arguments: parse(outputs[arguments][1]) for arguments, parse in read.items() if outputs[arguments][0] == 0}
    versions = re.findall(r"(?:Driver|CUDA) Version: +[\d.]+", outputs[""][1])
    return {**said, **by_query, "versions": versions, "codes": {arguments: code for arguments, (code, _) in outputs.items()}}


@pytest.mark.slow
def test_recorded_outputs_have_the_facts_that_nvidia_smi_prints(gpu_hosts, tmp_path, request):
    """With --update they are recorded again."""
    real = samples(gpu_hosts)
    if request.config.getoption("--update"):
        version = re.search(r"NVIDIA-SMI (\S+)", real[0].outputs[""][1])
        text = learn(real, f"nvidia-smi {version[1] if version else ''} of Debian 12")
        Path(str(recorded.__file__)).with_name("nvidia-smi.txt").write_text(text, encoding="utf-8")
    script = tmp_path / "nvidia-smi"
    for sample in real:
        script.write_text(recorded.script(sample.names, sample.host, sample.gpus), encoding="utf-8")
        ran = {each: subprocess.run(["sh", str(script), *each.split()], capture_output=True, text=True, check=False) for each in ARGUMENTS}
        assert facts_of({each: (done.returncode, done.stdout) for each, done in ran.items()}) == facts_of(sample.outputs), sample.names


@pytest.mark.slow
def test_hosts_without_an_archive_of_nvidia_smi_show_the_same_gpus_by_recorded_outputs(gpu_hosts, ssh):
    def seen() -> tuple[Any, ...]:
        facts, health = looked_at(gpu_hosts, gpu_hosts.hosts[0], ssh, scripts)
        planned = report(good(provision("plan", str(gpu_hosts.inventory), "--json")))["hosts"]
        torch = {name: each["torch"] for name, each in planned.items()}
        return facts.gpus, facts.driver, facts.nvidia, health.gpus, health.nvlinks, health.topology, torch

    order = json.dumps({"tests": [], "dcgm_level": 1})
    scripts = f"{resources.inline_command('survey')}; echo '{order}' | {resources.inline_command('gpu_health.py')}"
    show(gpu_hosts, Gpus.requested("h100:8"))
    real = seen()
    kept, lists = "/etc/provision-sandbox/nvidia-smi", "/etc/apt/sources.list /etc/apt/sources.list.d"
    hide = f"mv {kept} /root/kept; tar -cf /root/lists.tar $(ls -d {lists}); rm -rf {lists}; mkdir /etc/apt/sources.list.d"
    for each in gpu_hosts.hosts:
        root(each, f"{hide}; echo deb file:/nothing bookworm main >/etc/apt/sources.list")
    try:
        up = good(provision("sandbox", "up", "-n", "3", "--gpus", "h100:8", "--name", gpu_hosts.name))
        assert "nvidia-smi prints recorded outputs on node1, node2 and node3" in up.stderr
        assert "no nvidia-smi in file:/nothing, part non-free: " in " ".join(up.stderr.split()), up.stderr
        assert seen() == real
        good(provision("sandbox", "fault", "xid79@node2", "--name", gpu_hosts.name))
        refused = provision("sandbox", "fault", "power-brake@node3", "--name", gpu_hosts.name)
        assert (refused.returncode, "Only nvidia-smi shows power-brake@node3" in refused.stderr) == (1, True), refused.stderr
        found = report(provision("doctor", str(gpu_hosts.inventory), "--gpu", "--json"))["findings"]
        assert {each["host"] for each in found if each["id"] == "gpu-xid"} == {"node2"}
        assert not {each["id"] for each in found} & {"gpu-health-unreadable", "gpu-throttled"}
    finally:
        for each in gpu_hosts.hosts:
            root(each, f"rm -rf {lists}; tar -xf /root/lists.tar -C /; mv /root/kept {kept}")
    show(gpu_hosts, Gpus.requested("h100:8"))


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
