"""The survey's reading of accelerators, Jetson boards, RDMA ports and nvidia-smi's details, and what the facts then say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from survey_module import machine, survey

from provision.catalog import OURS
from provision.survey import Facts, amd, collect, hardware

OUTPUTS = Path(__file__).parents[2] / "data" / "gpu_health"
PCI = "/sys/bus/pci/devices"


def pci(*devices: tuple[str, str, str], **more: str) -> dict[str, str]:
    """Files of PCI devices: (vendor, device, class); ``more``: further files of the first."""
    files: dict[str, str] = {}
    for place, values in enumerate(devices):
        folder = f"{PCI}/0000:{place:02x}:00.0"
        files |= {f"{folder}/{name}": f"0x{value}\n" for name, value in zip(("vendor", "device", "class"), values, strict=True)}
    return files | {f"{PCI}/0000:00:00.0/{name}": value for name, value in more.items()}


def stated(found: dict[str, Any], **more: Any) -> Facts:
    return Facts.model_validate({"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", **json.loads(json.dumps(found)), **more})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (pci(*[("1002", "74a1", "120000")] * 8), ""),  # MI300X, for which there are builds
        (pci(("1da3", "1020", "120000"), ("1a03", "2000", "030000")), "1 x Intel Gaudi (Habana)"),
        (pci(*[("19e5", "d802", "120000")] * 8, ("19e5", "0222", "020000")), "8 x Huawei Ascend NPU"),  # and a network card
        (pci(("1d22", "3684", "120000")), "1 x Baidu Kunlun XPU"),
        (pci(("8086", "0bd5", "038000"), ("8086", "56c0", "038000")), "2 x Intel data-centre GPU"),
        (pci(("8086", "4680", "038000"), ("8086", "7d1d", "120000")), ""),  # a processor's graphics without a monitor, and its NPU
        (pci(("1a03", "2000", "030000"), ("10de", "2330", "030200")), ""),  # a server's console, an H100
        ({f"{PCI}/0000:00:00.0/vendor": "0x1002\n"}, ""),
    ],
)
def test_accelerators_of_other_vendors(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    found = survey.accelerators(machine(tmp_path, files))
    assert hardware.other_accelerators(stated({"accelerators": found}), OURS) == expected


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (pci(*[("1002", "74a1", "120000")] * 8), 8),  # MI300X
        (pci(("1002", "740f", "038000")), 1),  # MI210
        (pci(("1002", "164e", "030000"), mem_info_vram_total="536870912\n"), 0),  # a Ryzen's own graphics
        (pci(("1002", "164e", "030000")), 0),
        (pci(("1002", "1586", "030000"), mem_info_vram_total="536870912\n"), 1),  # Strix Halo computes in the system's memory
        (pci(("1002", "744c", "030000"), mem_info_vram_total="25753026560\n"), 1),  # Radeon RX 7900 XTX
        (pci(("1002", "1478", "060400")), 0),  # a bridge
    ],
)
def test_gpus_of_amd_on_the_bus(tmp_path: Path, files: dict[str, str], count: int) -> None:
    assert amd.on_bus(stated({"accelerators": survey.accelerators(machine(tmp_path, files))}), OURS) == count


def kfd(*versions: str, **more: str) -> dict[str, str]:
    """KFD's nodes: a processor's, and one with each gfx_target_version; ``more``: further files below /sys/module/amdgpu."""
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    files = {f"{nodes}/0/properties": "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n", "/sys/module/amdgpu/initstate": "live\n"}
    for place, version in enumerate(versions, 1):
        files[f"{nodes}/{place}/properties"] = f"simd_count 1216\ngfx_target_version {version}\nlocation_id {place << 8}\ndomain 0\n"
    return files | {f"/sys/module/amdgpu/{name}": text for name, text in more.items()}


def test_what_amds_driver_lists(tmp_path: Path) -> None:
    files = kfd(*["90402"] * 8, version="6.19.14.31400000\n") | {"/dev/kfd": "", "/opt/rocm/.info/version": "7.1.1-38\n"}
    found = survey.amd(machine(tmp_path, files))
    assert (found["driver"], found["rocm"], found["usable"]) == ("6.19.14.31400000", "7.1.1", True)
    assert found["gpus"] == [{"target": "gfx942", "address": f"0000:{bus:02x}:00"} for bus in range(1, 9)]
    known = stated({"amd": found})
    assert len(amd.gpus(known, OURS)) == 8
    assert next(collect.summary({"a": known}))["GPUs"] == "8 (amdgpu 6.19.14.31400000, ROCm 7.1.1)"
    needed = OURS.system_packages().needed_mb
    assert collect._needed_mb(known, OURS) == needed.rocm
    assert collect._needed_mb(stated({"amd": {"gpus": []}}), OURS) == needed.cpu, "amdgpu for a console or a processor's graphics"
    assert survey.amd(machine(tmp_path / "other")) is None
    inbox = survey.amd(machine(tmp_path / "inbox", kfd("110000")))
    assert (inbox["driver"], inbox["rocm"], inbox["usable"]) == (None, None, False)


def test_a_simulated_gpu_of_amd_says_so(tmp_path: Path) -> None:
    files = kfd("90402", version="6.16.6\n")
    assert not stated({"amd": survey.amd(machine(tmp_path / "real", files))}).simulated
    files["/sys/class/kfd/kfd/topology/nodes/1/properties"] += "simulated 1\n"
    known = stated({"amd": survey.amd(machine(tmp_path / "sandbox", files))})
    assert (known.simulated, next(collect.summary({"a": known}))["GPUs"]) == (True, "1 simulated (amdgpu 6.16.6)")


@pytest.mark.parametrize(
    ("version", "target"),
    [
        *(("90402", "gfx942"), ("90010", "gfx90a"), ("110000", "gfx1100"), ("120001", "gfx1201"), ("80003", "gfx803"), ("90500", "gfx950")),
        *(("7", None), ("99999999", None), ("91600", None), ("90016", None), ("12345678901234567890", None)),
    ],
)
def test_a_target_is_that_of_a_gpu_or_invalid(tmp_path: Path, version: str, target: str | None) -> None:
    found = survey.amd(machine(tmp_path, kfd(version)))
    assert [gpu["target"] for gpu in found["gpus"]] == [target]
    assert stated({"amd": found}).amd is not None


@pytest.mark.parametrize(
    "text", ["", "gfx_target_version", "gfx_target_version -90402\n", "gfx_target_version 9\x000402\n", "\xff" * 100000]
)
def test_what_is_no_property_is_no_gpu(tmp_path: Path, text: str) -> None:
    hostile = {"version": "6.1; rm -rf /\n"}
    files = kfd(**hostile) | {"/sys/class/kfd/kfd/topology/nodes/1/properties": text, "/opt/rocm/.info/version": "$(reboot)\n"}
    assert survey.amd(machine(tmp_path, files)) == {"driver": "6.1", "gpus": [], "usable": False, "rocm": None}


def test_a_host_of_a_thousand_gpus_of_amd_has_a_short_answer(tmp_path: Path) -> None:
    found = survey.amd(machine(tmp_path, kfd(*["90402"] * 1000)))
    assert len(found["gpus"]) == 255
    with pytest.raises(ValidationError, match="at most 256"):
        stated({"amd": {"gpus": found["gpus"] * 2}})
    with pytest.raises(ValidationError, match="a target of AMD"):
        stated({"amd": {"gpus": [{"target": "gfx942; reboot"}]}})


def test_a_host_of_a_thousand_devices_has_a_short_answer(tmp_path: Path) -> None:
    assert len(survey.accelerators(machine(tmp_path, pci(*[("1002", "74a1", "120000")] * 200)))["devices"]) == 64


def test_a_container_without_device_files_was_given_none(tmp_path: Path) -> None:
    files = pci(("1002", "74a1", "120000"))
    hidden = stated({"accelerators": survey.accelerators(machine(tmp_path, files))}, container="docker")
    assert hardware.obstacle(hidden, OURS) is None
    given = stated({"accelerators": survey.accelerators(machine(tmp_path, {"/dev/kfd": ""}))}, container="docker")
    assert hardware.obstacle(given, OURS) is not None


@pytest.mark.parametrize(
    ("text", "release", "capability", "runs"),
    [
        ("# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic, EABI: aarch64\n", "36.4.0", "8.7", False),
        ("# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic, EABI: aarch64\n", "36.4.0", None, False),
        ("# R38 (release), REVISION: 2.0, GCID: 41844464, BOARD: generic, EABI: aarch64\n", "38.2.0", "11.0", True),
        ("# R39 (release), REVISION: 2.1\n", "39.2.1", "8.7", False),
        ("", None, None, False),
    ],
)
def test_jetson(tmp_path: Path, text: str, release: str | None, capability: str | None, runs: bool) -> None:
    board = survey.tegra(machine(tmp_path, {"/etc/nv_tegra_release": text}))
    assert board == {"release": release}
    gpus = [{"name": "Orin", "compute_capability": capability}]
    assert (hardware.tegra_without_wheels(stated({"tegra": board, "gpus": gpus}), OURS) is None) is runs


def test_other_machines_are_no_jetson(tmp_path: Path) -> None:
    assert survey.tegra(machine(tmp_path)) is None


DOMAIN = "00000001-0000-0000-0000-000000000001"


@pytest.mark.parametrize(
    ("name", "cuda", "address", "expected"),
    [
        ("t4-515", "11.7", "00000000:00:1E.0", {"mig_instances": 0, "virtualization": "Pass-Through"}),
        ("a100-535", "12.2", "00000000:01:00.0", {"mig_instances": 1, "mig": "Enabled"}),
        ("h100-vm-580", "13.0", "00000000:00:06.0", {"mig_instances": 0, "mig": "Disabled", "virtualization": "Pass-Through"}),
        (
            "rubin-615",
            "13.4",
            "00000002:81:00.0",
            {"mig_instances": 0, "fabric_state": "Completed", "fabric_status": "Success", "fabric_cluster": DOMAIN},
        ),
    ],
)
def test_details_of_gpus(name: str, cuda: str, address: str, expected: dict[str, Any]) -> None:
    found, gpus = survey.read_gpu_details((OUTPUTS / f"{name}.xml").read_text(encoding="utf-8"))
    assert (found, gpus[address]) == (cuda, expected)


def details(inner: str, head: str = "") -> tuple[str | None, dict[str, Any]]:
    """What is read of one GPU of which nvidia-smi says this."""
    cuda, gpus = survey.read_gpu_details(
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>{head}'
        f'<gpu id="00000000:13:00.0">{inner}</gpu></nvidia_smi_log>'
    )
    return cuda, gpus["00000000:13:00.0"]


@pytest.mark.parametrize("product", ["vgpu_software_licensed_product", "grid_licensed_product"])
def test_a_vgpu_has_a_licence(product: str) -> None:
    mode = "<gpu_virtualization_mode><virtualization_mode>VGPU</virtualization_mode></gpu_virtualization_mode>"
    licence = "Licensed (Expiry: 2025-3-19 7:29:4 GMT)"
    assert details(f"{mode}<{product}><license_status>{licence}</license_status></{product}>")[1] == {
        "mig_instances": 0,
        "virtualization": "VGPU",
        "license": licence,
    }


@pytest.mark.parametrize(
    ("inner", "simulated"),
    [
        ("<vbios_version>simulated</vbios_version>", True),
        ("<vbios_version>96.00.74.00.1A</vbios_version>", False),
        ("<vbios_version>N/A</vbios_version>", False),
        ("<product_name>simulated</product_name>", False),
        ("<inforom_version><vbios_version>simulated</vbios_version></inforom_version>", False),
    ],
)
def test_a_simulated_gpu_says_so_where_a_real_one_has_its_firmwares_number(inner: str, simulated: bool) -> None:
    assert stated({"gpus": [details(inner)[1]]}).simulated is simulated


@pytest.mark.parametrize("word", ["[Not Supported]", "[N/A]", "N/A", "Not Supported", "None"])
def test_what_a_driver_does_not_support_is_left_out(word: str) -> None:
    assert details(f"<fabric><state>{word}</state></fabric>") == (None, {"mig_instances": 0})


@pytest.mark.parametrize(
    ("head", "cuda"),
    [
        ("<cuda_version>12.2</cuda_version>", "12.2"),
        ("<cuda_version>13.4</cuda_version><cuda_umd_version>13.5</cuda_umd_version>", "13.5"),
        ("<cuda_umd_version>14.0</cuda_umd_version>", "14.0"),
        ("<cuda_version>N/A</cuda_version>", None),
        ("<cuda_version>Not Found</cuda_version>", None),
    ],
)
def test_the_drivers_cuda(head: str, cuda: str | None) -> None:
    assert details("", head)[0] == cuda


@pytest.mark.parametrize(
    "text", ["", "<?xml", "<nvidia_smi_log><gpu>", "\x00\xff : : \n", "NVIDIA-SMI has failed because", "No devices were found"]
)
def test_odd_output_has_no_details(text: str) -> None:
    assert survey.read_gpu_details(text) == (None, {})


def test_details_reach_the_gpus_of_nvidia_smi(tmp_path: Path) -> None:
    """The fake nvidia-smi prints the table that the survey asks for, and a recorded `-q -x`."""
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"  -q*) cat {OUTPUTS / 'gb300-580.xml'} ;;\n"
        "  *) echo 'NVIDIA GB300, GPU-1, 284208, 580.95.05, 00000008:06:00.0, 10.3' ;;\nesac\n"
    )
    fake.chmod(0o755)
    files = {"/proc/77/comm": "nvidia-imex\n", "/proc/78/comm": "nv-fabricmanage\n", "/dev/nvidia-caps-imex-channels/channel0": ""}
    host = machine(tmp_path / "root", files)
    host.tool_path = f"{fake.parent}:{host.tool_path}"
    found = stated(survey.nvidia(host))
    assert hardware.nvlink_domain(found) == DOMAIN
    assert hardware.imex_ready(found)
    assert found.nvidia.fabric_manager is True  # the kernel cuts the name of nv-fabricmanager
    assert hardware.fabric_faults((gpu.fabric_state, gpu.fabric_status) for gpu in found.gpus) == []


def test_an_h100_in_a_virtual_machine(tmp_path: Path) -> None:
    """What such a machine has printed and shown in /sys and /proc; the fake nvidia-smi prints it."""
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"  -q*) cat {OUTPUTS / 'h100-vm-580.xml'} ;;\n"
        "  *) echo 'NVIDIA H100 80GB HBM3, GPU-1, 81559, 580.159.04, 00000000:00:06.0, 9.0' ;;\nesac\n"
    )
    fake.chmod(0o755)
    files = pci(("8086", "0d57", "060000"), ("1af4", "1042", "018000"), ("1af4", "1053", "ffff00"), ("10de", "2330", "030200"))
    files["/proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
    )
    host = machine(tmp_path / "root", files)
    host.tool_path = f"{fake.parent}:{host.tool_path}"
    found = stated(survey.nvidia(host))
    assert found.driver
    assert (found.driver.version, found.driver.cuda, found.driver.open) == ("580.159.04", "13.0", True)
    assert [(gpu.compute_capability, gpu.virtualization) for gpu in found.gpus] == [("9.0", "Pass-Through")]
    assert found.nvidia.pci_ids == ["2330"]
    assert hardware.licensed_vgpus(found) == (0, 0)  # a whole GPU needs no licence


@pytest.mark.parametrize(
    ("programs", "runs"), [({1: "systemd", 9: "nv-fabricmanage"}, True), ({1: "systemd"}, False), ({77: "python3"}, None)]
)
def test_whether_a_fabric_manager_runs_is_unknown_where_it_is_hidden(tmp_path: Path, programs: dict[int, str], runs: bool | None) -> None:
    files = pci(("10de", "20b2", "030200"), ("10de", "1af1", "068000"))
    found = stated(survey.nvidia(machine(tmp_path / "root", files | {f"/proc/{pid}/comm": f"{name}\n" for pid, name in programs.items()})))
    assert (found.nvidia.pci_switches, found.nvidia.fabric_manager) == (1, runs)


RDMA = "/sys/class/infiniband"


def port(device: str, layer: str, vendor: str, **gids: str) -> dict[str, str]:
    folder = f"{RDMA}/{device}/ports/1"
    files = {f"{folder}/state": "4: ACTIVE\n", f"{folder}/link_layer": f"{layer}\n", f"{RDMA}/{device}/device/vendor": f"0x{vendor}\n"}
    files[f"{RDMA}/{device}/device/net/ens1/flags"] = "0x1003\n"
    return files | {f"{folder}/gid_attrs/types/{name[1:]}": f"{kind}\n" for name, kind in gids.items()}


@pytest.mark.parametrize(
    ("files", "kind", "gids"),
    [
        (port("mlx5_0", "InfiniBand", "15b3", _0="IB/RoCE v1"), "infiniband", []),
        (port("mlx5_0", "Ethernet", "15b3", _0="IB/RoCE v1", _1="RoCE v2", _2="IB/RoCE v1", _3="RoCE v2", _4=""), "roce", [1, 3]),
        (port("rdmap16s27", "Unspecified", "1d0f"), "efa", []),
    ],
)
def test_rdma_ports(tmp_path: Path, files: dict[str, str], kind: str, gids: list[int]) -> None:
    found = stated({"infiniband": survey.infiniband(machine(tmp_path, files))})
    assert [(each.roce_v2_gids, each.interfaces) for each in hardware.active_ports(found, kind, OURS)] == [(gids, ["ens1"])]
    assert sum(len(hardware.active_ports(found, each, OURS)) for each in ("infiniband", "roce", "efa")) == 1


def test_the_plugin_for_efa(tmp_path: Path) -> None:
    assert survey.efa_plugin(machine(tmp_path)) is None
    path = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so"
    assert survey.efa_plugin(machine(tmp_path, {path: ""})) == path


@pytest.mark.parametrize(
    ("kernel", "opened", "cuda", "serves"),
    [
        ("6.8.0-45-generic", True, "12.4", True),
        ("5.12.0", True, "11.7", True),
        ("5.4.0-150-generic", True, "12.4", False),
        ("6.8.0-45-generic", False, "12.4", False),
        ("6.8.0-45-generic", True, "11.6", False),
        (None, True, "12.4", False),
    ],
)
def test_dma_buf_takes_the_place_of_peermem(kernel: str | None, opened: bool, cuda: str, serves: bool) -> None:
    system = {"id": "ubuntu", "version": "22.04", "kernel": kernel}
    assert hardware.dma_buf(stated({}, os=system, driver={"version": "550.54.14", "cuda": cuda, "open": opened}), OURS) is serves
