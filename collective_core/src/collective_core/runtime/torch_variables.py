"""The environment variables by which torch.distributed and the programs for it know a rank, as torchrun sets them. Pure.

Also those that name the interface between the hosts for the libraries under torch.distributed.
"""

from __future__ import annotations

from typing import Mapping, Sequence

MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
#: In the order of :func:`rank_variables`; a group is the ranks of a host.
#: Source: torch/distributed/elastic/agent/server/local_elastic_agent.py of PyTorch 2.13.
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *MASTER_VARIABLES,
)
#: What torchrun sets besides, for its own ranks alone.
OF_TORCHRUN = ("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
#: How often the ranks of this job have been started again. Programs for torchrun read it under this name.
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
#: Of Gloo, of TensorPipe (torch.distributed.rpc), and of NCCL, which takes a name without ``=`` for the beginning of one.
GLOO_INTERFACE, RPC_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def rank_variables(rank: int, hosts: Sequence[str], master: tuple[str, int], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """A rank's place among the others, and where they meet. ``hosts``: every rank's.

    ``master``: an address of rank 0's host at which all others reach it, and a port that is free there. ``given``: the user's variables
    for all ranks, of which an address or a port of theirs stays.
    """
    address, port = master
    groups = list(dict.fromkeys(hosts))
    local, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    values = (rank, len(hosts), local, local_size, groups.index(hosts[rank]), len(groups), address, port)
    found = {name: str(value) for name, value in zip(RANK_VARIABLES, values)}
    return {name: value for name, value in found.items() if not (given and name in MASTER_VARIABLES and name in given)}


def interface_variables(interface: str, chosen: bool) -> dict[str, str]:
    """``chosen``: somebody has chosen the network between the hosts, which then binds NCCL, too: it can use several interfaces."""
    found = {GLOO_INTERFACE: interface, RPC_INTERFACE: interface}
    return {**found, NCCL_INTERFACE: f"={interface}"} if chosen else found
