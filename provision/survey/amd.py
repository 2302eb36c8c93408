"""AMD's GPUs of a host, and why they cannot be used where their driver is missing or does not list them."""

from __future__ import annotations

from provision.base.problems import Problem
from provision.catalog import Catalog
from provision.survey.model import AmdGpu, Facts


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
    return bool(facts.container and "/dev/kfd" not in facts.accelerators.nodes)


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
    count, found, driver = on_bus(facts, catalog), gpus(facts, catalog), facts.amd
    if hidden_from_container(facts) or not (count or found):
        return None
    faults = {
        "amd-not-loaded": driver is None,
        "amd-no-gpu": not found,
        "amd-no-access": driver is not None and not driver.usable,
        "amd-target": any(each.target is None for each in found),
    }
    cause = next((each for each, holds in faults.items() if holds), None)
    if cause is None:
        return None
    known, user = catalog.hardware().amd_faults[cause], facts.user.name or "the login user"
    return Problem("error", known["what"].format(gpus=f"{max(count, len(found))} x AMD GPU", user=user), known["remedy"], id=cause)
