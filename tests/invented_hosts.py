"""Facts of invented hosts, and plans for them, for tests of the resolver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from provision.base.problems import Problem
from provision.catalog import OURS
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements, resolve
from provision.survey import Facts

REQUIREMENTS = Requirements(engine_version="0.1.0", engine_sha256="0" * 64)

FROM_SOURCE = Requirements(nccl_source="source")

TOOLKITS = {
    "toolkits": [
        {"path": "/home/me/cuda", "version": "11.8", "nvcc": True, "found": "CUDA_HOME names it"},
        {"path": "/usr/local/cuda", "version": "13.0.1", "nvcc": True, "found": "it is in a usual place"},
        {"path": "/usr/local/cuda-12.4", "version": "12.4.1", "nvcc": True, "found": "it is in a usual place"},
        {"path": "/opt/cuda", "version": "12.4", "nvcc": True, "found": "it is in a usual place"},
    ],
    "nvcc": None,
}

#: Faults of hosts that tests of certify plant → what it calls them.
FAULTS = {
    "slow": "slow-network",
    "loss": "packet-loss",
    "mtu": "mtu-differs",
    "port-mtu": "path-mtu",
    "core": "slow-core",
    "flips": "wrong-sums",
}


def host(
    address: str = "10.0.0.1",
    *,
    system: tuple[str, str] = ("debian", "12"),
    arch: str = "x86_64",
    python: str = "3.11.2",
    cuda: str | None = None,
    gpus: int = 0,
    interfaces: list[dict[str, Any]] | None = None,
    **more: Any,
) -> Facts:
    given_facts = {
        "hostname": "h",
        "os": {"id": system[0], "version": system[1]},
        "arch": arch,
        "driver": {"version": OURS.cuda().toolkits.of.get(cuda, "535.104.05"), "cuda": cuda} if cuda else None,
        "gpus": [{"name": "A100", "compute_capability": "8.0"}] * gpus,
        "python": {"version": python, "executable": "/usr/bin/python3"},
        "network": {
            "interfaces": interfaces if interfaces is not None else [{"name": "eth0", "addresses": [f"{address}/24"], "up": True}],
            "default_route_interface": "eth0",
        },
        **more,
    }
    return Facts.model_validate(given_facts)


def stated(sections: Mapping[str, Any]) -> Facts:
    """Facts of a Debian 12 host with these sections."""
    return Facts.model_validate({"os": {"id": "debian", "version": "12"}, "arch": "x86_64", **sections})


def changed(known: Facts, sections: Mapping[str, Any] | None = None, **more: Any) -> Facts:
    """The same facts with some sections replaced by plain data."""
    return Facts.model_validate({**known.model_dump(), **(sections or {}), **more})


def gpu(cuda: str, capability: str = "8.0", address: str = "10.0.0.1", **more: Any) -> Facts:
    return changed(host(address, system=("ubuntu", "22.04"), cuda=cuda, **more), gpus=[{"compute_capability": capability}])


def toolkit(version: str | None, *, nvcc: bool = True) -> dict[str, Any]:
    """The survey's facts about CUDA toolkits: the one of this version, or none."""
    return {"toolkits": [{"path": "/usr/local/cuda", "version": version, "nvcc": nvcc}] if version else [], "nvcc": None}


def equipped(found: dict[str, Any] | None, cuda: str, *where: str, **more: Any) -> Facts:
    """A host with a GPU whose facts say this of CUDA toolkits, or nothing."""
    known = gpu(cuda, *where, **more)
    if found is None:
        return known
    return changed(known, cuda=found, missing=[part for part in known.missing if part != "cuda"])


def plan_for(hosts: dict[str, Facts], requirements: Requirements = REQUIREMENTS, **asked: HostRequirements) -> Any:
    return resolve(hosts, requirements, asked)


def remedies(problem: Problem) -> tuple[str, ...]:
    """Its remedies as sentences."""
    return tuple(remedy.text for remedy in problem.remedies)
