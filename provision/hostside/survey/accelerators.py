"""Accelerators of all vendors on the PCI bus, Tegra boards, and RDMA's plugins. What they mean is decided by who reads the facts."""

import os
import re

from .machine import number, section

MAX_DEVICES = 64  # are listed: a host has 16 accelerators at most, and 8 virtual functions of each
ACCELERATOR_NODES = ("/dev/kfd", "/dev/dri/renderD*", "/dev/accel/accel*", "/dev/hl[0-9]*")
# Where AWS's installer, its deep-learning images and Debian packages put the plugin.
EFA_PLUGINS = (
    "/opt/amazon/ofi-nccl/lib*/libnccl-net*.so",
    "/opt/amazon/ofi-nccl/lib*/*/libnccl-net*.so",
    "/opt/aws-ofi-nccl/*/libnccl-net*.so",
    "/opt/aws-ofi-nccl/lib*/libnccl-net*.so",
)


def accelerator_on(machine, folder):
    """One PCI display controller (class 03) or processing accelerator (class 12); None for other devices and NVIDIA's."""
    pci_class, vendor = machine.line(folder + "/class") or "", machine.line(folder + "/vendor") or ""
    if pci_class[2:4] not in ("03", "12") or vendor == "0x10de":
        return None
    memory = number(machine.line(folder + "/mem_info_vram_total"))  # amdgpu alone has it
    return {
        "address": os.path.basename(folder),
        "vendor": vendor[2:],
        "device": (machine.line(folder + "/device") or "")[2:],
        "pci_class": pci_class[2:6],
        "memory_mb": memory >> 20 if memory else None,
    }


@section("accelerators")
def accelerators(machine):
    found = [accelerator_on(machine, folder) for folder in machine.glob("/sys/bus/pci/devices/*")]
    return {
        "devices": [each for each in found if each][:MAX_DEVICES],
        "nodes": [node for pattern in ACCELERATOR_NODES for node in machine.glob(pattern)][:MAX_DEVICES],
    }


@section("tegra")
def tegra(machine):
    """The release of Jetson Linux (L4T); None on other machines."""
    text = machine.read("/etc/nv_tegra_release")
    if text is None and not os.uname().release.endswith("-tegra"):
        return None
    stated = re.search(r"R(\d+) \(release\), REVISION: (\d+(?:\.\d+)*)", text or "")
    return {"release": "%s.%s" % stated.groups() if stated else None}


@section("efa_plugin")
def efa_plugin(machine):
    return next((found for pattern in EFA_PLUGINS for found in machine.glob(pattern)), None)
