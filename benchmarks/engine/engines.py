"""The sides of the benchmark: each sums a float32 array over all ranks, in place, called from Python."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any, Callable

import numpy as np
from collective_core.runtime import membership

import collective_core as cc
from collective_core import _native

from .measure import Step

Array = Any  # a NumPy array of float32


class Ours:
    """The engine, on arrays of NumPy's own memory."""

    name, memory, call = "collective_core", "ordinary", "cc.allreduce"

    def array(self, elements: int) -> Array:
        return np.empty(elements, dtype=np.float32)

    def step(self, array: Array) -> Step:
        return lambda: cc.allreduce(array, op=cc.Sum, out=array)


class OursInArena(Ours):
    """The engine, on arrays of its own memory."""

    memory = "arena"

    def array(self, elements: int) -> Array:
        return cc.empty(elements, np.float32)


class OursInTorch(Ours):
    """The engine as programs call it, on torch tensors. Raises ImportError without PyTorch."""

    call = "hvd.allreduce_"

    def __init__(self) -> None:
        import torch  # noqa: F401

    def step(self, array: Array) -> Step:
        import collective_core.torch as hvd
        import torch

        tensor = torch.from_numpy(array)
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum)


class OursAdopted(OursInTorch):
    """As :class:`OursInTorch`, on a tensor that has moved (COLLECTIVE_ADOPT_TENSORS). Raises RuntimeError where PyTorch cannot do that."""

    memory = "adopted"

    def __init__(self) -> None:
        import torch

        if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
            raise RuntimeError("needs PyTorch 2.13 or newer")

    def array(self, elements: int) -> Array:
        import collective_core.torch as hvd
        import torch

        self._tensor = torch.zeros(elements)
        for _ in range(2):
            hvd.allreduce_(self._tensor, op=hvd.Sum)
        array: Array = self._tensor.numpy()
        return array

    def step(self, array: Array) -> Step:  # noqa: ARG002 - the array is the tensor's
        import collective_core.torch as hvd

        tensor = self._tensor
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum)


class OpenMpi:
    """MPI_Allreduce through mpi4py."""

    name, memory, call = "mpi", "ordinary", "Allreduce"

    def __init__(self) -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() != cc.size():
            raise RuntimeError("the ranks were not started by mpirun")
        self._communicator, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE

    def array(self, elements: int) -> Array:
        return np.empty(elements, dtype=np.float32)

    def step(self, array: Array) -> Step:
        allreduce, in_place = self._communicator.Allreduce, self._in_place
        return lambda: allreduce(in_place, array)


class Gloo:
    """all_reduce of torch.distributed over Gloo."""

    name, memory, call = "gloo", "ordinary", "all_reduce"

    def __init__(self) -> None:
        start_gloo()

    def array(self, elements: int) -> Array:
        return np.empty(elements, dtype=np.float32)

    def step(self, array: Array) -> Step:
        import torch

        tensor, all_reduce = torch.from_numpy(array), torch.distributed.all_reduce
        return lambda: all_reduce(tensor)


def start_gloo() -> None:
    """Starts torch.distributed over Gloo on the ranks of this job, on the engine's network. Raises ImportError without PyTorch."""
    import torch.distributed

    if torch.distributed.is_initialized():
        return
    member = membership.current()
    address = member.peers[member.rank].address
    for name, own, _ in _native.interfaces():
        if address and ipaddress.ip_address(own) == ipaddress.ip_address(address):
            os.environ["GLOO_SOCKET_IFNAME"] = name
    port = np.zeros(1, dtype=np.int64)
    if member.rank == 0:
        with socket.create_server((address or "127.0.0.1", 0)) as probe:
            port[0] = probe.getsockname()[1]
    port = cc.broadcast(port, 0)
    place = member.peers[0].address or "127.0.0.1"
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{place}:{port[0]}", rank=member.rank, world_size=member.size)


#: The engine's own sides, of which one needs PyTorch, then the peers by the names that --peers knows.
OWN: tuple[Callable[[], Any], ...] = (OursInArena, Ours)
IN_TORCH = {OursInTorch.call: OursInTorch, f"{OursAdopted.call}, adopted": OursAdopted}
PEERS: dict[str, Callable[[], Any]] = {"mpi": OpenMpi, "gloo": Gloo}


def assemble(peers: tuple[str, ...]) -> tuple[list[Any], dict[str, str]]:
    """The sides that can run here, and for each missing one the reason."""
    sides: list[Any] = [own() for own in OWN]
    missing: dict[str, str] = {}
    others: dict[str, Callable[[], Any]] = {**IN_TORCH, **{peer: PEERS[peer] for peer in peers}}
    for name, make in others.items():
        try:
            sides.append(make())
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error)
    return sides, missing
