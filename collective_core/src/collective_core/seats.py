"""Where a rank sits among the others, in the variables by which programs know it from Horovod's launchers. Pure."""

from __future__ import annotations

from typing import Sequence

HOSTNAME, LOCAL_SIZE = "HOROVOD_HOSTNAME", "HOROVOD_LOCAL_SIZE"
#: In the order of :func:`variables`. Source: Horovod 0.28, horovod/runner/gloo_run.py.
NAMES = (
    HOSTNAME,
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", LOCAL_SIZE),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)


def variables(rank: int, hosts: Sequence[str]) -> dict[str, str]:
    """``hosts``: every rank's, as the launcher calls it. Cross: among the ranks that have the same number on their hosts."""
    local = hosts[:rank].count(hosts[rank])
    same = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local]
    values = (hosts[rank], rank, len(hosts), local, hosts.count(hosts[rank]), same.index(hosts[rank]), len(same))
    return {name: str(value) for name, value in zip(NAMES, values)}
