"""Simulated GPU hosts: profiles and faults as data, what a host shows of them, and the library that answers nvidia-smi."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.cli import main
from provision.cli import sandbox as cli
from provision.diagnosis.signatures import is_known
from provision.doctor.health import parsers
from provision.hostside.survey import activity, nvidia
from provision.sandbox import docker_engine
from provision.sandbox.containers.controller_settings import Settings
from provision.sandbox.gpus import host, library, model, simulation
from provision.sandbox.gpus.model import Gpus, HostFault
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.model import SandboxHost

PROFILES = model.profiles().profiles
FAULTS = model.faults()
RECORDED = Path(__file__).parents[2] / "data/gpu_health"
HOSTS = ["node1", "node2", "node3"]
SOURCE = Path(str(library.__file__)).with_name("nvml.c").read_text(encoding="utf-8")
#: Keys that nvml.c makes of a text and a number, or of several texts.
COMPOSED = re.compile(
    r"(temperature|threshold|clock|max_clock|set_clock|default_clock|topology|p2p|retired_pages|field|ecc|nvlink|instance)\.[\w.]+"
)


def on_fabric(profile: str) -> Gpus:
    return Gpus.requested(profile, fabric="ib")


def possible(profile: str) -> list[str]:
    return [name for name, fault in FAULTS.items() if model.refusal(fault, on_fabric(profile), len(HOSTS)) is None]


def test_there_are_the_promised_gpus_and_faults():
    assert set(PROFILES) == {"v100", "t4", "a100", "a10g", "l40s", "h100", "h200", "b200", "gb200", "rtx5090", "gb10", "mi300x"}
    assert len(FAULTS) >= 25
    assert {fault for profile in PROFILES for fault in possible(profile)} == set(FAULTS), "no profile can have a fault"


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_agrees_with_the_catalogue(name):
    profile = PROFILES[name]
    if profile.vendor == "nvidia":
        assert OURS.hardware().pci_ids.capability(profile.pci) == profile.capability
        assert ("imex" in profile.features) == (profile.pci in OURS.hardware().fabric.imex)
    for row, links in enumerate(profile.mesh):
        assert [links[column] for column in range(8)] == [profile.mesh[column][row] for column in range(8)]
        assert profile.nvlink
        assert sum(map(int, links)) == profile.nvlink.links


@pytest.mark.parametrize(
    ("name", "recorded"), [("h100", "h100-vm-580"), ("b200", "b200-580"), ("t4", "t4-595"), ("a10g", "a10g-515"), ("a100", "a100-535")]
)
def test_a_profile_agrees_with_what_real_gpus_were_recorded_to_say(name, recorded):
    text = (RECORDED / f"{recorded}.xml").read_text(encoding="utf-8")
    profile, gpu = PROFILES[name], ElementTree.fromstring(text[text.index("<?xml") :]).find("gpu")  # noqa: S314  our own file
    assert gpu is not None
    assert gpu.findtext("product_name") == profile.name

    def number(*paths: str) -> int | None:
        said = (re.match(r"\d+", gpu.findtext(path) or "") for path in paths)
        return next((int(each[0]) for each in said if each), None)

    stated = {
        "memory": (number("fb_memory_usage/total"), profile.memory_mb),
        "power": (
            number("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
            profile.power and profile.power[0],
        ),
        "least power": (number("gpu_power_readings/min_power_limit"), profile.power and profile.power[1]),
        "clock": (number("max_clocks/graphics_clock"), profile.clocks[0]),
        "memory clock": (number("max_clocks/mem_clock"), profile.clocks[1]),
        "pcie": (number("pci/pci_gpu_link_info/pcie_gen/max_device_link_gen"), profile.pcie),
        "shut down": (number("temperature/gpu_temp_max_threshold"), profile.temperatures and profile.temperatures[0]),
    }
    differing = {what: pair for what, pair in stated.items() if pair[0] is not None and pair[0] != pair[1]}
    # That A100 is of a server with 500 W; it is sold with 400.
    assert differing == ({"power": (500, 400)} if name == "a100" else {})


def test_the_doctor_knows_what_every_fault_is_called():
    assert {name: each for name, fault in FAULTS.items() for each in fault.finds if not is_known(each)} == {}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_fault_changes_its_host_and_no_other_one(profile):
    gpus = on_fabric(profile)
    healthy = {name: host.files(name, gpus) for name in HOSTS}
    for fault in possible(profile):
        wrong = [HostFault(fault, "node2")]
        changed = [name for name in HOSTS if host.files(name, gpus, wrong) != healthy[name]]
        assert changed == ["node2"], fault


@pytest.mark.parametrize("profile", PROFILES)
def test_a_fault_changes_only_what_a_healthy_gpu_answers(profile):
    """Or it would say something that no such GPU says: its key is misspelt, or the fault lacks a need."""
    healthy = host.files("node1", on_fabric(profile)).get("state.txt", "")
    known = {line.split()[1] for line in healthy.splitlines()} | {"error"}
    for fault in possible(profile):
        changed = {**FAULTS[fault].gpu, **FAULTS[fault].all}
        assert [key for key in changed if key not in known and re.sub(r"\.\d+$", "", key) not in known] == [], fault


def test_the_library_reads_every_key_that_a_host_states():
    stated = {line.split()[1] for name in PROFILES for line in host.files("node1", on_fabric(name)).get("state.txt", "").splitlines()}
    quoted = set(re.findall(r'"([\w.]+)"', SOURCE))
    assert {key for key in stated if key not in quoted and not COMPOSED.fullmatch(key)} == set()


@pytest.mark.parametrize(
    ("text", "driver", "fabric", "said"),
    [
        ("h10:8", "", "", "not `h10:8`; did you mean `h100`?"),
        ("h100:9", "", "", "expected 1 to 8 GPUs of h100 in a host, not 9"),
        ("gb10:2", "", "", "expected 1 to 1 GPUs of gb10"),
        ("h100:0", "", "", "not 0"),
        ("h100:many", "", "", "expected PROFILE:COUNT"),
        ("h100", "580; reboot", "", "expected a branch or version"),
        ("mi300x", "580", "", "expected a version, such as 6.16.6, not `580`"),
        ("h100", "999", "", "unknown branch 999"),
        ("v100", "590", "", "590.44.01 does not run Tesla V100-SXM2-32GB: GPUs of compute capability 7.0"),
        ("h100", "", "ibb", "expected ib or roce, not `ibb`; did you mean `ib`?"),
    ],
)
def test_invalid_gpus_are_refused(text, driver, fabric, said):
    with pytest.raises(UsageError) as caught:
        Gpus.requested(text, driver, fabric)
    assert said in caught.value.what


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("xid7@node1", "unknown is `xid7`; did you mean `xid79`?"),
        ("xid79@node7", "unknown host `node7`"),
        ("xid79", "expected FAULT@HOST"),
        ("xid79@node1:8", "node1 has no GPU 8, only 0 to 7"),
        ("imex-down@node1", "8 × h100 cannot have imex-down: it needs imex"),
        ("ib-down@node1", "it needs RDMA cards (--fabric)"),
        ("dropped-gpu@node1", "it does not happen with gsp"),
    ],
)
def test_invalid_faults_are_refused(text, said):
    with pytest.raises(UsageError) as caught:
        Simulation(Gpus.requested("h100")).changed([text], HOSTS, clear=False)
    assert said in caught.value.what


def test_a_driver_is_a_branch_or_a_version():
    assert Gpus.requested("h100:4", "570") == Gpus.requested("H100:4", "570") == Gpus("h100", 4, "570.26")
    assert Gpus.requested("h100:4", "580.95.05").driver == "580.95.05"
    assert Gpus.requested("h100").count == 8


def test_a_gpu_alone_has_no_links():
    assert not {"nvlink", "fabric", "switches", "several"} & Gpus.requested("h100:1").features
    assert {"nvlink", "fabric"} <= Gpus.requested("gb200:1").features  # of its rack
    assert model.refusal(FAULTS["nvlink-inactive"], Gpus.requested("h100:1"), 1) == "it needs NVLinks, which GPUs have among several"
    assert model.refusal(FAULTS["nvlink-inactive"], Gpus.requested("l40s:2"), 1) == "it needs NVLinks"
    assert "field.91" not in host.files("node1", Gpus.requested("h100:1"))["state.txt"]


def test_faults_are_set_and_cleared_one_by_one():
    healthy = Simulation(Gpus.requested("h100"))
    both = healthy.changed(["xid79@node1:3", "xid48@node2"], HOSTS, clear=False)
    assert list(map(str, both.faults)) == ["xid79@node1:3", "xid48@node2"]
    assert both.changed(["xid48@node2"], HOSTS, clear=False) == both
    assert list(map(str, both.changed(["xid79@node1:3"], HOSTS, clear=True).faults)) == ["xid48@node2"]
    assert both.changed([], HOSTS, clear=True) == healthy


def test_amd_hosts_show_the_kernels_topology_and_answers_of_amd_smi():
    files = host.files("node1", Gpus.requested("mi300x:2"))
    properties = files["tree/sys/class/kfd/kfd/topology/nodes/2/properties"]
    assert "gfx_target_version 90402\n" in properties
    assert "simd_count 1216\n" in properties
    assert '"target_graphics_version": "gfx942"' in files["amd-smi"]
    assert "/dev/kfd" in files["devices"]


def test_the_library_answers_from_the_text_and_finds_no_cuda_device(tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path / "cache"))
    state = tmp_path / "state.txt"
    state.write_text(
        host.files("node1", on_fabric("h100"), [HostFault("xid79", "node1", 2), HostFault("mig-instances", "node1", 3)])["state.txt"],
        encoding="utf-8",
    )
    monkeypatch.setenv("PROVISION_SIMULATED_GPUS", str(state))
    for name, content in library.built().items():
        (tmp_path / name).write_bytes(content)
    nvml = ctypes.CDLL(str(tmp_path / "libnvidia-ml.so.1"))
    count, gpu, text, limit = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.c_uint()
    assert nvml.nvmlInit_v2() == 0
    assert (nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value) == (0, 8)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(8, ctypes.byref(gpu)) == 2
    assert nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(gpu)) == 0
    assert (nvml.nvmlDeviceGetName(gpu, text, 96), text.value) == (0, b"NVIDIA H100 80GB HBM3")
    assert nvml.nvmlDeviceGetName(gpu, text, 4) == 7
    assert (nvml.nvmlDeviceGetPowerManagementLimit(gpu, ctypes.byref(limit)), limit.value) == (0, 700_000)
    assert nvml.nvmlDeviceGetFanSpeed(gpu, ctypes.byref(limit)) == 3
    assert nvml.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(gpu)) == 0
    assert nvml.nvmlDeviceGetName(gpu, text, 96) == 15
    assert ctypes.CDLL(str(tmp_path / "libcuda.so.1")).cuInit(0) == 100
    instance = ctypes.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(3, ctypes.byref(gpu)) == 0
    assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 7, ctypes.byref(instance)) == 6, "not found"
    assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 6, ctypes.byref(instance)) == 0
    assert nvml.nvmlDeviceGetUUID(instance, text, 96) == 0
    assert text.value.startswith(b"MIG-6")
    assert (nvml.nvmlDeviceGetGpuInstanceId(instance, ctypes.byref(count)), count.value) == (0, 13)
    assert nvml.nvmlDeviceGetGpuInstanceId(gpu, ctypes.byref(count)) == 3, "not supported: it is the whole GPU"
    assert nvml.nvmlDeviceGetPowerManagementLimit(instance, ctypes.byref(limit)) == 3, "not supported by an instance"


def test_the_library_needs_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PROVISION_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProvisionError, match="need a C compiler"):
        library.built()


def test_gpus_need_root_and_a_host_that_runs(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ProvisionError, match="need root"):
        simulation.check(Gpus.requested("h100"))
    with pytest.raises(ProvisionError, match="does not run"):
        simulation._change("node1", 0, {})


def test_a_process_that_is_no_hosts_first_is_not_entered(monkeypatch):
    def started(*_: object, **__: object) -> None:
        pytest.fail("entered it")

    monkeypatch.setattr(simulation.subprocess, "Popen", started)
    for process in (os.getpid(), 1):
        with pytest.raises(ProvisionError, match="is not this host's first one"):
            simulation._change("node1", process, {})


def test_what_a_host_runs_ends_with_an_interrupt(tmp_path):
    stop, file = threading.Event(), tmp_path / "pid"
    threading.Timer(0.6, stop.set).start()
    with pytest.raises(simulation.subprocess.TimeoutExpired):
        simulation._run(["sh", "-c", f"sleep 60 & echo $! >{file}; wait"], b"", dict(os.environ), stop)
    deadline, process = time.monotonic() + 5, int(file.read_text(encoding="utf-8"))
    while Path(f"/proc/{process}").exists() and "\tZ" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"gpus": {}}', '{"gpus": {"profile": "h900", "count": 1, "driver": "580.1"}, "faults": []}']
)
def test_a_record_that_cannot_be_read_is_none(tmp_path, monkeypatch, text):
    monkeypatch.setattr(simulation, "_record", lambda _name: tmp_path / "gpus.json")
    assert Simulation.of("one") is None
    (tmp_path / "gpus.json").write_text(text, encoding="utf-8")
    assert Simulation.of("one") is None


def test_only_hosts_that_differ_or_show_nothing_since_a_restart_are_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "_record", lambda _name: tmp_path / "gpus.json")
    monkeypatch.setattr(simulation, "check", lambda _gpus: None)
    monkeypatch.setattr(simulation.library, "built", dict)
    monkeypatch.setattr(simulation, "_shows", lambda process: process != 3)
    changed: list[str] = []
    monkeypatch.setattr(simulation, "_change", lambda host, *_: changed.append(host))
    hosts = [SandboxHost(name, "", name, "", "", "running") for name in HOSTS]
    runs: Any = SimpleNamespace(process=lambda each: int(each.name[-1]))
    healthy = Simulation(Gpus.requested("h100"))
    simulation.show(runs, "one", hosts, healthy)
    assert (sorted(changed), Simulation.of("one")) == (HOSTS, healthy)
    changed.clear()
    simulation.show(runs, "one", hosts, healthy.changed(["xid79@node2"], HOSTS, clear=False))
    assert sorted(changed) == ["node2", "node3"]


def test_a_missing_gpu_is_the_one_that_was_named():
    gpus = Gpus.requested("v100")
    lines = host.files("node1", gpus, [HostFault("gpu-missing", "node1", 3), HostFault("gpu-missing", "node1", 5)])[
        "state.txt"
    ].splitlines()
    minors = [line.split()[2] for line in lines if line.split()[1] == "minor"]
    assert minors == ["0", "1", "2", "4", "6", "7"]
    assert {line.split()[0] for line in lines} == {"-", "0", "1", "2", "3", "4", "5"}
    assert "3 topology.3 40" in lines
    assert not any(" p2p.6 " in line or " topology.6 " in line for line in lines)


def test_faults_that_contradict_each_other_are_refused():
    none = Simulation(Gpus.requested("h100")).changed(["no-driver@node1"], HOSTS, clear=False)
    with pytest.raises(UsageError, match="nouveau@node1 contradicts no-driver@node1"):
        none.changed(["nouveau@node1"], HOSTS, clear=False)
    assert len(none.changed(["nouveau@node2", "shm-small@node1"], HOSTS, clear=False).faults) == 3


def test_no_host_is_made_where_gpus_cannot_be_simulated(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(cli.sandbox, "up", lambda **_: pytest.fail("made hosts"))
    with pytest.raises(ProvisionError, match="need root"):
        main.app(["sandbox", "up", "--gpus", "h100:8"], standalone_mode=False)


def test_only_sandboxes_take_a_base_from_the_cache_without_a_pull(monkeypatch, tmp_path):
    def get(name: str) -> None:
        if name != "made:1":
            raise docker.errors.ImageNotFound("no such image")

    engine: Any = SimpleNamespace(images=SimpleNamespace(get=get), api=SimpleNamespace(pull=lambda *_, **__: [{"error": "no such host"}]))
    monkeypatch.setattr(docker_engine.debootstrap, "tar", lambda *_: tmp_path)
    monkeypatch.setattr(docker_engine.debootstrap, "missing", lambda: None)
    for prefer, wanted in ((True, []), (False, ["pulling debian:12"])):
        said: list[str] = []
        kept: list[str] = []
        given = ("debian:12", ("made", "1"), Settings(), said.append)
        assert docker_engine.base_image(engine, *given, prefer_made=prefer, remark=kept.append) == "made:1"
        assert (said, len(kept)) == (wanted, len(wanted))


def printed(tmp_path: Path, gpus: Gpus, *arguments: str, faults: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """What the stand-in for nvidia-smi itself prints."""
    script = tmp_path / "nvidia-smi"
    script.write_text(host.files("node1", gpus, [HostFault(name, "node1", 1) for name in faults])["nvidia-smi"], encoding="utf-8")
    return subprocess.run(["sh", str(script), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if profile.vendor == "nvidia"])
def test_recorded_outputs_are_those_of_the_profile(name, tmp_path):
    profile, gpus = PROFILES[name], Gpus.requested(name)
    query = "--query-gpu=" + ",".join(nvidia.GPU_FIELDS)
    table, driver = nvidia.read_gpu_table(printed(tmp_path, gpus, query, "--format=csv,noheader,nounits").stdout, nvidia.GPU_FIELDS)
    assert driver == gpus.driver
    assert [(each["name"], each["compute_capability"], each["memory_mb"]) for each in table] == [
        (profile.name, profile.capability, profile.memory_mb or None)
    ] * gpus.count
    cuda, details = nvidia.read_gpu_details(printed(tmp_path, gpus, "-q", "-x").stdout)
    assert cuda == OURS.cuda().toolkits.of_branch(gpus.driver)
    assert set(details) == {each["bus"] for each in table}
    assert {each.get("mig") for each in details.values()} == {"Disabled" if "mig" in profile.features else None}
    assert all(each["simulated"] for each in details.values())
    health = parsers.nvidia_smi(printed(tmp_path, gpus, "-q", "-x").stdout)
    assert {each.ecc for each in health.gpus} == {"Enabled" if "ecc" in profile.features else None}
    assert {each.default_power_limit for each in health.gpus} == {float(profile.power[0]) if profile.power else None}
    assert {each.pcie_generation for each in health.gpus} == {profile.pcie or None}
    links = parsers.nvlink_status(printed(tmp_path, gpus, "nvlink", "-s").stdout)
    assert len(links) == (gpus.count if profile.nvlink else 0)
    loads = printed(tmp_path, gpus, "--query-gpu=" + ",".join(activity.LOAD_FIELDS), "--format=csv,noheader,nounits").stdout
    assert len(loads.splitlines()) == gpus.count


def test_recorded_outputs_show_links_between_gpus_and_which_of_them_are_there(tmp_path):
    pairs = parsers.topology(printed(tmp_path, Gpus.requested("v100"), "topo", "-m").stdout)
    assert (pairs[0, 3], pairs[0, 1], pairs[0, 7]) == ("NV2", "NV1", "SYS")
    assert set(parsers.topology(printed(tmp_path, Gpus.requested("l40s:8"), "topo", "-m").stdout).values()) == {"NODE", "SYS"}
    listed = printed(tmp_path, Gpus.requested("t4:3"), "-L", faults=("gpu-missing",)).stdout
    assert re.findall(r"^GPU (\d): Tesla T4", listed, re.MULTILINE) == ["0", "1"]
    assert "<minor_number>2</minor_number>" in printed(tmp_path, Gpus.requested("t4:3"), "-q", "-x", faults=("gpu-missing",)).stdout


@pytest.mark.parametrize(
    ("faults", "arguments", "code", "said"),
    [
        ((), ("dmon",), 1, "not recorded: nvidia-smi dmon"),
        (("not-loaded",), ("-q", "-x"), 9, "couldn't communicate with the NVIDIA driver"),
        (("version-mismatch",), (), 18, "Driver/library version mismatch\nNVML library version: 580.65\n"),
        (("closed-modules",), (), 6, "No devices were found"),
        (("closed-modules",), ("-L",), 0, "No devices found."),
        (("other-driver",), (), 0, "Driver Version: 570.26       CUDA Version: 12.8     |"),
    ],
)
def test_recorded_outputs_fail_as_nvidia_smi_does(faults, arguments, code, said, tmp_path):
    done = printed(tmp_path, Gpus.requested("h100:2"), *arguments, faults=faults)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done


def test_faults_that_only_nvidia_smi_shows_are_refused_where_it_prints_recorded_outputs(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "_record", lambda _name: tmp_path / "gpus.json")
    monkeypatch.setattr(simulation, "check", lambda _gpus: None)
    monkeypatch.setattr(simulation.library, "built", dict)
    monkeypatch.setattr(simulation, "_change", lambda host, *_: "no archive" if host == "node3" else "")
    hosts = [SandboxHost(name, "", name, "", "", "running") for name in HOSTS]
    runs: Any = SimpleNamespace(process=lambda _host: 1)
    seen = Simulation(Gpus.requested("h100")).changed(["xid79@node3", "power-brake@node2"], HOSTS, clear=False)
    assert simulation.show(runs, "one", hosts, seen) == {"node3": "no archive"}
    with pytest.raises(ProvisionError) as caught:
        simulation.show(runs, "one", hosts, seen.changed(["power-brake@node3", "mig-empty@node3"], HOSTS, clear=False))
    assert (
        "Only nvidia-smi shows power-brake@node3, mig-empty@node3, and there it prints recorded outputs: no archive." in caught.value.what
    )
    assert Simulation.of("one") == seen, "what can be shown is recorded as shown"
