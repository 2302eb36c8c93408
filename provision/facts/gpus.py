"""NVIDIA GPUs of a host, and why they cannot be used where their driver is missing or broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from provision.facts.model import Facts

Cause = Literal["no-driver", "not-loaded", "nouveau", "version-mismatch", "nvml", "no-devices", "silent"]

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
    "version-mismatch": "reboot {host}: its driver was updated on disk, and the old one is still loaded",
    "nvml": f"fix the driver on {{host}} until nvidia-smi works there: {_SEE_LOG}, or reboot it",
    "no-devices": f"power {{host}} off and on, or install the driver that its GPUs need: {_SEE_LOG}",
    "silent": f"install the whole driver on {{host}}, with nvidia-smi and libcuda.so.1, until nvidia-smi works there: {_SEE_LOG}",
}


@dataclass(frozen=True)
class Fault:
    """Why the GPUs of a host cannot be used: the cause, a sentence, and the remedy (with ``{host}`` for the host's name)."""

    cause: Cause
    what: str

    @property
    def remedy(self) -> str:
        return _REMEDIES[self.cause]


def has_gpu(facts: Facts) -> bool:
    """Whether there is a GPU: listed by the driver, on the PCI bus, or implied by a driver that lists none."""
    if facts.gpus:
        return True
    if hidden_from_container(facts):
        return False
    nvidia = facts.nvidia
    return bool(nvidia.pci_devices) or (bool(facts.driver) and ("gpus" in facts.missing or bool(nvidia.smi_error)))


def hidden_from_container(facts: Facts) -> bool:
    """Whether the host is a container that was started without the GPUs of its machine, which are on the PCI bus all the same."""
    nvidia = facts.nvidia
    return bool(facts.container and nvidia.pci_devices and not nvidia.device_nodes and not facts.gpus)


def fault(facts: Facts) -> Fault | None:
    """What is wrong with the driver of a host that has GPUs; None where nothing is, or where there are none."""
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
    return Fault(cause, what + (f": nvidia-smi says `{message[:200]}`" if message else ""))


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
            yield "no-devices"
        if message:
            yield "nvml"
        if "gpus" not in facts.missing:  # the survey asked nvidia-smi, or the driver's library where there is none
            yield "silent"
