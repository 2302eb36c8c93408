"""Drivers, CUDA, NCCL and what they need of the host."""

from __future__ import annotations

import re
from collections.abc import Iterator

from provision.base.versions import key
from provision.doctor.checks.model import Seen, check
from provision.facts import Facts, gpus
from provision.facts.model import Limits

ENOUGH_SHM_MB = 1024  # NCCL and data loaders; Docker gives 64 MB unless asked


def _uses_nccl(facts: Facts) -> bool:
    """Where there is no GPU, nothing that only NCCL needs is wrong."""
    return bool(facts.gpus or facts.driver or facts.nvidia.pci_devices)


@check("nvml-driver-mismatch")
def _mismatch(facts: Facts) -> Iterator[Seen]:
    if gpus.version_mismatch(facts):
        yield Seen(f"nvidia-smi says: {(facts.nvidia.smi_error or '').strip().splitlines()[0]}", "an answer")
        return
    loaded = facts.driver.kernel_module if facts.driver else None
    for name, version in facts.packages.items():
        installed = re.split(r"[-+~:]", version)[0]
        if name.startswith("libnvidia-compute-") and loaded and installed != loaded:
            yield Seen(f"the loaded driver is {loaded}, the installed libraries ({name}) are {installed}", "the same version")


@check("nvidia-smi-no-driver")
def _no_driver(facts: Facts) -> Iterator[Seen]:
    devices = facts.nvidia.pci_devices
    if devices and not facts.driver and not facts.nvidia.nouveau:
        yield Seen(f"{len(devices)} NVIDIA device(s) ({', '.join(devices[:4])}) and no driver loaded", "the nvidia module")


@check("nouveau-loaded")
def _nouveau(facts: Facts) -> Iterator[Seen]:
    if facts.nvidia.nouveau and facts.nvidia.pci_devices and not facts.driver:
        yield Seen("the nouveau module is loaded", "the nvidia module")


@check("rm-init-adapter-failed")
def _lost_gpus(facts: Facts) -> Iterator[Seen]:
    devices, shown = len(facts.nvidia.pci_devices), len(facts.gpus)
    if facts.driver and not facts.nvidia.smi_error and devices > shown:
        yield Seen(f"{devices} NVIDIA devices, of which the driver shows {shown}", "all of them")


@check("fabric-manager-down")
def _fabric_manager(facts: Facts) -> Iterator[Seen]:
    if facts.driver and facts.signs.nvswitches and not facts.nvidia.fabric_manager:
        yield Seen(f"{facts.signs.nvswitches} NVSwitch devices and no nv-fabricmanager running", "nvidia-fabricmanager, active")


@check("libcuda-missing")
def _libcuda(facts: Facts) -> Iterator[Seen]:
    places = facts.linker.cache.get("libcuda.so.1", [])
    if facts.driver and not places:
        yield Seen("a driver is loaded, and ldconfig -p has no libcuda.so.1", "libcuda.so.1", ("sudo ldconfig",))
    elif facts.driver and "/stubs" in places[0]:
        yield Seen(f"libcuda.so.1 is {places[0]}, a stub without a driver behind it", "the driver's own", ("sudo ldconfig",))


@check("cuda-driver-insufficient")
def _insufficient(facts: Facts) -> Iterator[Seen]:
    torch, driver = facts.installed.torch_cuda, (facts.driver.cuda if facts.driver else None)
    if torch and driver and key(torch)[:1] > key(driver)[:1]:
        yield Seen(
            f"PyTorch was built for CUDA {torch}, the driver serves CUDA {driver}", f"a driver for CUDA {torch}, or an older PyTorch"
        )
    for library in facts.nccl.libraries:
        if library.cuda and driver and key(library.cuda)[:1] > key(driver)[:1]:
            yield Seen(f"{library.path} was built for CUDA {library.cuda}, the driver serves CUDA {driver}", "an NCCL that fits")


@check("torch-no-nvidia-driver", "warning")
def _torch_without_driver(facts: Facts) -> Iterator[Seen]:
    if facts.installed.torch_cuda and not facts.driver and facts.nvidia.pci_devices:
        yield Seen(f"PyTorch for CUDA {facts.installed.torch_cuda} and no driver", "a driver")


@check("torch-nvcc-cuda-mismatch", "warning")
def _nvcc(facts: Facts) -> Iterator[Seen]:
    torch, nvcc = facts.installed.torch_cuda, (facts.cuda.nvcc.version if facts.cuda.nvcc else None)
    if torch and nvcc and key(torch)[:1] != key(nvcc)[:1]:
        yield Seen(f"nvcc is of CUDA {nvcc}, PyTorch was built with CUDA {torch}", "the same")


@check("cmake-no-cuda-compiler", "warning")
def _no_nvcc(facts: Facts) -> Iterator[Seen]:
    hidden = [each.path for each in facts.cuda.toolkits if each.nvcc]
    if facts.gpus and hidden and not facts.cuda.nvcc:
        yield Seen(f"{hidden[0]}/bin/nvcc is not on the PATH of a non-interactive shell", "nvcc", (f"export PATH={hidden[0]}/bin:$PATH",))


@check("nccl-shm-too-small", "warning")
def _shm(facts: Facts) -> Iterator[Seen]:
    total, free = facts.disk.shm.total_mb, facts.disk.shm.free_mb
    if not _uses_nccl(facts):
        return
    if total is not None and total < ENOUGH_SHM_MB:
        yield Seen(f"/dev/shm has {total} MB", f"{ENOUGH_SHM_MB} MB or more")
    elif free is not None and free < ENOUGH_SHM_MB / 4:
        yield Seen(f"/dev/shm has only {free} of {total} MB free", f"{ENOUGH_SHM_MB // 4} MB or more", ("ls -la /dev/shm",))


@check("nccl-shm-permission")
def _shm_mode(facts: Facts) -> Iterator[Seen]:
    mode = facts.signs.modes.get("/dev/shm")
    if mode and mode != "1777":
        yield Seen(f"/dev/shm has mode {mode}", "1777")


@check("nccl-no-socket-interface")
def _socket_interface(facts: Facts) -> Iterator[Seen]:
    wanted = facts.environment.variables.get("NCCL_SOCKET_IFNAME") or facts.signs.nccl_conf.get("NCCL_SOCKET_IFNAME")
    names = [each.name for each in facts.network.interfaces]
    if not _uses_nccl(facts) or not wanted or wanted.startswith("^") or not names:
        return
    exact, prefixes = wanted.startswith("="), wanted.lstrip("=").split(",")
    if not any(name == prefix if exact else name.startswith(prefix) for prefix in prefixes for name in names):
        yield Seen(f"NCCL_SOCKET_IFNAME={wanted}, and the interfaces are {', '.join(names)}", "a name that is there")


@check("nccl-undefined-symbol", "warning")
def _two_nccl(facts: Facts) -> Iterator[Seen]:
    found = sorted(name for name in facts.installed.packages if re.match(r"nvidia-nccl-cu\d+$", name))
    if len(found) > 1 and _uses_nccl(facts):
        yield Seen(f"the environment holds {' and '.join(found)}, which share one folder", "one of them")


@check("libnccl-missing", "warning")
def _no_nccl(facts: Facts) -> Iterator[Seen]:
    if facts.installed.torch_cuda and facts.gpus and not facts.nccl.libraries:
        yield Seen("PyTorch for CUDA, and no libnccl.so.2 anywhere", "libnccl.so.2")


@check("apt-nccl-version-held")
def _nccl_packages(facts: Facts) -> Iterator[Seen]:
    library, headers = facts.packages.get("libnccl2"), facts.packages.get("libnccl-dev")
    if library and headers and library != headers and _uses_nccl(facts):
        held = sorted({"libnccl2", "libnccl-dev"} & set(facts.held_packages))
        kept = f" ({' and '.join(held)} held)" if held else ""
        fix = (f"sudo apt-get install --allow-downgrades --allow-change-held-packages libnccl2={library} libnccl-dev={library}",)
        yield Seen(f"libnccl2 is {library}, libnccl-dev is {headers}{kept}", "the same version", fix)


@check("rdma-memlock")
def _memlock(facts: Facts) -> Iterator[Seen]:
    limit = facts.limits.get("memlock", Limits()).soft
    if facts.infiniband and isinstance(limit, int):
        yield Seen(f"ulimit -l is {limit // 1024} kB on a host with RDMA devices", "unlimited")


@check("openib-no-active-ports", "warning")
def _ports(facts: Facts) -> Iterator[Seen]:
    ports = facts.infiniband
    if ports and not any(port.state == "active" for port in ports):
        yield Seen(", ".join(f"{port.device} port {port.port} is {port.state}" for port in ports[:4]), "one that is active")


@check("nccl-ib-completion-4", "warning")
def _peer_memory(facts: Facts) -> Iterator[Seen]:
    if facts.gpus and any(port.state == "active" for port in facts.infiniband) and not facts.nvidia.peer_memory:
        yield Seen("GPUs and RDMA ports, and no nvidia_peermem module", "nvidia_peermem loaded", ("sudo modprobe nvidia_peermem",))
