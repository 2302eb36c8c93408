"""Health of GPUs: parsers on outputs of real tools (tests/data/gpu_health), the checks' judgement, the script on the hosts, verdicts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from invented_hosts import stated
from loading import load
from typer.testing import CliRunner

from provision.base import resources
from provision.base.errors import UsageError
from provision.catalog import OURS
from provision.cli.main import app
from provision.cli.options import inventory_of
from provision.diagnosis.findings import Finding
from provision.doctor import host_checks
from provision.doctor.checks import examine
from provision.doctor.health import parsers
from provision.doctor.health.collect import HealthRequest, parse
from provision.doctor.health.model import Gpu, Gpus, Health, HostAnswer, KernelLog, Output, RdmaPort
from provision.doctor.health.verdict import Verdict, verdicts, write_quarantine
from provision.inventory import by_name

DATA = Path(__file__).parents[2] / "data" / "gpu_health"
UNREPAIRABLE = "rubin-615.xml"
WELL = sorted(path.name for path in DATA.glob("*.xml") if path.name != UNREPAIRABLE)


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def answer(kernel: str = "", gpus: int = 1, rdma: tuple[RdmaPort, ...] = (), **outputs: str) -> HostAnswer:
    """What a host says, with the outputs of these commands (`nvidia_smi` is nvidia-smi)."""
    made = {name.replace("_", "-"): Output(found=True, code=0, timed_out=False, text=each) for name, each in outputs.items()}
    return HostAnswer(gpus=gpus, outputs=made, kernel_log=KernelLog(readable=True, lines=tuple(kernel.splitlines())), rdma=rdma)


def judged(health: Health) -> dict[str, Finding]:
    return {each.id: each for each in examine({}, (), {}, {"h": health}, catalog=OURS)}


def one(**values: Any) -> Health:
    """A host with one GPU of these values."""
    return Health(devices=1, gpus=Gpus(attached=1, gpus=(Gpu(bus_id="1", name="G", **values),)))


# ---------------------------------------------------------------------------------------------- parsers


@pytest.mark.parametrize(
    ("name", "model", "uncorrectable", "limit"),
    [
        ("t4-515.xml", "Tesla T4", 0, 70.0),
        ("a10g-515.xml", "NVIDIA A10G", 0, 300.0),
        ("a100-535.xml", "NVIDIA A100-SXM4-80GB", 0, 500.0),
        ("h100-vm-580.xml", "NVIDIA H100 80GB HBM3", 0, 700.0),
        ("b200-580.xml", "NVIDIA B200", 0, 1000.0),
        ("gb300-580.xml", "NVIDIA GB300", 0, 1400.0),
        ("rtx-pro-6000-590.xml", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None, 300.0),
        ("t4-595.xml", "Tesla T4", 0, 70.0),
        ("rubin-615.xml", "NVIDIA Graphics Device", 0, 2300.0),
    ],
)
def test_nvidia_smi_of_all_generations(name: str, model: str, uncorrectable: int | None, limit: float) -> None:
    (gpu,) = parsers.nvidia_smi(text(name)).gpus
    assert (gpu.name, gpu.uncorrectable, gpu.power_limit, gpu.default_power_limit) == (
        model,
        uncorrectable,
        limit,
        limit,
    )
    assert not gpu.lost
    assert not gpu.throttled
    assert not gpu.recovery


def read_of(name: str) -> Health:
    """The health of a host with the first GPU of a recorded output alone."""
    return parsers.health(answer(nvidia_smi=re.sub("<attached_gpus>.<", "<attached_gpus>1<", text(name))))


@pytest.mark.parametrize("name", WELL)
def test_a_gpu_as_it_should_be_makes_no_host_unfit_or_degraded(name: str) -> None:
    assert {each.severity for each in judged(read_of(name)).values()} <= {"note"}


def test_a_gpu_of_a_virtual_machine_is_healthy() -> None:
    read = parsers.health(answer(nvidia_smi=text("h100-vm-580.xml"), nvlink_status="", nvlink_errors="", topology=text("topo-h100-vm.txt")))
    assert judged(read) == {}
    assert [each.word for each in verdicts(["h"], {"h": read}, ())] == ["healthy"]


def test_a_gpu_whose_memory_cannot_be_repaired_and_whose_idle_link_has_two_lanes() -> None:
    assert {name: each.severity for name, each in judged(read_of(UNREPAIRABLE)).items()} == {"gpu-ecc": "error"}
    busy = text(UNREPAIRABLE).replace("<performance_state>P5", "<performance_state>P0")
    assert judged(parsers.health(answer(nvidia_smi=busy)))["gpu-pcie"].observed == "GPU 0 has 2 lanes"
    pending = text(UNREPAIRABLE).replace("<bank_remapper_pending>No", "<bank_remapper_pending>Yes")
    assert "rows of its memory wait" in judged(parsers.health(answer(nvidia_smi=pending)))["gpu-ecc"].observed


def test_topologies() -> None:
    found = parsers.topology(text("topo-h100.txt"))
    assert len(found) == 28
    assert set(found.values()) == {"NV18"}
    assert parsers.topology(text("topo-1080ti.txt")) == {(0, 1): "PHB"}
    assert set(parsers.topology(text("topo-dgx2.txt")).values()) == {"NV6"}
    assert set(parsers.topology(re.sub(r"GPU0", "\x1b[4mGPU0\x1b[0m", text("topo-h100.txt"), count=1)).values()) == {"NV18"}


@pytest.mark.parametrize(("name", "active", "inactive"), [("v100", 4, 2), ("gb200", 18, 0), ("a6000", 4, 0)])
def test_nvlinks(name: str, active: int, inactive: int) -> None:
    (link,) = parsers.nvlink_status(text(f"nvlink-status-{name}.txt"))
    assert (link.active, link.inactive) == (active, inactive)


def test_nvlink_errors_are_summed_over_links() -> None:
    recorded = text("nvlink-errors-h100.txt")
    assert parsers.nvlink_errors(recorded) == {0: {"Replay Errors": 0, "Recovery Errors": 0, "CRC Errors": 0}}
    assert parsers.nvlink_errors(recorded.replace("Recovery Errors: 0", "Recovery Errors: 2"))[0]["Recovery Errors"] == 6


def test_xids() -> None:
    found = {(each.number, each.device): each.nonfatal for each in parsers.xids(tuple(text("kernel.log").splitlines()))}
    assert found == {
        (63, "0000:10:1c"): False,
        (45, "0000:dc:00"): False,
        (45, "0000:ed:00"): False,
        (144, "0000:01:00"): True,
        (149, "0000:00:00"): False,
        (31, "0000:01:00"): False,
        (94, "0000:9b:00"): False,
    }
    of_switches = {
        each.number: (each.switch, each.device, each.nonfatal) for each in parsers.xids(tuple(text("kernel-nvswitch.log").splitlines()))
    }
    assert of_switches == {12028: (True, "0000:05:00", True), 20034: (True, "0000:c5:00", False)}
    (lost,) = parsers.xids(("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",))
    assert (lost.number, lost.device) == (79, "0000:01:00")


def test_dcgm() -> None:
    assert parsers.dcgm(text("dcgm-3.1.json")) == ()
    (failed,) = parsers.dcgm(text("dcgm-4.2.json"))
    assert (failed.test, failed.status, failed.gpus, failed.severity) == ("software", "fail", "0", 5)
    assert failed.text.startswith("Persistence Mode:")
    (old,) = parsers.dcgm(text("dcgm-3.1.json").replace('"gpu_ids" : 1, "status" : "PASS"', '"gpu_ids" : 1, "status" : "Fail"'))
    assert (old.test, old.gpus, old.severity) == ("software", "1", None)


@pytest.mark.parametrize(("name", "count", "least"), [("h100", 8, 53.61), ("a10", 1, 25.17), ("rtx3050", 1, 12.98)])
def test_nvbandwidth(name: str, count: int, least: float) -> None:
    speeds = parsers.nvbandwidth(text(f"nvbandwidth-{name}.txt"))["host_to_device_memcpy_ce"]
    assert (len(speeds), min(speeds)) == (count, least)


@pytest.mark.parametrize(("name", "gpus", "busbw"), [("h100", 8, 470.73), ("gb300", 4, 685.27), ("2080ti", 0, 21.86)])
def test_all_reduce(name: str, gpus: int, busbw: float) -> None:
    found = parsers.all_reduce(text(f"allreduce-{name}.txt"))
    assert (found.gpus, found.busbw, found.wrong) == (gpus, busbw, 0)


def test_wrong_results_of_all_reduce_are_counted() -> None:
    assert parsers.all_reduce(text("allreduce-h100.txt").replace("470.73      0", "470.73     12")).wrong == 1


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]>'
    "<nvidia_smi_log><gpu>&b;</gpu></nvidia_smi_log>"
)


@pytest.mark.parametrize(
    ("name", "hostile"),
    [
        ("nvidia_smi", BOMB),
        ("nvidia_smi", '<?xml version="1.0"?><!DOCTYPE l [%x;]><nvidia_smi_log/>'),
        ("nvidia_smi", ""),
        ("nvidia_smi", "\x1b[2J\x00\x07"),
        ("nvidia_smi", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        ("nvidia_smi", '<?xml version="1.0" ?><nvidia_smi_log><gpu>' + "x" * (3 << 20)),
        ("nvidia_smi", '<?xml version="1.0" ?><html/>'),
        ("nvidia_smi", '<?xml version="1.0" ?><nvidia_smi_log>' + "<gpu/>" * 1000 + "</nvidia_smi_log>"),
        ("nvidia_smi", '<?xml version="1.0" ?>' + "<a>" * 100_000),
        ("dcgm", "Error: unable to establish a connection to the specified host: localhost"),
        ("dcgm", "{" * 100_000),
        ("dcgm", '{"DCGM Diagnostic": []}'),
        ("dcgm", '{"DCGM Diagnostic": {"test_categories": [{"tests": [7]}]}}'),
        ("dcgm", '{"DCGM Diagnostic": {"test_categories": {"a": 1}}}'),
        ("dcgm", '{"DCGM Diagnostic": {"test_categories": [{"tests": 7}]}}'),
        ("nvbandwidth", "Running host_to_device_memcpy_ce.\n 0   NaN\n"),
        ("allreduce", "1 1 float sum -1 1 1 1e999 0"),
    ],
)
def test_hostile_outputs_are_unreadable(name: str, hostile: str) -> None:
    outputs = {"nvidia_smi": text("a10g-515.xml"), name: hostile}
    read = parsers.health(answer(**outputs), ("dcgm", "nvbandwidth", "allreduce"))
    assert [each.what for each in read.unreadable] == [name.replace("_", "-")]
    assert judged(read)["gpu-health-unreadable"].severity == ("error" if name == "nvidia_smi" else "warning")
    assert all(len(each.why) < 500 for each in read.unreadable)


@pytest.mark.parametrize(
    "document", ["", "bash: python3: not found", "[]", "{}", '{"gpus": "x", "outputs": {}, "kernel_log": 1, "rdma": []}']
)
def test_an_answer_that_is_none_is_unreadable(document: str) -> None:
    read = parse(f"===PROVISION-GPU-HEALTH-BEGIN===\n{document}\n===END===", HealthRequest())
    assert judged(read)["gpu-health-unreadable"].severity == "error"


# ---------------------------------------------------------------------------------------------- judgement


@pytest.mark.parametrize(
    ("values", "name", "severity"),
    [
        ({"uncorrectable": 3}, "gpu-ecc", "error"),
        ({"remap_failed": True}, "gpu-ecc", "error"),
        ({"remap_pending": True}, "gpu-ecc", "warning"),
        ({"uncorrectable_ever": 3, "uncorrectable": 0}, "gpu-ecc", "note"),
        ({"lost": True}, "gpu-lost", "error"),
        ({"recovery": "Reboot"}, "gpu-lost", "error"),
        ({"pcie_width": 8, "pcie_max_width": 16}, "gpu-pcie", "warning"),
        ({"pcie_width": 8, "pcie_max_width": 16, "virtual": True}, "gpu-pcie", "note"),
        ({"pcie_generation": 1, "pcie_max_generation": 4, "busy": True}, "gpu-pcie", "warning"),
        ({"throttled": ("hw_thermal_slowdown",)}, "gpu-throttled", "warning"),
        ({"temperature": 90, "highest_temperature": 85}, "gpu-throttled", "warning"),
        ({"margin": 0}, "gpu-throttled", "warning"),
        ({"power_limit": 300.0, "default_power_limit": 700.0}, "gpu-power-limit", "warning"),
        ({"persistence": False}, "gpu-persistence", "note"),
        ({"fabric": "In Progress"}, "nvlink-fabric-state", "error"),
        ({"fabric": "Completed", "fabric_status": "Insufficient Resources"}, "nvlink-fabric-state", "error"),
        ({"fabric": "Completed", "fabric_faults": ("route_unhealthy",)}, "gpu-nvlink", "warning"),
    ],
)
def test_what_is_wrong_with_a_gpu(values: dict[str, Any], name: str, severity: str) -> None:
    assert {each.id: each.severity for each in judged(one(**values)).values()} == {name: severity}


def test_an_idle_gpu_lowers_its_link_and_that_is_no_finding() -> None:
    assert judged(one(pcie_generation=1, pcie_max_generation=5, busy=False, fabric="Completed", margin=40)) == {}


def test_the_worst_of_several_xids_counts() -> None:
    read = parsers.health(answer(text("kernel.log"), nvidia_smi=text("rtx-pro-6000-590.xml")))
    found = judged(read)["gpu-xid"]
    assert found.severity == "error"  # 149 is fatal
    assert "Xid 149: reset the GPU; check the peer of the link" in found.fix
    programs = "\n".join(line for line in text("kernel.log").splitlines() if re.search(r": (31|45),", line))
    assert judged(parsers.health(answer(programs, nvidia_smi=text("rtx-pro-6000-590.xml"))))["gpu-xid"].severity == "note"


def test_a_non_fatal_error_of_a_switch_is_a_note_and_a_fatal_one_is_not() -> None:
    harmless, fatal = text("kernel-nvswitch.log").splitlines()
    for lines, severity, number in ((harmless, "note", 12028), (f"{harmless}\n{fatal}", "error", 20034)):
        seen = stated({"signs": {"kernel_log": lines.splitlines()}})
        found = examine({"h": seen}, (), {}, {"h": parsers.health(answer(lines, nvidia_smi=text("h100-vm-580.xml")))}, catalog=OURS)
        in_driver = [each for each in found if each.layer == "driver"]
        assert [(each.id, each.severity) for each in in_driver] == [("gpu-xid", severity)]
        assert f"SXid {number}" in in_driver[0].observed


def test_what_the_survey_and_the_check_of_health_say_of_the_fabric_is_one_finding() -> None:
    xml = re.sub("<fabric>\\s*<state>N/A</state>", "<fabric><state>In Progress</state>", text("h100-vm-580.xml"))
    read = parsers.health(answer(nvidia_smi=xml))
    surveyed = stated({"gpus": [{"fabric_state": "In Progress"}]})
    (found,) = (each for each in examine({"h": surveyed}, (), {}, {"h": read}, catalog=OURS) if each.layer == "driver")
    assert (found.id, found.observed) == ("nvlink-fabric-state", "nvidia-smi says of the NVLink fabric: state In Progress, status unknown")
    assert [each.word for each in verdicts(["h"], {"h": read}, [found])] == ["unfit"]
    worn = text("gb300-580.xml").replace("<summary>Healthy", "<summary>Limited Capacity").replace("<bandwidth>Full", "<bandwidth>Degraded")
    assert "summary Limited Capacity and bandwidth Degraded" in judged(parsers.health(answer(nvidia_smi=worn)))["gpu-nvlink"].observed


def test_a_gpu_with_fewer_links_than_its_like() -> None:
    status = text("nvlink-status-a6000.txt") + text("nvlink-status-a6000.txt").replace("GPU 0", "GPU 1").replace(
        "14.062 GB/s\n\t Link 3", "<inactive>\n\t Link 3"
    )
    read = parsers.health(answer(nvidia_smi=text("rtx-pro-6000-590.xml"), nvlink_status=status))
    assert judged(read)["gpu-nvlink"].observed == "GPU 1 has 3 active NVLinks (1 inactive)"
    same = parsers.health(answer(nvidia_smi=text("rtx-pro-6000-590.xml"), nvlink_status=text("nvlink-status-v100.txt")))
    assert "gpu-nvlink" not in judged(same)  # the board has four of six


def test_a_pair_that_is_connected_worse() -> None:
    worse = text("topo-h100.txt").replace("GPU0\t X \tNV18", "GPU0\t X \tSYS", 1)
    assert judged(Health(topology=parsers.topology(worse)))["gpu-topology"].observed == "GPU 0 and 1: SYS"
    assert judged(Health(topology=parsers.topology(text("topo-h100.txt")))) == {}


def test_dcgm_judges_settings_mildly() -> None:
    mild = parsers.dcgm(text("dcgm-4.2.json"))
    severe = parsers.dcgm(text("dcgm-4.2.json").replace('"error_severity" : 5', '"error_severity" : 2'))
    assert [judged(Health(dcgm=each))["gpu-dcgm"].severity for each in (mild, severe)] == ["warning", "error"]


def test_bandwidths() -> None:
    healthy = parsers.nvbandwidth(text("nvbandwidth-h100.txt"))
    gpu = Gpu(bus_id="1", name="NVIDIA H100 80GB HBM3", pcie_width=16, pcie_max_generation=5, pcie_max_width=16)
    gpus = Gpus(attached=8, gpus=(gpu,) * 8)
    assert judged(Health(gpus=gpus, bandwidths=healthy)) == {}
    slow = {"host_to_device_memcpy_ce": (56.0,) * 7 + (25.0,)}
    assert judged(Health(gpus=gpus, bandwidths=slow))["gpu-bandwidth"].observed == "host_to_device_memcpy_ce: GPU 7 has 25 GB/s"
    measured = parsers.all_reduce(text("allreduce-h100.txt"))
    for busbw, severity in ((470.0, None), (350.0, "warning"), (100.0, "error")):
        found = judged(Health(gpus=gpus, allreduce=measured.model_copy(update={"busbw": busbw}))).get("gpu-allreduce")
        assert (found.severity if found else None) == severity
    unknown = judged(Health(gpus=gpus, allreduce=measured.model_copy(update={"gpus": 3})))["gpu-allreduce"]
    assert (unknown.severity, "is not known" in unknown.observed) == ("note", True)


@pytest.mark.parametrize(
    ("name", "code", "printed", "found"),
    [
        (
            "nvbandwidth",
            1,
            "Running host_to_device_memcpy_ce.\n 0 55.00\nRunning device_to_host_memcpy_ce.\n[CUDA_ERROR_ECC_UNCORRECTABLE]\n\n",
            {"gpu-bandwidth": ("error", "nvbandwidth failed (exit code 1): [CUDA_ERROR_ECC_UNCORRECTABLE]")},
        ),
        ("nvbandwidth", -11, "", {"gpu-bandwidth": ("error", "nvbandwidth failed (exit code -11): it printed nothing")}),
        (
            "nvbandwidth",
            0,
            "Running host_to_device_memcpy_ce.\n 0 55.00\n",
            {"gpu-health-unreadable": ("warning", "nvbandwidth: it has no result of device_to_host_memcpy_ce")},
        ),
        (
            "nvbandwidth",
            0,
            "Running host_to_device_memcpy_ce.\n 0 N/A\nRunning device_to_host_memcpy_ce.\n 0 55.00\n",
            {"gpu-health-unreadable": ("warning", "nvbandwidth: it has no result of host_to_device_memcpy_ce")},
        ),
        (
            "nvbandwidth",
            127,
            "nvbandwidth: error while loading shared libraries: libboost_program_options.so.1.74.0",
            {
                "gpu-health-unreadable": (
                    "warning",
                    "nvbandwidth: it has no result (exit code 127): nvbandwidth: error while loading shared libraries: "
                    "libboost_program_options.so.1.74.0",
                )
            },
        ),
    ],
)
def test_a_test_that_does_not_end_well(name: str, code: int, printed: str, found: dict[str, tuple[str, str]]) -> None:
    output = Output(found=True, code=code, timed_out=False, text=printed)
    read = parsers.health(answer(gpus=0).model_copy(update={"outputs": {name: output}}), ("nvbandwidth",))
    assert {each.id: (each.severity, each.observed) for each in judged(read).values()} == found


def test_an_allreduce_that_crashes_after_its_first_size_is_an_error() -> None:
    begun = text("allreduce-h100.txt").rpartition("#  ")[0] + "h: Test NCCL failure common.cu:303 'unhandled cuda error'\n"
    outputs = {"allreduce": Output(found=True, code=3, timed_out=False, text=begun)}
    found = judged(parsers.health(answer().model_copy(update={"outputs": outputs}), ("allreduce",)))["gpu-allreduce"]
    assert (found.severity, "allreduce failed (exit code 3): h: Test NCCL failure" in found.observed) == ("error", True)


def test_what_a_check_cannot_read_is_a_finding_on_that_host_alone() -> None:
    odd = Health(bandwidths={"host_to_device_memcpy_ce": ()})
    found = examine({}, (), {}, {"odd": odd, "bad": one(uncorrectable=1)}, catalog=OURS)
    assert [(each.id, each.host, each.severity) for each in found] == [
        ("gpu-ecc", "bad", "error"),
        ("gpu-health-unreadable", "odd", "warning"),
    ]


def test_a_lost_gpu_needs_no_topology_and_has_no_name() -> None:
    """nvidia-smi then says: `Failed to run topology matrix`."""
    root = ElementTree.fromstring(text("h100-vm-580.xml"))  # noqa: S314  a file of ours
    for path in ("product_name", "uuid"):
        element = root.find(f"gpu/{path}")
        assert element is not None
        element.text = "GPU is lost"
    said = '<?xml version="1.0" ?>' + ElementTree.tostring(root, encoding="unicode")
    found = parsers.health(answer(nvidia_smi=said, topology="Failed to run topology matrix"))
    assert set(judged(found)) == {"gpu-lost"}
    assert found.gpus
    assert found.gpus.gpus[0].name == "GPU"


def test_nvidia_smi_that_fails_is_one_finding_where_the_survey_knows_why() -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    health = parsers.health(answer(nvidia_smi=said))
    assert set(judged(health)) == {"gpu-health-unreadable"}
    facts = stated({"nvidia": {"smi": "/usr/bin/nvidia-smi", "smi_error": said, "pci_devices": ["0000:1b:00.0"]}})
    found = {each.id for each in examine({"h": facts}, (), {}, {"h": health}, catalog=OURS)}
    assert "nvml-driver-mismatch" in found
    assert "gpu-health-unreadable" not in found


@pytest.mark.parametrize(
    ("path", "is_lost"),
    [("fan_speed", False), ("temperature/gpu_temp", False), ("uuid", True), ("pci/pci_bus_id", True), ("fb_memory_usage/total", True)],
)
def test_a_gpu_is_lost_where_what_every_gpu_knows_is_unknown(path: str, is_lost: bool) -> None:
    root = ElementTree.fromstring(text("h100-vm-580.xml"))  # noqa: S314  a file of ours
    element = root.find(f"gpu/{path}")
    assert element is not None
    element.text = "[Unknown Error]"
    unknown = parsers.health(answer(nvidia_smi='<?xml version="1.0" ?>' + ElementTree.tostring(root, encoding="unicode")))
    assert ("gpu-lost" in judged(unknown)) is is_lost
    element.text = "[GPU requires reset]"
    lost = parsers.health(answer(nvidia_smi='<?xml version="1.0" ?>' + ElementTree.tostring(root, encoding="unicode")))
    assert judged(lost)["gpu-lost"].severity == "error"


def port(name: str = "mlx5_0", state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", **counters: str) -> RdmaPort:
    return RdmaPort(device=name, port="1", state=state, phys_state="5: LinkUp", rate=rate, link_layer="InfiniBand", counters=counters)


@pytest.mark.parametrize(
    ("odd", "severity"),
    [
        (port("b"), None),
        (port("b", rate="100 Gb/sec (1X NDR)"), "warning"),
        (port("b", state="1: DOWN"), "note"),
        (port("b", state="2: INIT"), "warning"),
        (port("b", symbol_error="11"), "warning"),
        (port("b", symbol_error="10", link_downed="hello"), None),
    ],
)
def test_rdma_ports(odd: RdmaPort, severity: str | None) -> None:
    found = judged(Health(rdma=(port("a"), port("c"), odd)))
    assert {name: each.severity for name, each in found.items()} == ({"rdma-port": severity} if severity else {})


def test_a_missing_tool_names_its_package_and_is_no_fault_of_the_host() -> None:
    found = judged(Health(missing=("dcgm",)))["gpu-tool-missing"]
    assert found.severity == "note"
    assert "datacenter-gpu-manager-4-core" in found.fix[0]


def test_every_expected_bandwidth_is_for_another_kind_of_host() -> None:
    expected = OURS.gpu_health().all_reduce.expected
    assert len({(each.gpu, each.gpus) for each in expected}) == len(expected)


# ---------------------------------------------------------------------------------------------- verdicts


def list_after(file: Path, made: Sequence[Verdict]) -> list[str]:
    said = write_quarantine(file, {each.host: each.word == "unfit" for each in made})
    names = file.read_text().split()
    assert f"{len(names)} unfit host" in said
    return names


def test_verdicts_and_the_list_of_unfit_hosts(tmp_path: Path) -> None:
    healths = {"good": one(persistence=False), "slow": one(margin=-3), "bad": one(uncorrectable=1)}
    made = verdicts(["good", "slow", "bad", "gone"], healths, examine({}, (), {}, healths, catalog=OURS))
    assert [(each.host, each.word) for each in made] == [("bad", "unfit"), ("gone", "unfit"), ("slow", "degraded"), ("good", "healthy")]
    file = tmp_path / "quarantine"
    assert list_after(file, made) == ["bad", "gone"]
    left = inventory_of("good,slow,bad", f"!@{file}")
    assert [host.name for host in left.hosts] == ["good", "slow"]
    assert [host.name for host in inventory_of("good,slow,bad", f"all,!@{file},!slow").hosts] == ["good"]
    assert [host.name for host in by_name("facts.json", ["good", "slow", "bad"], f"!@{file}").hosts] == ["good", "slow"]
    others = verdicts(["good", "slow"], {name: healths[name] for name in ("good", "slow")}, ())
    assert list_after(file, others) == ["bad", "gone"]  # neither was examined this time
    assert list_after(file, verdicts(["bad", "slow"], {"bad": one()}, ())) == ["gone", "slow"]
    assert list_after(file, verdicts(["gone", "slow"], {"gone": one(), "slow": one()}, ())) == []
    assert len(inventory_of("good,slow,bad", f"!@{file}").hosts) == 3


def test_unfit_hosts_named_by_addresses_are_left_out(tmp_path: Path) -> None:
    file, inventory = tmp_path / "quarantine", tmp_path / "hosts.ini"
    file.write_text("fe80::1\n")
    names = ["fe80::1", "fe80::2", "c"]
    inventory.write_text("".join(f"{name}\n" for name in names))
    for left in (inventory_of(str(inventory), f"!@{file}"), by_name("facts.json", names, f"!@{file}")):
        assert [host.name for host in left.hosts] == ["fe80::2", "c"]
    assert [host.name for host in inventory_of(str(inventory), f"fe80::1,c,!@{file}").hosts] == ["c"]
    with pytest.raises(UsageError, match="it leaves no host"):
        inventory_of(str(inventory), f"fe80::1,!@{file}")


@pytest.mark.parametrize("content", [b"a b\n", b"!a\n", b"{{ x }}\n", b"\xff\xfe"])
def test_a_list_of_something_else_than_hosts_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "list").write_bytes(content)
    with pytest.raises(UsageError):
        inventory_of("a,b", f"!@{tmp_path}/list")
    with pytest.raises(UsageError, match="cannot be read"):
        inventory_of("a,b", f"!@{tmp_path}/absent")


# ---------------------------------------------------------------------------------------------- the script on the hosts


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``tools(NAME, BODY)``: fake programs on the PATH, shell scripts that print recorded outputs."""

    def make(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    make("dmesg", f"cat {DATA}/kernel.log; echo other")
    return make


def fake_nvidia_smi(tools: Any, xml: str) -> None:
    tools(
        "nvidia-smi",
        f'case "$*" in "-q -x") cat {DATA}/{xml};; "nvlink -s") cat {DATA}/nvlink-status-gb200.txt;; '
        f'"nvlink -e") cat {DATA}/nvlink-errors-h100.txt;; "topo -m") cat {DATA}/topo-h100.txt;; esac',
    )


def collected(order: dict[str, Any]) -> str:
    script = [sys.executable, str(resources.hostside("gpu_health.py"))]
    return subprocess.run(script, input=json.dumps(order), capture_output=True, text=True, check=True).stdout


def test_the_script_collects_what_the_tools_print(tools: Any) -> None:
    fake_nvidia_smi(tools, "rtx-pro-6000-590.xml")
    tools("dcgmi", f'[ "$*" = "diag -r 3 -j" ] && cat {DATA}/dcgm-4.2.json; exit 226')
    tools("nvbandwidth", f'[ "$*" = "-t {" ".join(parsers.BANDWIDTH_TESTS)}" ] && cat {DATA}/nvbandwidth-rtx3050.txt')
    tools("all_reduce_perf", f'[ "$*" = "-b 256M -e 2G -f 2 -g 1" ] && cat {DATA}/allreduce-h100.txt')
    request = HealthRequest(("dcgm", "nvbandwidth", "allreduce"), 3)
    read = parse(collected(request.order()), request)
    assert read.unreadable == read.missing == read.failed == ()
    assert all((read.gpus, read.dcgm, read.bandwidths, read.allreduce, read.topology))
    assert read.nvlinks[0].active == 18
    assert {each.number for each in read.xids or ()} == {63, 45, 144, 149, 31, 94}


def test_clocks_and_processes_do_not_travel(tools: Any) -> None:
    unread = "<processes><process_info><process_name>/home/me/secret</process_name></process_info></processes>"
    tools("nvidia-smi", f"printf '<?xml?>\\n<nvidia_smi_log>{unread}<supported_clocks><x/></supported_clocks></nvidia_smi_log>'")
    printed = collected({"tests": []})
    assert "secret" not in printed
    assert "supported_clocks" not in printed
    assert "nvidia_smi_log" in printed


def test_a_tool_that_hangs_or_floods_is_stopped(tools: Any) -> None:
    script = load("gpu_health_on_hosts", resources.hostside("gpu_health.py"))
    tools("hanging", "sleep 600 & wait")
    assert script.run(["hanging"], 0.1) == {"found": True, "code": None, "timed_out": True, "text": ""}
    tools("flooding", "yes")
    flooded = script.run(["flooding"], 60)
    assert flooded["timed_out"]
    assert len(flooded["text"]) == script.LARGEST_ANSWER
    assert script.run(["absent-program"], 1)["found"] is False


def test_only_gpus_that_nvidia_smi_should_show_are_counted(tmp_path: Path) -> None:
    script = load("gpu_health_counting", resources.hostside("gpu_health.py"))
    (tmp_path / "run").mkdir()
    for number, driver in enumerate(("nvidia", "vfio-pci", "nouveau", None)):
        device = tmp_path / "devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        if driver:
            (device / "driver").symlink_to(f"../../drivers/{driver}")
    counted = (str(tmp_path / "devices"), str(tmp_path))
    assert script.gpus(*counted) == 3
    (tmp_path / "run/.containerenv").touch()
    assert script.gpus(*counted) == 0


def test_a_prolog_is_silent_or_one_line(tools: Any) -> None:
    fake_nvidia_smi(tools, "rtx-pro-6000-590.xml")
    tools("dmesg", "echo fine")
    well = CliRunner().invoke(app, ["doctor", "--prolog"])
    assert (well.exit_code, well.output) == (0, "")
    tools("dmesg", "echo 'NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus.'")
    ill = CliRunner().invoke(app, ["doctor", "--prolog"])
    assert ill.exit_code == 1
    assert ill.stdout == ""
    assert len(ill.stderr.splitlines()) == 1
    assert "Xid 79 on 0000:61:00: the GPU has fallen off the PCI bus [gpu-xid]" in ill.stderr


def test_what_is_wrong_with_provision_fails_no_prolog(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tools, "rtx-pro-6000-590.xml")
    tools("dmesg", "echo 'NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus.'")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "provision" / "catalog" / "gpu_health.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("xids: ]")
    ill = CliRunner().invoke(app, ["doctor", "--prolog"])
    assert (ill.exit_code, len(ill.stderr.splitlines())) == (1, 1)  # the rest of the catalogue still says what an Xid means
    assert isinstance(CliRunner().invoke(app, ["doctor", "--gpu"]).exception, UsageError)

    def broken(_request: HealthRequest) -> Health:
        raise OSError("no space left\non device")

    monkeypatch.setattr(host_checks, "of_this_machine", broken)
    done = CliRunner().invoke(app, ["doctor", "--prolog"])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (0, "", 1)
    assert "the GPUs were not checked: " in done.stderr


def test_this_machine_with_a_table_of_verdicts(tools: Any, tmp_path: Path) -> None:
    fake_nvidia_smi(tools, "rtx-pro-6000-590.xml")
    file = tmp_path / "quarantine"
    done = CliRunner().invoke(app, ["doctor", "--gpu", "--json", "--quarantine", str(file)])
    assert done.exit_code == 1
    (verdict,) = json.loads(done.stdout)["verdicts"].values()
    assert verdict["verdict"] == "unfit"
    assert "gpu-xid" in verdict["findings"]
    assert file.read_text() == "localhost\n"
    assert f"1 unfit host listed in {file}" in done.stderr
    file.write_text("bad\n")
    again = CliRunner().invoke(app, ["doctor", "--gpu", "--json", "--quarantine", str(file)])
    assert file.read_text() == "bad\nlocalhost\n"
    assert "2 unfit hosts (1 of them not examined now) listed" in again.stderr
    file.write_text("bad ansible_host=10.0.0.1\n")  # an inventory by mistake
    with pytest.raises(UsageError, match="is not a host name"):
        CliRunner().invoke(app, ["doctor", "--gpu", "--quarantine", str(file)], catch_exceptions=False)
    assert file.read_text() == "bad ansible_host=10.0.0.1\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prolog", "a,b"],
        ["--prolog", "--full"],
        ["--prolog", "--json"],
        ["--dcgm", "2"],
        ["--quarantine", "f"],
        ["a,b", "--gpu", "--fix"],
    ],
)
def test_options_that_do_not_go_together(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, ["doctor", *arguments]).exception, UsageError)
