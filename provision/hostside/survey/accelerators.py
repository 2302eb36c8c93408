"""Accelerators of all vendors on the PCI bus, Tegra boards, and RDMA's plugins. What they mean is decided by who reads the facts."""

import os
import re

from .machine import number, section

KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"
MAX_KFD_NODES = 256  # are read: a host has 16 GPUs of AMD at most, each in 8 partitions, and a node for each processor
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


def gfx_target(number_of_kfd):
    """``gfx90a`` for KFD's 90010: major, minor and step, the last two as hexadecimal digits; None for a number that no GPU has."""
    major, minor, step = number_of_kfd // 10000, number_of_kfd // 100 % 100, number_of_kfd % 100
    return "gfx%d%x%x" % (major, minor, step) if 6 <= major < 100 and minor < 16 and step < 16 else None


def gpu_of_kfd(text):
    """A GPU from the properties of its node; None for a processor's."""
    known = {name: int(value) for name, value in re.findall(r"^(\w{1,40}) (\d{1,20})$", text, re.M)}
    if not known.get("gfx_target_version"):
        return None
    place = known.get("location_id", 0)  # bus, device, and a function, which is the partition's number
    mark = {"simulated": True} if "simulated" in known else {}  # a sandbox's: the kernel has no such property
    return {
        **mark,
        "target": gfx_target(known["gfx_target_version"]),
        "address": "%04x:%02x:%02x" % (known.get("domain", 0) & 0xFFFF, place >> 8 & 0xFF, place >> 3 & 0x1F),
    }


@section("amd")
def amd(machine):
    """AMD's driver and the GPUs that it lists for computing, but those that a container was not given; None where it is not loaded."""
    if not machine.exists("/sys/module/amdgpu"):
        return None
    nodes = sorted(machine.listdir(KFD_NODES), key=lambda name: (len(name), name))[:MAX_KFD_NODES]
    found = [gpu_of_kfd(machine.read("%s/%s/properties" % (KFD_NODES, node), 1 << 16) or "") for node in nodes]
    rocm = re.match(r"\d+(\.\d+)+", machine.line("/opt/rocm/.info/version") or "")
    version = re.match(r"\d+(\.\d+)+", machine.line("/sys/module/amdgpu/version") or "")  # the kernel's own driver has none
    return {
        "driver": version.group() if version else None,
        "gpus": [gpu for gpu in found if gpu],
        "usable": os.access(machine.path("/dev/kfd"), os.R_OK | os.W_OK),
        "rocm": rocm.group() if rocm else None,
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
