"""torchrun's words for the size of a job, ``--nnodes`` and ``--nproc-per-node``, in ours: ranks, and hosts with slots.

A node is a host. Without ``--nproc-per-node`` a host has as many ranks as it has slots, and not one as under torchrun.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Sequence

from collective_core.errors import CollectiveError
from collective_core.launch import this_host
from collective_core.launch.hosts import Host
from collective_core.runtime import cores

_RANKS_ARE_TOLD = "the launcher starts all ranks and tells them where to meet"
_TORCHRUNS_AGENT = "it is for an agent of torchrun's, and there is none"
_OUTPUT_IS_SHOWN = "what all ranks print is shown here"
#: Options of torchrun that do nothing here, with the number of their values, and why. Source: torch/distributed/run.py of PyTorch 2.13.
WITHOUT_EFFECT = {
    "--rdzv-backend": (1, _RANKS_ARE_TOLD),
    "--rdzv-endpoint": (1, _RANKS_ARE_TOLD),
    "--rdzv-id": (1, _RANKS_ARE_TOLD),
    "--rdzv-conf": (1, _RANKS_ARE_TOLD),
    "--standalone": (0, _RANKS_ARE_TOLD),
    "--master-addr": (1, "MASTER_ADDR is where the others reach rank 0's host; -x MASTER_ADDR=… sets another"),
    "--local-addr": (1, "each host is known by the address at which it is reached"),
    "--monitor-interval": (1, _TORCHRUNS_AGENT),
    "--start-method": (1, _TORCHRUNS_AGENT),
    "--role": (1, _TORCHRUNS_AGENT),
    **dict.fromkeys(("--tee", "--redirects", "--log-dir", "--local-ranks-filter"), (1, _OUTPUT_IS_SHOWN)),
}


class Size(NamedTuple):
    """``np``, ``least``, ``most``: as of elastic.limits_of. ``hosts``: with as many slots as each may have ranks; empty: this machine."""

    np: int | None
    least: int | None
    most: int | None
    hosts: Sequence[Host]


def size_of(size: Size, nodes: str | None, per_node: str | None, *, discovered: bool = False) -> Size:
    """``size`` as ``nodes`` (N, or MIN:MAX for an elastic job) and ``per_node`` (N, ``auto``, ``cpu``, ``gpu``) have it.

    ``discovered``: a script says which hosts there are. Raises :class:`CollectiveError` for what contradicts itself or cannot be meant.
    """
    if nodes is None and per_node is None:
        return size
    fewest, most = _nodes(nodes) if nodes is not None else (0, 0)
    each = _per_node(per_node, alone=not size.hosts and not discovered) if per_node is not None else None
    if fewest != most:
        return _elastic(size, fewest, most, each, discovered)
    if fewest and (discovered or size.least is not None or size.most is not None):
        raise CollectiveError(f"--nnodes {nodes} is a fixed number of hosts; for a job whose ranks come and go write MIN:MAX", "invalid")
    if size.np is not None and fewest:
        if size.np % fewest or (each is not None and size.np != fewest * each):
            asked = f"--nnodes {fewest}" + (f" and --nproc-per-node {each}" if each else "")
            raise CollectiveError(f"-np {size.np} contradicts {asked}: {_product(fewest, each)}", "invalid")
        each = size.np // fewest
    elif size.np is not None and each and size.np % each and size.least is None and size.most is None:
        raise CollectiveError(f"-np {size.np} contradicts --nproc-per-node {each}: {_product(None, each)}", "invalid")
    hosts = _with_slots(size.hosts or [Host("localhost", each or 1)], each) if not discovered else size.hosts
    if fewest > len(hosts):
        raise CollectiveError(_too_few(str(fewest), len(hosts)), "invalid")
    hosts = hosts[: fewest or None]
    np = len(hosts) * each if size.np is None and each and size.least is None and not discovered else size.np
    return size._replace(np=np, hosts=hosts)


def _elastic(size: Size, fewest: int, most: int, each: int | None, discovered: bool) -> Size:
    if size.least is not None or size.most is not None:
        raise CollectiveError(f"--nnodes {fewest}:{most} and --min-np or --max-np say the same thing: give one of them", "invalid")
    if each is None:
        raise CollectiveError(f"--nnodes {fewest}:{most} needs a number of ranks for each host: --nproc-per-node N", "invalid")
    hosts = size.hosts if size.hosts or discovered else [Host("localhost", each)]
    if fewest > len(hosts) and not discovered:
        raise CollectiveError(_too_few(f"{fewest}:{most}", len(hosts)), "invalid")
    return Size(size.np, fewest * each, most * each, _with_slots(hosts, each))


def _too_few(nodes: str, there: int) -> str:
    return f"--nnodes {nodes}, and there is {there}: name the hosts of the job, -H a,b"


def _product(nodes: int | None, each: int | None) -> str:
    if nodes is None:
        return f"it is no multiple of {each}"
    return f"these are {nodes * each} ranks" if each else "they cannot be divided equally"


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < fewest <= most:
        raise CollectiveError(f"--nnodes {text}: write N, or MIN:MAX for an elastic job, with 1 <= MIN <= MAX", "invalid")
    return fewest, most


def _per_node(text: str, alone: bool) -> int | None:
    """Ranks of each host; None: by its slots. ``alone``: there is this machine only, whose GPUs and cores can be counted."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text not in ("auto", "cpu", "gpu"):
        raise CollectiveError(f"--nproc-per-node {text}: write a positive number, auto, cpu or gpu", "invalid")
    if not alone and text == "auto":
        return None
    if not alone:
        raise CollectiveError(f"--nproc-per-node {text}: say the number, or leave it out for one rank per slot of the hosts", "invalid")
    gpus = this_host.gpus()
    if text == "gpu" and not gpus:
        raise CollectiveError("--nproc-per-node gpu: this machine has no NVIDIA GPU that may be used", "invalid")
    return gpus if text == "gpu" or (text == "auto" and gpus) else cores.share(1)


def _with_slots(hosts: Sequence[Host], each: int | None) -> list[Host]:
    if each is None:
        return list(hosts)
    for host in hosts:
        if 1 < host.slots < each:  # one slot is what a host has where nobody says it
            text = f"{each} ranks do not fit into the {host.slots} slots of host {host.name}"
            raise CollectiveError(text, "invalid")
    return [host._replace(slots=each) for host in hosts]
