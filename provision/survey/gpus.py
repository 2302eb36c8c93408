"""NVIDIA GPUs of a host, and why they cannot be used where their driver is missing or broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from provision.base.problems import Problem
from provision.base.versions import key
from provision.catalog import Catalog
from provision.survey.model import Facts

Cause = Literal[
    "no-driver", "not-loaded", "nouveau", "version-mismatch", "installed-twice", "nvml", "misfit", "open-modules", "proprietary-modules",
    "no-devices", "no-fabric-manager", "silent", "vgpu", "unsigned", "nouveau-first", "gpu-lost", "driver-in-image", "driver-in-container",
]  # fmt: skip

# Messages of nvidia-smi and NVML.
_MISMATCH = re.compile(r"version mismatch", re.IGNORECASE)
_NVML = re.compile(r"Failed to initialize NVML|NVIDIA-SMI has failed", re.IGNORECASE)
_LOST = re.compile(r"Unable to determine the device handle for|GPU is lost", re.IGNORECASE)
_NO_DEVICES = re.compile(r"No devices were found", re.IGNORECASE)

_DRIVER_PACKAGES = r"nvidia-(driver|utils|dkms|kernel|kmod|open|headless)|libnvidia-compute|a?kmod-nvidia|xorg-x11-drv-nvidia"
_WITHOUT_MODULE = re.compile(r"nvidia-utils|libnvidia-compute")  # packages of the driver's libraries and programs
_NO_MODULE = ("no-driver", "not-loaded", "nouveau", "nouveau-first")  # causes that Secure Boot may be behind, or keep from being cured
_OF_IMAGES = ("docker", "podman", "kubernetes", "oci")  # others keep what is installed in them, such as LXC's
_IGNORED = re.compile(r"The (\d+\.[\d.]+) NVIDIA driver will ignore")  # the kernel's log


def _branch(facts: Facts, found: list[str], catalog: Catalog) -> str:
    """The branch to install for GPUs: of those for production that its distribution has, the one whose support ends last."""
    known, production = catalog.driver(), catalog.production_branches()
    releases = packages.releases if (packages := known.of(facts.os.id)) else {"": ()}  # others have what the oldest listed one has
    offered = releases.get(facts.os.version, releases.get(facts.os.version.split(".")[0], next(iter(releases.values()))))
    fitting = [each for each in production if (not offered or each in offered) and known.gpus.misfit(each, found) is None]
    return fitting[-1] if fitting else known.gpus.last_of(found) or [*production, max(known.branches.of, key=int)][0]


def has_gpu(facts: Facts, catalog: Catalog) -> bool:
    """Whether there is a GPU: listed by the driver, on the PCI bus, or implied by a driver that lists none."""
    if facts.gpus:
        return True
    if hidden_from_container(facts, catalog):
        return False
    return bool(facts.nvidia.pci_devices) or (bool(facts.driver) and ("gpus" in facts.missing or bool(facts.nvidia.smi_error)))


def capabilities(facts: Facts, catalog: Catalog) -> list[str]:
    """The GPUs' compute capabilities, lowest first: from a driver, else by their PCI device ids; without those that are unknown."""
    listed = [each.compute_capability for each in facts.gpus]
    if not listed or None in listed:
        listed += [catalog.hardware().pci_ids.capability(each) for each in facts.nvidia.pci_ids]
    return sorted({each for each in listed if each}, key=key)


def is_vgpu(facts: Facts, catalog: Catalog) -> bool:
    """Whether its GPUs are parts of a hypervisor's: its driver says so, or their PCI subsystems. Their driver is the guest's."""
    of_driver = any((each.virtualization or "").upper() == "VGPU" for each in facts.gpus)
    return of_driver or any(
        f"10de:{ids[:4]}" <= each <= f"10de:{ids[5:]}" for ids in catalog.hardware().vgpu.of for each in facts.nvidia.pci_subsystems
    )


def hidden_from_container(facts: Facts, catalog: Catalog) -> bool:
    """Whether the host is a container that was started without the GPUs of its machine, which are on the PCI bus all the same."""
    nvidia = facts.nvidia
    hidden = bool(facts.container and nvidia.pci_devices and not nvidia.device_nodes and not facts.gpus)
    return hidden and not (_NO_DEVICES.search(nvidia.smi_error or "") and _unsupported(facts, catalog))


def fault(facts: Facts, catalog: Catalog) -> Problem | None:
    """What is wrong with the driver of a host that has GPUs; None where nothing is, or where there are none.

    The id is the cause; the hint has ``{host}`` for the names of the hosts.
    """
    cause = next(_causes(facts, catalog), None) if has_gpu(facts, catalog) else None
    if cause is None:
        return None
    count = max(len(facts.nvidia.pci_devices), len(facts.gpus), 1)
    there = f"{count} NVIDIA GPUs" if count > 1 else "an NVIDIA GPU"
    message = "; ".join((facts.nvidia.smi_error or "").strip().splitlines()[:2])
    faults = catalog.driver().repairs.faults
    what = faults.get(cause, faults["other"]).format(gpus=there)
    loaded = f"the loaded module is {facts.driver.version}" if facts.driver and version_mismatch(facts) else None
    reasons = [_unsupported(facts, catalog).get(cause), loaded, f"nvidia-smi says `{message[:200]}`" if message else None]
    reasons += _besides(cause, facts, catalog)
    return Problem("error", ": ".join(filter(None, [what, "; ".join(filter(None, reasons))])), _remedy(cause, facts, catalog), id=cause)


def _besides(cause: Cause, facts: Facts, catalog: Catalog) -> list[str]:
    """What is known of why a driver is not loaded, and that it is too old for every build once it works."""
    on_disk = _packaged_version(facts) if cause in ("not-loaded", "unsigned", "nouveau-first") else None
    found = [f"{on_disk} is installed, and the kernel is {facts.os.kernel}"] if on_disk else []
    found += ["Secure Boot is on, which refuses unsigned modules"] if cause in _NO_MODULE and facts.security.secure_boot else []
    version = facts.driver.version if facts.driver else on_disk
    cuda, oldest = min(catalog.cuda().minor_compatibility.of.items(), key=lambda each: key(each[1]))
    return [*found, f"no build runs on {version}: CUDA {cuda} needs {oldest}"] if version and key(version) < key(oldest) else found


def _remedy(cause: Cause, facts: Facts, catalog: Catalog) -> str:
    """What repairs it, with the branch and the kernel modules that the GPUs need; in a container the machine's driver is meant."""
    known, found = catalog.driver(), capabilities(facts, catalog)
    kind: Literal["open", "proprietary"] = "open" if not found or key(found[0]) >= key(known.modules.open_from) else "proprietary"
    values = {"branch": _branch(facts, found, catalog), "kind": kind, "version": facts.driver.version if facts.driver else "unknown"}
    dropped = known.repairs.dropped if cause in ("not-loaded", "nvml") and known.gpus.last_of(found) else ""
    signed = known.repairs.signed if cause in _NO_MODULE and facts.security.secure_boot else ""
    packages = known.repairs.packages[kind]
    names = next((packages[each] for each in (facts.os.id, *facts.os.id_like) if each in packages), packages["others"])
    remedy = (signed + known.repairs.of[cause] + dropped).format(host="{host}", packages=names.format(**values), **values)
    return remedy.replace("{host}", "the machine of {host}, which is a container") if facts.container else remedy


def version_mismatch(facts: Facts) -> bool:
    """Whether the driver's libraries have another version than the loaded module: it was updated, and the host not rebooted since."""
    return bool(_MISMATCH.search(facts.nvidia.smi_error or ""))


def _causes(facts: Facts, catalog: Catalog) -> Iterator[Cause]:
    """Causes, the most specific first."""
    nvidia, driver = facts.nvidia, facts.driver
    message = nvidia.smi_error or ""
    if nvidia.runfile and driver_packages(facts) and (not driver or version_mismatch(facts)):
        yield "installed-twice"
    if version_mismatch(facts):
        own = bool(facts.container) and bool(driver_packages(facts) or nvidia.runfile)
        yield "version-mismatch" if not own else "driver-in-image" if facts.container in _OF_IMAGES else "driver-in-container"
    if is_vgpu(facts, catalog) and not facts.gpus and (not driver or _NO_DEVICES.search(message)):
        yield "vgpu"
    if not driver:
        yield from _unsupported(facts, catalog)
        if nvidia.nouveau:
            has_module = nvidia.module_on_disk or any(not _WITHOUT_MODULE.match(name) for name in driver_packages(facts))
            yield "nouveau-first" if has_module else "nouveau"
        if nvidia.smi and nvidia.module_on_disk and facts.security.secure_boot and facts.security.dkms_key_enrolled is False:
            yield "unsigned"
        yield "not-loaded" if nvidia.smi else "no-driver"
    elif _LOST.search(message):
        yield "gpu-lost"
    elif _NVML.search(message):  # also where CUDA itself still finds the GPUs: NCCL asks NVML for them
        yield "nvml"
    if not facts.gpus:
        if _NO_DEVICES.search(message):
            yield from _unsupported(facts, catalog)
            yield "no-devices"
        if message:
            yield "nvml"
        if "gpus" not in facts.missing:  # the survey asked nvidia-smi, or the driver's library where there is none
            yield "silent"
    elif _lacks_fabric_manager(facts):
        yield "no-fabric-manager"


def _lacks_fabric_manager(facts: Facts) -> bool:
    """Whether GPUs wait for a Fabric Manager: they say so from Hopper on; older ones behind NVSwitches do where it does not run."""
    if facts.nvidia.fabric_manager or facts.arch == "aarch64":  # that of Grace runs on its NVLink switches
        return False
    if states := {gpu.fabric_state for gpu in facts.gpus} - {None}:
        return bool(states - {"Completed"})
    return bool(facts.nvidia.pci_switches) and facts.nvidia.fabric_manager is False and not facts.container


def driver_packages(facts: Facts) -> list[str]:
    """The names of the packages of NVIDIA's driver itself, without those that go with any installation of it."""
    return [name for name in facts.packages if re.match(_DRIVER_PACKAGES, name)]


def _packaged_version(facts: Facts) -> str | None:
    """The version of the driver that is installed and not loaded: as the kernel's log names it, else the packages, else its module."""
    ignored = (_IGNORED.search(line) for line in facts.signs.kernel_log)
    packages = (re.match(r"(?:\d+:)?(\d{3}\.[\d.]+\d)", facts.packages[name]) for name in driver_packages(facts))
    return next((found[1] for found in (*ignored, *packages) if found), facts.nvidia.module_on_disk)


def _unsupported(facts: Facts, catalog: Catalog) -> dict[Cause, str]:
    """Why a driver finds none of the GPUs on the PCI bus, or is not loaded, where their kind alone explains it."""
    driver, known, found = facts.driver, catalog.driver(), capabilities(facts, catalog)
    version = driver.version if driver else _packaged_version(facts)
    if version is None or not found:
        return {}
    if misfit := known.gpus.misfit(version, found):
        return {"misfit": f"driver {version} does not support it: {misfit}"}
    is_open, there = (driver.open, "loaded") if driver else (facts.nvidia.open_on_disk, "installed")
    if is_open is False and key(found[-1]) >= key(known.modules.open_only_from):
        reason = f"GPUs of compute capability {found[-1]} need the open kernel modules, and the proprietary ones are {there}"
        return {"open-modules": reason}
    if is_open and key(found[0]) < key(known.modules.open_from):
        reason = f"GPUs of compute capability {found[0]} need the proprietary kernel modules, and the open ones are {there}"
        return {"proprietary-modules": reason}
    return {}
