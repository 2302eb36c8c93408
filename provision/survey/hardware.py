"""Hardware besides ordinary NVIDIA GPUs, as a host's facts show it: what no build runs on, and what decides how NCCL communicates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from provision.base.problems import Problem
from provision.base.text import grouped, joined
from provision.base.versions import key
from provision.catalog import Catalog
from provision.catalog.models import Condition
from provision.survey import amd, gpus
from provision.survey.model import Facts, InfinibandPort

_NO_CLUSTER = re.compile(r"[0-]*")  # NVML's answer where GPUs have no NVLink beyond their host


def obstacle(facts: Facts, catalog: Catalog) -> Problem | None:
    """Why no build for GPUs runs on a host that has accelerators with a working driver, or other vendors' only. The hint, if there is one,
    has ``{host}`` for the names of the hosts."""
    if board := tegra_without_wheels(facts, catalog):
        return Problem("error", board, id="jetson")
    if not gpus.has_gpu(facts, catalog):
        found = other_accelerators(facts, catalog, computing=True)
        if found and not others_hidden_from_container(facts) and not amd.gpus(facts, catalog):
            what = f"it has {found} and no GPU of NVIDIA or AMD; what is installed here uses theirs only"
            return Problem("error", what, id="other-accelerators")
        return amd.fault(facts, catalog)
    if ranks(facts) or not facts.gpus:
        return None
    off = "stop what uses the GPUs, then sudo nvidia-smi -mig 0, and reboot where it says `pending`"
    what = "MIG is enabled on all GPUs without any instance, so CUDA finds none"
    return Problem("error", what, f"disable MIG on {{host}}, unless a scheduler creates instances there: {off}", id="mig")


def tegra_without_wheels(facts: Facts, catalog: Catalog) -> str | None:
    """A Jetson on which wheels for ARM servers do not run, as a sentence."""
    board, known = facts.tegra, catalog.hardware().tegra
    if board is None:
        return None
    capabilities = {gpu.compute_capability for gpu in facts.gpus}
    if board.release and key(board.release) >= key(known.servers_wheels_from) and not capabilities & set(known.without_code):
        return None
    release = f"Jetson Linux {board.release}" if board.release else "a kernel for Tegra"
    return f"it is a Jetson ({release}), whose GPU runs NVIDIA's own wheels and containers for it, and no build for ARM servers"


def other_accelerators(facts: Facts, catalog: Catalog, *, computing: bool = False) -> str:
    """``8 x Intel Gaudi (Habana)``: accelerators that are not used, AMD's next to NVIDIA's among them; empty without any. ``computing``:
    without cards for displays."""
    hardware, counted = catalog.hardware(), Counter[str]()
    for each in facts.accelerators.devices:
        known = hardware.accelerator(each.vendor, each.device, each.pci_class, each.memory_mb)
        if known and not (computing and known.display) and (each.vendor != hardware.amd_vendor or gpus.has_gpu(facts, catalog)):
            counted[known.name] += 1
    return " and ".join(f"{count} x {name}" for name, count in counted.items())


def others_hidden_from_container(facts: Facts) -> bool:
    """Whether the host is a container that was started without the accelerators on its machine's PCI bus."""
    return bool(facts.container and not facts.accelerators.nodes)


def in_mig_mode(facts: Facts) -> tuple[int, int]:
    """(the number of GPUs in MIG mode, of their instances)"""
    found = [gpu.mig_instances for gpu in facts.gpus if gpu.mig == "Enabled"]
    return len(found), sum(found)


def ranks(facts: Facts) -> int:
    """How many ranks have a GPU of NVIDIA each: a process sees one MIG instance and no other GPU, unless it names them."""
    partitioned, instances = in_mig_mode(facts)
    return 1 if instances else len(facts.gpus) - partitioned


def wsl(facts: Facts) -> bool:
    """Whether it is Windows' subsystem for Linux."""
    return "microsoft" in (facts.os.kernel or "").lower()


def licensed_vgpus(facts: Facts) -> tuple[int, int]:
    """(the number of vGPUs, of those without a licence)"""
    found = [gpu for gpu in facts.gpus if (gpu.virtualization or "").upper() == "VGPU"]
    return len(found), sum(not (gpu.license or "").startswith("Licensed") for gpu in found)


def nvlink_domain(facts: Facts) -> str | None:
    """The id of the NVLink domain that the GPUs share with those of other hosts; None without one."""
    return next((gpu.fabric_cluster for gpu in facts.gpus if gpu.fabric_cluster and not _NO_CLUSTER.fullmatch(gpu.fabric_cluster)), None)


def fabric_faults(states: Iterable[tuple[str | None, str | None]]) -> list[str]:
    """What the NVLink fabric says of GPUs, as (state, status), that it has not accepted, each once."""
    wrong = ((state, status) for state, status in states if state and (state != "Completed" or status not in (None, "Success")))
    return list(dict.fromkeys(f"state {state}, status {status or 'unknown'}" for state, status in wrong))


def conditions(facts: Facts, catalog: Catalog, *, alone: bool) -> dict[Condition, str]:
    """What holds of a host, as known problems and notes name it, with what they say of it."""
    (vgpus, unlicensed), shm = licensed_vgpus(facts), facts.disk.shm.total_mb
    ports, unlike = _fastest_ports(facts, catalog)
    roce = [port for port in ports if _kind(port, catalog) == "roce"]
    settings, notes = {**facts.signs.nccl_conf, **facts.environment.variables}, catalog.hardware().notes
    hsn = [each.name for each in facts.network.interfaces if re.fullmatch(r"hsn\d+", each.name)]
    (partitioned, instances), amd_gpus = in_mig_mode(facts), amd.gpus(facts, catalog)
    models = sorted(filter(None, {gpu.name for gpu in facts.gpus} or {gpu.target for gpu in amd_gpus}))
    rocm, targets = catalog.pytorch().rocm.of, Counter(str(gpu.target) for gpu in amd_gpus)
    left_by_rocm = sorted(targets.keys() - {*rocm[max(rocm, key=key)].code})
    of_gpus = f"{partitioned} of {len(facts.gpus)} GPUs"
    passed_through = sum(gpu.virtualization == "Pass-Through" for gpu in facts.gpus) > 1
    found: dict[Condition, object] = {
        "aarch64": facts.arch == "aarch64",
        "accelerators": other_accelerators(facts, catalog),
        "accelerators hidden": others_hidden_from_container(facts),
        "amd": not gpus.has_gpu(facts, catalog) and len(amd_gpus),
        "amd left by rocm": len(left_by_rocm) < len(targets) and " and ".join(f"{targets[each]} x {each}" for each in left_by_rocm),
        "container": facts.container,
        "efa": active_ports(facts, "efa", catalog),
        "efa plugin": facts.efa_plugin,
        "fabric fault": "; ".join(fabric_faults((gpu.fabric_state, gpu.fabric_status) for gpu in facts.gpus)),
        "gb200": set(facts.nvidia.pci_ids) & set(catalog.hardware().fabric.imex),
        "imex": imex_ready(facts),
        "gpudirect tcp": gpudirect_tcp(facts, catalog),
        "gpus differ": len(models) > 1 and joined(models),
        "infiniband": [port for port in ports if _kind(port, catalog) == "infiniband"],
        "jetson": facts.tegra and facts.tegra.release,
        "jetson without wheels": tegra_without_wheels(facts, catalog),
        "mig": instances and f"{of_gpus}, with {instances} instances",
        "mig empty": partitioned and not instances and of_gpus,
        "nccl settings": " and ".join(f"{name}={settings[name]}" for name in notes.nccl_settings if name in settings),
        "nix-ld": facts.os.nix_ld,
        "no avx": facts.arch == "x86_64" and "flags" in facts.cpu.model_fields_set and "avx" not in facts.cpu.flags and facts.cpu.model,
        "nvlink domain": nvlink_domain(facts),
        "omni-path": active_ports(facts, "omni-path", catalog),
        "opal prefix": " and ".join(f"{name}={settings[name]}" for name in ("OPAL_PREFIX", "HPCX_MPI_DIR") if name in settings),
        "passed through": passed_through and not facts.nvidia.pci_switches,
        "pcie only": len(facts.gpus) > 1 and {gpu.compute_capability for gpu in facts.gpus} <= {*notes.pcie_only},
        "passed through with rdma": passed_through and ports and "NCCL_TOPO_FILE" not in settings,
        "processor graphics": " and ".join(str(each.target) for each in (facts.amd.gpus if facts.amd else ()) if each not in amd_gpus),
        "pxn off": settings.get("NCCL_PXN_DISABLE") == "1",
        "rdma management": "NCCL_IB_HCA" not in settings and _management(ports, facts, catalog),
        "rdma mixed": "NCCL_IB_HCA" not in settings and ",".join(f"{each.device}:{each.port or 1}" for each in unlike if each.device),
        "roce": roce,
        "roce without gid": " and ".join(str(port.device) for port in roce if port.roce_v2_gids == []),
        "several hosts": not alone,
        "slingshot": hsn and joined(sorted(hsn)),
        "small shm": f"{shm:.0f}" if shm is not None and shm < notes.shm_mb else None,
        "vgpu": vgpus,
        "vgpu without licence": unlicensed and f"{unlicensed} of {vgpus}",
        "wsl": wsl(facts),
        "wsl driver packages": wsl(facts) and " and ".join(gpus.driver_packages(facts)),
    }
    return {name: str(value) for name, value in found.items() if value}


def imex_ready(facts: Facts) -> bool:
    """Whether memory can be shared over NVLink between hosts: the service runs, and there is a channel."""
    return bool(facts.nvidia.imex and facts.nvidia.imex_channels)


def _fastest_ports(facts: Facts, catalog: Catalog) -> tuple[list[InfinibandPort], list[InfinibandPort]]:
    """(the fastest active RDMA ports of one kind, vendor and speed, those that differ from them in one that is known)"""
    ports = chain(*(active_ports(facts, kind, catalog) for kind in ("infiniband", "omni-path", "roce")))
    alike = grouped(((port.link_layer, port.vendor, _gbps([port]) or None), port) for port in ports)
    if not alike:
        return [], []
    best = max(alike, key=lambda traits: _gbps(alike[traits]))
    unlike = [alike[each] for each in alike if any(len({*pair} - {None}) > 1 for pair in zip(each, best, strict=True))]
    return alike[best], list(chain(*unlike))


def _gbps(ports: Iterable[InfinibandPort]) -> int:
    return sum(int(rate) for port in ports for rate in re.findall(r"^\d{1,6}", port.rate or ""))


def _management(ports: list[InfinibandPort], facts: Facts, catalog: Catalog) -> str | None:
    """What shows that some of the RDMA ports alike are for management or storage; two ports are often both the GPUs'."""
    ssh = facts.network.instead_of or facts.network.ssh_connection.interface
    carriers = [port.device for port in ports if port.device and ssh in port.interfaces]
    if carriers and len(ports) > len(carriers) + 1:
        return f"{joined(carriers)} carries ssh"
    gpu_count = len(facts.gpus) or len(amd.gpus(facts, catalog))
    all_listed = not facts.container and gpu_count >= max(2, len(facts.nvidia.pci_devices) or amd.on_bus(facts, catalog))
    few_more = len(ports) - gpu_count in (1, 2)
    return f"{len(ports)} ports for {gpu_count} GPUs" if all_listed and few_more and len(ports) % gpu_count else None


def gpudirect_tcp(facts: Facts, catalog: Catalog) -> str | None:
    """Google's GPUDirect over TCP for which a virtual machine, or a pod on one, has its network interfaces; None elsewhere."""
    known = catalog.hardware().gpudirect_tcp
    possible = not facts.infiniband and known.capability in gpus.capabilities(facts, catalog)
    names = {each.name.removesuffix("f0") for each in facts.network.interfaces if possible}
    tables = (known.of, known.pods) if facts.container else (known.of,)  # a container may have the machine's network
    return next((name for each in tables for name, interfaces in each.items() if names.issuperset(interfaces)), None)


def driver_is_fixed(facts: Facts, catalog: Catalog) -> bool:
    """Whether the machine around a container, the hypervisor or the cloud's image decides which NVIDIA driver runs there."""
    return bool(facts.container) or gpus.is_vgpu(facts, catalog) or gpudirect_tcp(facts, catalog) is not None


def active_ports(facts: Facts, kind: str, catalog: Catalog) -> list[InfinibandPort]:
    """The active ports of a kind: ``infiniband``, ``omni-path``, ``roce`` or ``efa``."""
    return [port for port in facts.infiniband if port.state == "active" and _kind(port, catalog) == kind]


def _kind(port: InfinibandPort, catalog: Catalog) -> str | None:
    if port.vendor == catalog.hardware().efa_vendor:
        return "efa"
    infiniband = "omni-path" if port.vendor in catalog.hardware().omni_path_vendors else "infiniband"
    return {"infiniband": infiniband, "ethernet": "roce"}.get((port.link_layer or "").lower())


def dma_buf(facts: Facts, catalog: Catalog) -> bool:
    """Whether network cards reach GPU memory by the kernel's DMA-BUF, and nvidia_peermem is not needed."""
    needed, driver = catalog.hardware().dma_buf, facts.driver
    kernel = re.match(r"\d+\.\d+", facts.os.kernel or "")
    if driver is None or not driver.open or not driver.cuda or kernel is None:
        return False
    return key(kernel.group()) >= key(needed.kernel) and key(driver.cuda) >= key(needed.cuda)
