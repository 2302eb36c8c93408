"""Fabrics that are there and not used: a job that falls back to TCP runs, at a tenth of the speed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from provision.base.problems import Problem
from provision.base.text import joined
from provision.catalog import Catalog
from provision.doctor.certify.model import Target
from provision.survey import Facts, hardware

_FABRICS = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA"}
_SOCKETS = ("NCCL_NET", ("Socket", "socket"))
_OFF = {"infiniband": ("NCCL_IB_DISABLE", ("1", "true", "yes")), "roce": ("NCCL_IB_DISABLE", ("1", "true", "yes"))}


def unused(facts: Mapping[str, Facts], targets: Mapping[str, Target], catalog: Catalog) -> Iterator[Problem]:
    """What keeps jobs from a fabric of these hosts. ``targets``: host → the interface that jobs use for TCP."""
    for kind, name in _FABRICS.items():
        with_it = [host for host, found in facts.items() if hardware.active_ports(found, kind, catalog)]
        without = [host for host in facts if host not in with_it]
        if len(with_it) > max(1, len(without)):
            for host in without:
                what = f"no port of {name} is active, where {len(with_it)} other hosts have one: with it every job falls back to TCP"
                yield Problem("error", what, "ibstat; check cable, port and subnet manager", id="fabric-down", host=host, where=host)
        reasons = defaultdict[tuple[str, str], list[str]](list)
        for host in with_it if len(facts) > 1 else ():
            for reason in _reasons(facts[host], kind, name, targets[host].interface):
                reasons[reason].append(host)
        for (why, hint), hosts in reasons.items():
            what = f"{joined(hosts)}: {name} is up and not used: {why}"
            yield Problem("error", what, hint, id="fabric-not-used", where="cluster")


def _reasons(found: Facts, kind: str, name: str, interface: str) -> Iterator[tuple[str, str]]:
    """(Why a host does not use it, what to do)."""
    for setting, values in filter(None, (_SOCKETS, _OFF.get(kind))):
        for where, settings in (("the login's environment", found.environment.variables), ("nccl.conf", found.signs.nccl_conf)):
            if settings.get(setting) in values:
                yield f"{setting}={settings[setting]} in {where} makes NCCL use TCP", f"remove {setting} from {where}"
    if kind == "efa" and found.gpus and not found.efa_plugin and "efa_plugin" not in found.missing:
        yield "NCCL has no plugin for it (libnccl-net of aws-ofi-nccl) and uses TCP", "provision doctor explain efa-plugin-missing"
    if kind == "infiniband" and not found.gpus:  # without NCCL all goes over TCP, which InfiniBand carries as IPoIB
        over = next((each for each in found.network.interfaces if each.kind == "infiniband" and each.up and each.ipv4), None)
        if over is None:
            yield f"jobs use TCP over {interface}, because no interface of {name} has an IPv4 address", "give it one (IPoIB)"
        elif interface != over.name:
            yield f"jobs use TCP over {interface}", f"provision_interface={over.name} in the inventory"
