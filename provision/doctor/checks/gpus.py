"""Checks of one host: drivers, CUDA, NCCL and what they need of the host."""

from __future__ import annotations

import re
from collections.abc import Iterable

from provision.base.text import counted
from provision.base.versions import key
from provision.catalog import Catalog
from provision.doctor.checks.registry import Observation, Observations, check
from provision.survey import Facts, gpus, hardware
from provision.survey.model import Limits

ENOUGH_SHM_MB = 1024  # NCCL and data loaders; Docker's default is 64 MB


def _uses_nccl(facts: Facts) -> bool:
    """Whether the host may have a GPU: without one, nothing that only NCCL needs is wrong."""
    return bool(facts.gpus or facts.driver or facts.nvidia.pci_devices)


@check("nvml-driver-mismatch")
def _mismatch(facts: Facts) -> Observations:
    if gpus.version_mismatch(facts):
        yield Observation(f"nvidia-smi prints: {(facts.nvidia.smi_error or '').strip().splitlines()[0]}", "a list of GPUs")
        return
    loaded = facts.driver.kernel_module if facts.driver else None
    for name, version in facts.packages.items():
        installed = re.split(r"[-+~:]", version)[0]
        if name.startswith("libnvidia-compute-") and loaded and installed != loaded:
            yield Observation(f"the loaded driver is {loaded}, the installed libraries ({name}) are {installed}", "the same version")


@check("nvidia-smi-no-driver")
def _no_driver(facts: Facts) -> Observations:
    devices = facts.nvidia.pci_devices
    if devices and not facts.driver and not facts.nvidia.nouveau:
        yield Observation(f"{counted(len(devices), 'NVIDIA device')} ({', '.join(devices[:4])}) and no driver loaded", "the nvidia module")


@check("nouveau-loaded")
def _nouveau(facts: Facts) -> Observations:
    if facts.nvidia.nouveau and facts.nvidia.pci_devices and not facts.driver:
        yield Observation("the nouveau module is loaded", "the nvidia module")


@check("rm-init-adapter-failed")
def _lost_gpus(facts: Facts) -> Observations:
    devices, shown = len(facts.nvidia.pci_devices), len(facts.gpus)
    if facts.driver and not facts.nvidia.smi_error and devices > shown:
        yield Observation(f"{devices} NVIDIA devices, of which the driver lists {shown}", "all of them")


@check("fabric-manager-down")
def _fabric_manager(facts: Facts) -> Observations:
    switches = 0 if facts.container else facts.nvidia.pci_switches
    if facts.driver and switches and facts.nvidia.fabric_manager is False:
        yield Observation(f"{switches} NVSwitch devices and nv-fabricmanager does not run", "nvidia-fabricmanager running")


@check("libcuda-missing")
def _libcuda(facts: Facts) -> Observations:
    places = facts.linker.cache.get("libcuda.so.1", [])
    if facts.driver and not places:
        yield Observation("a driver is loaded, but ldconfig -p does not list libcuda.so.1", "libcuda.so.1", ("sudo ldconfig",))
    elif facts.driver and "/stubs" in places[0]:
        yield Observation(f"libcuda.so.1 is {places[0]}, a stub for linking", "the driver's library", ("sudo ldconfig",))


@check("cuda-driver-insufficient")
def _insufficient(facts: Facts) -> Observations:
    torch, driver = facts.installed.torch_cuda, (facts.driver.cuda if facts.driver else None)
    if torch and driver and key(torch)[:1] > key(driver)[:1]:
        yield Observation(
            f"PyTorch was built for CUDA {torch}, the driver supports CUDA {driver}", f"a driver for CUDA {torch}, or an older PyTorch"
        )
    for library in facts.nccl.libraries:
        if library.cuda and driver and key(library.cuda)[:1] > key(driver)[:1]:
            yield Observation(
                f"{library.path} was built for CUDA {library.cuda}, the driver supports CUDA {driver}", f"NCCL for CUDA {driver} or older"
            )


@check("torch-no-nvidia-driver", "warning")
def _torch_without_driver(facts: Facts) -> Observations:
    if facts.installed.torch_cuda and not facts.driver and facts.nvidia.pci_devices:
        yield Observation(f"PyTorch for CUDA {facts.installed.torch_cuda} is installed, but no driver", "a driver")


@check("torch-nvcc-cuda-mismatch", "warning")
def _nvcc(facts: Facts) -> Observations:
    torch, nvcc = facts.installed.torch_cuda, (facts.cuda.nvcc.version if facts.cuda.nvcc else None)
    if torch and nvcc and key(torch)[:1] != key(nvcc)[:1]:
        yield Observation(f"nvcc belongs to CUDA {nvcc}, PyTorch was built with CUDA {torch}", "the same CUDA")


@check("cmake-no-cuda-compiler", "warning")
def _no_nvcc(facts: Facts) -> Observations:
    hidden = [each.path for each in facts.cuda.toolkits if each.nvcc]
    if facts.gpus and hidden and not facts.cuda.nvcc:
        yield Observation(
            f"{hidden[0]}/bin/nvcc is not on the PATH of a non-interactive shell", "nvcc", (f"export PATH={hidden[0]}/bin:$PATH",)
        )


@check("nccl-shm-too-small", "warning")
def _shm(facts: Facts) -> Observations:
    total, free = facts.disk.shm.total_mb, facts.disk.shm.free_mb
    if not _uses_nccl(facts):
        return
    if total is not None and total < ENOUGH_SHM_MB:
        yield Observation(f"/dev/shm has {total} MB", f"{ENOUGH_SHM_MB} MB or more")
    elif free is not None and free < ENOUGH_SHM_MB / 4:
        yield Observation(f"/dev/shm has only {free} of {total} MB free", f"{ENOUGH_SHM_MB // 4} MB or more", ("ls -la /dev/shm",))


@check("nccl-shm-permission")
def _shm_mode(facts: Facts) -> Observations:
    mode = facts.signs.modes.get("/dev/shm")
    if mode and mode != "1777":
        yield Observation(f"/dev/shm has mode {mode}", "1777")


@check("nccl-no-socket-interface")
def _socket_interface(facts: Facts) -> Observations:
    wanted = facts.environment.variables.get("NCCL_SOCKET_IFNAME") or facts.signs.nccl_conf.get("NCCL_SOCKET_IFNAME")
    names = [each.name for each in facts.network.interfaces]
    if not _uses_nccl(facts) or not wanted or wanted.startswith("^") or not names:
        return
    exact, prefixes = wanted.startswith("="), wanted.lstrip("=").split(",")
    if not any(name == prefix if exact else name.startswith(prefix) for prefix in prefixes for name in names):
        yield Observation(f"NCCL_SOCKET_IFNAME={wanted}, but the interfaces are {', '.join(names)}", "the name of an interface")


@check("nccl-undefined-symbol", "warning")
def _two_nccl(facts: Facts) -> Observations:
    found = sorted(name for name in facts.installed.packages if re.match(r"nvidia-nccl-cu\d+$", name))
    if len(found) > 1 and _uses_nccl(facts):
        yield Observation(f"{' and '.join(found)} are installed in the environment; they share one folder", "one of them")


@check("libnccl-missing", "warning")
def _no_nccl(facts: Facts) -> Observations:
    if facts.installed.torch_cuda and facts.gpus and not facts.nccl.libraries:
        yield Observation("PyTorch for CUDA is installed, but libnccl.so.2 was not found", "libnccl.so.2")


@check("apt-nccl-version-held")
def _nccl_packages(facts: Facts) -> Observations:
    library, headers = facts.packages.get("libnccl2"), facts.packages.get("libnccl-dev")
    if library and headers and library != headers and _uses_nccl(facts):
        held = sorted({"libnccl2", "libnccl-dev"} & set(facts.held_packages))
        kept = f" ({' and '.join(held)} held)" if held else ""
        fix = (f"sudo apt-get install --allow-downgrades --allow-change-held-packages libnccl2={library} libnccl-dev={library}",)
        yield Observation(f"libnccl2 is {library}, libnccl-dev is {headers}{kept}", "the same version", fix)


@check("rdma-memlock")
def _memlock(facts: Facts) -> Observations:
    limit = facts.limits.get("memlock", Limits()).soft
    if facts.infiniband and isinstance(limit, int):
        yield Observation(f"ulimit -l is {limit // 1024} kB, and the host has RDMA devices", "unlimited")


@check("openib-no-active-ports", "warning")
def _ports(facts: Facts) -> Observations:
    ports = facts.infiniband
    if ports and not any(port.state == "active" for port in ports):
        yield Observation(", ".join(f"{port.device} port {port.port} is {port.state}" for port in ports[:4]), "an active port")


@check("nccl-ib-completion-4", "warning")
def _peer_memory(facts: Facts, catalog: Catalog) -> Observations:
    rdma = hardware.active_ports(facts, "infiniband", catalog) or hardware.active_ports(facts, "roce", catalog)
    if facts.gpus and rdma and not facts.nvidia.peer_memory and not hardware.dma_buf(facts, catalog):
        yield Observation(
            "the host has GPUs and RDMA ports, nvidia_peermem is not loaded, and DMA-BUF cannot take its place",
            "nvidia_peermem loaded, or the driver's open kernel modules on a kernel with DMA-BUF",
            ("sudo modprobe nvidia_peermem",),
        )


@check("efa-plugin-missing")
def _efa(facts: Facts, catalog: Catalog) -> Observations:
    if facts.gpus and hardware.active_ports(facts, "efa", catalog) and not facts.efa_plugin and "efa_plugin" not in facts.missing:
        yield Observation("the host has GPUs and EFA, but no libnccl-net of aws-ofi-nccl was found", "the plugin aws-ofi-nccl")


@check("roce-gid-index")
def _gid_index(facts: Facts, catalog: Catalog) -> Observations:
    name = "NCCL_IB_GID_INDEX"
    wanted = facts.environment.variables.get(name) or facts.signs.nccl_conf.get(name)
    for port in hardware.active_ports(facts, "roce", catalog):
        if port.roce_v2_gids == []:
            yield Observation(f"{port.device} port {port.port} has no RoCE v2 GID", "an IP address on its network interface")
        elif port.roce_v2_gids and wanted and wanted.isdecimal() and int(wanted) not in port.roce_v2_gids:
            indexes = ", ".join(map(str, port.roce_v2_gids[:8]))
            yield Observation(f"{name}={wanted}, but RoCE v2 GIDs of {port.device} are {indexes}", f"{name} unset")


@check("mig-enabled")
def _mig(facts: Facts) -> Observations:
    partitioned, instances = hardware.in_mig_mode(facts)
    if partitioned:
        yield Observation(
            f"MIG is enabled on {partitioned} of {len(facts.gpus)} GPUs, with {instances} instances", "MIG disabled for training"
        )


@check("vgpu-unlicensed")
def _vgpu_licence(facts: Facts) -> Observations:
    vgpus, unlicensed = hardware.licensed_vgpus(facts)
    if unlicensed:
        yield Observation(f"{unlicensed} of {vgpus} vGPUs have no licence", "License Status: Licensed, in nvidia-smi -q")


def fabric_observations(states: Iterable[tuple[str | None, str | None]]) -> Observations:
    """What is wrong with the GPUs' (state, status) in the NVLink fabric: the survey's and those of the check of health are one finding."""
    if faults := hardware.fabric_faults(states):
        yield Observation(f"nvidia-smi says of the NVLink fabric: {'; '.join(faults)}", "state Completed, status Success")


@check("nvlink-fabric-state")
def _fabric(facts: Facts) -> Observations:
    yield from fabric_observations((gpu.fabric_state, gpu.fabric_status) for gpu in facts.gpus)


@check("imex-not-running")
def _imex(facts: Facts) -> Observations:
    if hardware.nvlink_domain(facts) and not hardware.imex_ready(facts):
        lacks = "has no channel device" if facts.nvidia.imex else "does not run"
        yield Observation(f"the GPUs share an NVLink domain with other hosts, and nvidia-imex {lacks}", "nvidia-imex with a channel")


@check("other-accelerators")
def _others(facts: Facts, catalog: Catalog) -> Observations:
    others = "" if hardware.others_hidden_from_container(facts) else hardware.other_accelerators(facts, catalog)
    if found := hardware.tegra_without_wheels(facts, catalog) or others:
        yield Observation(found, "NVIDIA GPUs with an ordinary driver, or --cpu")
