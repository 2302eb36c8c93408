"""Composes the command line of Open MPI's mpirun, and its hostfile. Pure: it starts nothing and knows no host but those it is given.

Every option was checked against Open MPI 4.1.8 (the wheel of the Python package index), across two hosts; 4.0 and 4.1 of the
distributions take the same ones. No value of an environment variable ever stands on the command line, which every user of a host can read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from provision.base.errors import UsageError

# Point-to-point layer and transports by name. Left to choose for itself, Open MPI also opens UCX and libfabric, which pick networks
# by their own rules and complain on hosts without fast fabrics; the engine needs MPI for its rendezvous only.
_TRANSPORTS = (("pml", "ob1"), ("btl", "self,vader,tcp"))

_BINDING = ("--map-by", "slot", "--bind-to", "none")

#: Before what a rank wrote: ``[job,rank]<stream>:``. mpirun puts it wherever a write ended, in the middle of a line too.
TAG = re.compile(r"\[\d+,(?P<rank>\d+)\]<(?P<stream>\w+)>:")


def hostfile_text(hosts: Sequence[tuple[str, int]]) -> str:
    """Open MPI's hostfile: a line ``ADDRESS slots=N`` per host, in the order in which ranks are given out."""
    seen: set[str] = set()
    for address, slots in hosts:
        if not address or any(character.isspace() or character in "#=," for character in address):
            raise UsageError(f"{address!r} is not an address that a hostfile can hold")
        if slots < 1:
            raise UsageError(f"{address} has {slots} slots; a host that takes part needs at least one")
        if address in seen:
            raise UsageError(f"{address} is listed twice; give each host once, with all its slots")
        seen.add(address)
    return "".join(f"{address} slots={slots}\n" for address, slots in hosts)


def command(
    *,
    mpirun: str,
    prefix: str,
    hosts: Sequence[tuple[str, int]],
    hostfile: str,
    np: int,
    networks: Sequence[str],
    ssh_config: str,
    environment: Mapping[str, str],
    program: Sequence[str],
    as_root: bool,
    oversubscribe: bool,
    workdir: str = "",
    tag_output: bool = True,
    binding: Sequence[str] = (),
    more: Sequence[str] = (),
) -> list[str]:
    """The argv that starts ``program`` as ``np`` ranks.

    Args:
        mpirun: path of mpirun on the first host.
        prefix: where Open MPI is on every host; empty for a distribution's, which is on PATH.
        hosts: (address, slots) as in the hostfile.
        hostfile: path on the first host of a file with :func:`hostfile_text`.
        np: number of ranks.
        networks: CIDRs over which the hosts reach each other; empty leaves the choice to Open MPI (one host needs none).
        ssh_config: path, on the first host, of the ssh configuration with keys and known hosts; empty for the user's own.
        environment: what the ranks get besides the login's environment. Only the names appear here: the caller sets the
            values in mpirun's own environment, and mpirun sends them to the other hosts through its own connection.
        program: the program and its arguments.
        as_root: whether mpirun runs as root, which it refuses unless told.
        oversubscribe: allow more ranks than slots.
        workdir: where the ranks run, on every host; empty leaves it to mpirun.
        tag_output: begin each line with ``[job,rank]<stream>:``.
        binding: where ranks go and are bound, in mpirun's words; empty fills slot by slot and binds nothing.
        more: words for mpirun that follow ours.

    Raises:
        UsageError: ``np`` does not fit the hosts, or a path or name cannot be passed on.
    """
    slots = sum(count for _, count in hosts)
    if np < 1:
        raise UsageError(f"{np} ranks cannot be started; give at least one")
    if np > slots and not oversubscribe:
        raise UsageError(
            f"{np} ranks, but the {len(hosts)} host(s) have {slots} slots", hint="lower --np, or raise `slots` in the inventory"
        )
    if any(character.isspace() for character in ssh_config):
        raise UsageError("mpirun cannot pass on an ssh configuration whose path holds a space", where=ssh_config)
    for name in environment:
        if not name.isidentifier() or not name.isascii():
            raise UsageError(f"{name!r} is not the name of an environment variable")

    parameters = [
        *_TRANSPORTS,
        # Copying straight between two processes' memory needs a right that default containers do not have; without it a message is lost.
        ("btl_vader_single_copy_mechanism", "none"),
        # host.rack1 and host.rack2 are two hosts.
        ("orte_keep_fqdn_hostnames", "1"),
        # The first host starts the daemons on all others itself: one key, one log, and a failure names the host that failed.
        ("plm_rsh_no_tree_spawn", "1"),
        ("plm_rsh_agent", "ssh"),
    ]
    if ssh_config:
        parameters.append(("plm_rsh_args", f"-F {ssh_config}"))
    if networks:
        # Both, always: one is for MPI's messages, the other for mpirun's own. One of them left alone is how jobs end up on docker0.
        parameters += [("btl_tcp_if_include", ",".join(networks)), ("oob_tcp_if_include", ",".join(networks))]
    if oversubscribe:
        parameters.append(("mpi_yield_when_idle", "1"))

    argv = [mpirun]
    if as_root:
        argv.append("--allow-run-as-root")
    if prefix:
        argv += ["--prefix", prefix]
    argv += ["--hostfile", hostfile, "-np", str(np), *(binding or _BINDING)]
    if oversubscribe:
        argv.append("--oversubscribe")
    if tag_output:
        argv.append("--tag-output")
    for name, value in parameters:
        argv += ["--mca", name, value]
    for name in sorted(environment):
        argv += ["-x", name]
    if workdir:
        argv += ["--wdir", workdir]
    return [*argv, *more, *program]


def _refuse_more_than_slots(hosts: Sequence[tuple[str, int]], np: int) -> None:
    slots = sum(count for _, count in hosts)
    if np > slots:
        raise UsageError(
            f"{np} ranks, but the {len(hosts)} host(s) have {slots} slots",
            hint="start fewer, give the hosts more slots (`slots` in the inventory, -H a:8), or allow it: --oversubscribe",
        )


def fill(hosts: Sequence[tuple[str, int]], np: int | None, *, oversubscribe: bool = False) -> list[tuple[str, int]]:
    """The hosts that ``np`` ranks (None: one per slot) need when each host's slots are filled before the next one's.

    Raises:
        UsageError: there are fewer slots, and not ``oversubscribe``.
    """
    slots = sum(count for _, count in hosts)
    left = slots if np is None else np
    if left > slots and oversubscribe:
        return spread(hosts, left, oversubscribe=True)
    _refuse_more_than_slots(hosts, left)
    placed = []
    for address, count in hosts:
        if left > 0:
            placed.append((address, min(count, left)))
            left -= count
    return placed


def spread(hosts: Sequence[tuple[str, int]], np: int, *, oversubscribe: bool = False) -> list[tuple[str, int]]:
    """``hosts`` with the slots that ``np`` ranks take when they are dealt out one by one, so that every host takes part.

    A host is given no more than its slots while another has a free one; what is left after that is dealt out over all of them.

    Raises:
        UsageError: fewer ranks than hosts, or more than slots and not ``oversubscribe``.
    """
    if not oversubscribe:
        _refuse_more_than_slots(hosts, np)
    if np < len(hosts):
        raise UsageError(
            f"{np} rank(s) cannot take part on all {len(hosts)} hosts", hint=f"give at least --np {len(hosts)}, or list fewer hosts"
        )
    taken = [0] * len(hosts)
    left = np
    while left:
        free = [at for at, (_, slots) in enumerate(hosts) if taken[at] < slots] or list(range(len(hosts)))
        for at in free[:left]:
            taken[at] += 1
        left -= min(left, len(free))
    return [(address, count) for (address, _), count in zip(hosts, taken, strict=True)]


def readable(line: str) -> str:
    """A line of a job with mpirun's tags (``[1,3]<stderr>:``) turned into ``rank 3: ``; rank 0's output, which tells the progress, bare."""
    return TAG.sub(lambda tag: "" if tag["rank"] == "0" and tag["stream"] == "stdout" else f"rank {tag['rank']}: ", line)
