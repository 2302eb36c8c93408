"""Notes on hosts' hardware: what a person has to know or do that no package of the plan does. One per kind, with its hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision import catalog
from provision.base.text import joined
from provision.survey import Facts, hardware


def notes(facts: Mapping[str, Facts], *, gpus_used: bool) -> list[str]:
    """The notes on all hosts. ``gpus_used``: whether the plan uses GPUs; without them NCCL's networks do not matter."""
    hosts: dict[str, list[str]] = {}
    for name in sorted(facts):
        for text in (*_of_host(facts[name]), *(_of_nccl(facts[name], alone=len(facts) == 1) if gpus_used else ())):
            hosts.setdefault(text, []).append(name)
    return [f"{joined(names)}: {text}" for text, names in hosts.items()]


def _of_host(facts: Facts) -> Iterator[str]:
    if found := hardware.other_accelerators(facts):
        hidden = hardware.others_hidden_from_container(facts)
        yield f"{found} stay unused: " + ("its container was given none of them" if hidden else "only NVIDIA's GPUs are supported")
    if board := hardware.tegra_without_wheels(facts):
        yield f"{board}: its CPU is used"
    elif facts.tegra:
        yield f"a Jetson (Jetson Linux {facts.tegra.release}): its GPU runs the builds for ARM servers; never tried here"
    if hardware.wsl(facts):
        yield (
            "WSL 2: the GPU driver is Windows' (install none in it), pinned memory is limited, and other hosts reach it with "
            "networkingMode=mirrored in .wslconfig only"
        )


def _of_nccl(facts: Facts, *, alone: bool) -> Iterator[str]:
    if hardware.in_mig_mode(facts):
        yield "MIG mode: the rank of a host uses the first instance of its GPU, without NVLink and GPU peer-to-peer"
    vgpus, unlicensed = hardware.licensed_vgpus(facts)
    if vgpus:
        licence = f"; without a licence ({unlicensed} of {vgpus}) they get slow: configure /etc/nvidia/gridd.conf" if unlicensed else ""
        yield f"vGPUs: only time-sliced ones of a whole GPU reach each other over NVLink, none over PCIe{licence}"
    if faults := hardware.fabric_faults((gpu.fabric_state, gpu.fabric_status) for gpu in facts.gpus):
        yield f"the NVLink fabric has not accepted all GPUs ({'; '.join(faults)}): see provision doctor"
    if hardware.nvlink_domain(facts) and not alone:
        ready = (
            "nvidia-imex runs" if hardware.imex_ready(facts) else "start nvidia-imex with a channel on every host of it (provision doctor)"
        )
        yield f"NVLink domain {hardware.nvlink_domain(facts)}: NCCL uses NVLink between its hosts: {ready}"
    if alone:
        return
    if hardware.active_ports(facts, "efa"):
        yield (
            f"EFA: NCCL uses it through {facts.efa_plugin} if that folder is in LD_LIBRARY_PATH"
            if facts.efa_plugin
            else "EFA: NCCL uses it with the plugin aws-ofi-nccl only, and TCP without: install it with AWS's EFA installer"
        )
    if hardware.active_ports(facts, "infiniband"):
        yield "InfiniBand: NCCL uses it by itself; `ulimit -l` must be unlimited (provision doctor checks it)"
    if ports := hardware.active_ports(facts, "roce"):
        without = [str(port.device) for port in ports if port.roce_v2_gids == []]
        yield (
            f"RoCE: {joined(without)} without a RoCE v2 GID: give the network interface an IP address"
            if without
            else f"RoCE: NCCL {catalog.hardware().nccl_finds_gids} or newer finds the RoCE v2 GID itself: leave NCCL_IB_GID_INDEX unset; "
            "the switches need PFC or ECN"
        )
