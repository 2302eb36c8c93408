"""NVIDIA GPUs of a host, and why they cannot be used where their driver is missing or broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from provision import catalog
from provision.base.problems import Problem
from provision.base.versions import key
from provision.survey.model import Facts

Cause = Literal[
    "no-driver",
    "not-loaded",
    "nouveau",
    "version-mismatch",
    "nvml",
    "misfit",
    "open-modules",
    "proprietary-modules",
    "no-devices",
    "silent",
]

# Messages of nvidia-smi and NVML.
_MISMATCH = re.compile(r"version mismatch", re.IGNORECASE)
_NVML = re.compile(r"Failed to initialize NVML|NVIDIA-SMI has failed|Unable to determine the device handle", re.IGNORECASE)
_NO_DEVICES = re.compile(r"No devices were found", re.IGNORECASE)

_SEE_LOG = "see `sudo dmesg | grep -i nvrm`"
_REMEDIES: Mapping[Cause, str] = {
    "no-driver": "install NVIDIA's driver on {host} (Ubuntu: ubuntu-drivers install; Debian: apt-get install nvidia-driver; RHEL and kin: "
    "dnf install nvidia-open, from NVIDIA's repository), and reboot it",
    "not-loaded": "load the driver on {host}: sudo modprobe nvidia; after a new kernel: sudo dkms autoinstall; Secure Boot refuses "
    "unsigned modules: mokutil --sb-state",
    "nouveau": "disable nouveau on {host} (`blacklist nouveau` in /etc/modprobe.d, then update-initramfs -u, or dracut -f), install "
    "NVIDIA's driver, and reboot it",
    "version-mismatch": "reboot {host}: its driver was updated on disk, and the old one is still loaded; if it says the same then, its "
    "kernel modules and libraries are of different drivers: install one whole driver (compare /proc/driver/nvidia/version)",
    "nvml": f"fix the driver on {{host}} until nvidia-smi works there: {_SEE_LOG}, or reboot it",
    "misfit": "install on {host} a branch of the driver that supports its GPUs instead",
    "open-modules": "install the open kernel modules of NVIDIA's driver on {host} instead, and reboot it (Ubuntu: "
    "nvidia-driver-BRANCH-server-open; NVIDIA's repository: nvidia-open)",
    "proprietary-modules": "install the proprietary kernel modules of NVIDIA's driver on {host} instead, and reboot it (Ubuntu: "
    "nvidia-driver-BRANCH-server, without -open; NVIDIA's repository: cuda-drivers)",
    "no-devices": f"power {{host}} off and on, or install the driver that its GPUs need: {_SEE_LOG}",
    "silent": f"install the whole driver on {{host}}, with nvidia-smi and libcuda.so.1, until nvidia-smi works there: {_SEE_LOG}",
}


def has_gpu(facts: Facts) -> bool:
    """Whether there is a GPU: listed by the driver, on the PCI bus, or implied by a driver that lists none."""
    if facts.gpus:
        return True
    if hidden_from_container(facts):
        return False
    nvidia = facts.nvidia
    return bool(nvidia.pci_devices) or (bool(facts.driver) and ("gpus" in facts.missing or bool(nvidia.smi_error)))


def capabilities(facts: Facts) -> list[str]:
    """The GPUs' compute capabilities, lowest first: from a driver, else by their PCI device ids; empty if one is unknown."""
    listed = [each.compute_capability for each in facts.gpus]
    if not listed or None in listed:
        listed = [catalog.hardware().pci_ids.capability(each) for each in facts.nvidia.pci_ids]
    return sorted({str(each) for each in listed}, key=key) if None not in listed else []


def hidden_from_container(facts: Facts) -> bool:
    """Whether the host is a container that was started without the GPUs of its machine, which are on the PCI bus all the same."""
    nvidia = facts.nvidia
    return bool(facts.container and nvidia.pci_devices and not nvidia.device_nodes and not facts.gpus)


def fault(facts: Facts) -> Problem | None:
    """What is wrong with the driver of a host that has GPUs; None where nothing is, or where there are none.

    The id is the cause; the hint has ``{host}`` for the names of the hosts.
    """
    if not has_gpu(facts):
        return None
    cause = next(_causes(facts), None)
    if cause is None:
        return None
    count = max(len(facts.nvidia.pci_devices), len(facts.gpus), 1)
    there = f"{count} NVIDIA GPUs" if count > 1 else "an NVIDIA GPU"
    message = (facts.nvidia.smi_error or "").strip().partition("\n")[0].strip()
    what = {
        "no-driver": f"it has {there} and no NVIDIA driver",
        "not-loaded": f"it has {there}, and the NVIDIA driver is not loaded",
        "nouveau": f"it has {there}, which nouveau uses instead of NVIDIA's driver",
    }.get(cause, f"it has {there}, whose driver does not work")
    reasons = [_unsupported(facts).get(cause), f"nvidia-smi says `{message[:200]}`" if message else None]
    return Problem("error", ": ".join(filter(None, [what, "; ".join(filter(None, reasons))])), _REMEDIES[cause], id=cause)


def version_mismatch(facts: Facts) -> bool:
    """Whether the driver's libraries have another version than the loaded module: it was updated, and the host not rebooted since."""
    return bool(_MISMATCH.search(facts.nvidia.smi_error or ""))


def _causes(facts: Facts) -> Iterator[Cause]:
    """Causes, the most specific first."""
    nvidia, driver = facts.nvidia, facts.driver
    message = nvidia.smi_error or ""
    if version_mismatch(facts):
        yield "version-mismatch"
    if not driver:
        yield "nouveau" if nvidia.nouveau else "not-loaded" if nvidia.smi else "no-driver"
    elif _NVML.search(message):  # also where CUDA itself still finds the GPUs: NCCL asks NVML for them
        yield "nvml"
    if not facts.gpus:
        if _NO_DEVICES.search(message):
            yield from _unsupported(facts)
            yield "no-devices"
        if message:
            yield "nvml"
        if "gpus" not in facts.missing:  # the survey asked nvidia-smi, or the driver's library where there is none
            yield "silent"


def _unsupported(facts: Facts) -> dict[Cause, str]:
    """Why a driver that is loaded finds none of the GPUs on the PCI bus, where their kind alone explains it."""
    driver, known, found = facts.driver, catalog.driver(), capabilities(facts)
    if driver is None or driver.version is None or not found:
        return {}
    if misfit := known.gpus.misfit(driver.version, found):
        return {"misfit": f"driver {driver.version} does not support it: {misfit}"}
    if driver.open is False and key(found[-1]) >= key(known.modules.open_only_from):
        reason = f"GPUs of compute capability {found[-1]} need the open kernel modules, and the proprietary ones are loaded"
        return {"open-modules": reason}
    if driver.open and key(found[0]) < key(known.modules.open_from):
        reason = f"GPUs of compute capability {found[0]} need the proprietary kernel modules, and the open ones are loaded"
        return {"proprietary-modules": reason}
    return {}
