"""AMD's GPUs of a host, and why they cannot be used where their driver is missing or does not list them."""

from __future__ import annotations

from provision.base.problems import Problem
from provision.catalog import Catalog
from provision.survey.model import AmdGpu, Facts

_KFD = "/dev/kfd"


def on_bus(facts: Facts, catalog: Catalog) -> int:
    """The number of AMD's GPUs on the PCI bus, without graphics of processors."""
    known = catalog.hardware()
    devices = (each for each in facts.accelerators.devices if each.vendor == known.amd_vendor)
    return sum(known.accelerator(each.vendor, each.device, each.pci_class, each.memory_mb) is not None for each in devices)


def has_gpu(facts: Facts, catalog: Catalog) -> bool:
    """Whether there is a GPU of AMD: listed by the driver, or on the PCI bus."""
    return bool(gpus(facts, catalog)) or on_bus(facts, catalog) > 0


def hidden_from_container(facts: Facts) -> bool:
    """Whether the host is a container that was started without AMD's GPUs."""
    return bool(facts.container and _KFD not in facts.accelerators.nodes)


def gpus(facts: Facts, catalog: Catalog) -> list[AmdGpu]:
    """The GPUs that the driver lists for computing, each partition of one by itself, without graphics of processors."""
    known = catalog.hardware()
    graphics = {
        each.address.rpartition(".")[0]
        for each in facts.accelerators.devices
        if each.address and each.vendor == known.amd_vendor
        if known.accelerator(each.vendor, each.device, each.pci_class, each.memory_mb) is None
    }
    return [each for each in (facts.amd.gpus if facts.amd else []) if each.address not in graphics]


def fault(facts: Facts, catalog: Catalog) -> Problem | None:
    """Why AMD's GPUs of a host cannot be used; None where they can, or where there are none. The hint has ``{host}`` for its name."""
    count, found = on_bus(facts, catalog), gpus(facts, catalog)
    if hidden_from_container(facts) or not (count or found):
        return None
    there = f"it has {max(count, len(found))} x AMD GPU"
    install = "install AMD's driver on {host} (package amdgpu-dkms, for its kernel), and reboot"
    if facts.amd is None:
        what, hint = f"{there}, and the driver amdgpu is not loaded", f"on {{host}}: sudo modprobe amdgpu; without that module {install}"
        return Problem("error", what, hint, id="amd-not-loaded")
    if not found:
        return Problem("error", f"{there}, and its driver lists none for computing (KFD)", install, id="amd-no-gpu")
    if not facts.amd.usable:
        what = f"{there}, and {facts.user.name or 'the login user'} may not use {_KFD}"
        return Problem("error", what, 'on {host}: sudo usermod -aG render,video "$USER", then log in again', id="amd-no-access")
    if any(each.target is None for each in found):
        return Problem("error", f"{there}, and its driver reports an invalid target (gfx_target_version) for one", install, id="amd-target")
    return None
