"""``horovod.run``: its names, their order and their meaning, over :class:`Runner`."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, Callable, Mapping, Sequence, Union

from collective_core.errors import CollectiveError
from collective_core.launch.hosts import Hosts, ask, with_slots
from collective_core.launch.remote import SSH
from collective_core.launch.runner import Runner

Given = Union[Hosts, Callable[[], Hosts]]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: Given = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,  # noqa: ARG001 - nothing is kept from one start to the next
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    elastic_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``func`` on ``num_proc`` ranks (by default ``min_num_proc``, else one) and returns what each returned, by rank.

    The arguments are those of ``horovod.run`` (0.28.1), where ``np``, ``min_np`` and ``max_np`` are the older names, which win; ``hosts``
    may also be what :class:`Runner` takes. With ``min_num_proc`` or ``host_discovery_script``, which counts more than ``hosts``, the job
    is elastic; with ``min_num_proc`` the results are those of the first so many ranks. ``executable``: the interpreter on all hosts. Those
    without a meaning here (``use_mpi``, ``mpi_args``) are warned of. ``elastic_timeout``, ``env``: as of :class:`Runner`.

    Raises :class:`CollectiveError` for what cannot be meant, and what :meth:`Runner.run` raises.
    """
    if hosts is not None and hostfile is not None:
        raise CollectiveError("hosts and hostfile say the same thing: give one of them", "invalid")
    if use_gloo and use_mpi:
        raise CollectiveError("use_gloo and use_mpi exclude each other", "invalid")
    if hostfile is not None and not os.path.isfile(hostfile):
        raise CollectiveError(f"hostfile={hostfile!r}: there is no such file", "invalid")
    fewest, most = min_np or min_num_proc, max_np or max_num_proc
    wanted = np or num_proc or fewest or 1
    script = host_discovery_script
    elastic = script is not None or fewest is not None
    for name, value in {"use_mpi": use_mpi, "mpi_args": mpi_args}.items():
        if value:
            warnings.warn(f"{name} has no effect: ranks are started over ssh, without MPI", stacklevel=2)
    environment = dict(env or {})
    interfaces = network_interfaces or network_interface
    if interfaces:
        environment["COLLECTIVE_NETWORK"] = interfaces if isinstance(interfaces, str) else ",".join(interfaces)
    ssh = [*SSH, *(["-p", str(ssh_port)] if ssh_port else []), *(["-i", ssh_identity_file] if ssh_identity_file else [])]
    runner = Runner(
        wanted,
        (lambda: {host.name: host.slots for host in ask(script, slots)}) if script is not None else hostfile or with_slots(hosts, slots),
        environment,
        executable or sys.executable,
        ssh=ssh,
        start_timeout=start_timeout,
        min_np=(fewest or wanted) if elastic else None,
        max_np=most if elastic else None,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        elastic_timeout=elastic_timeout,
        output_filename=output_filename,
        verbose=bool(verbose),
    )
    return runner.run(func, *args, **dict(kwargs or {}))[:fewest]
