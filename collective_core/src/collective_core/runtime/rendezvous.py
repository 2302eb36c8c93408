"""Rendezvous of the ranks: who is there, where, and the job's secret.

Whatever launcher started them (launchers.py), this is the same. Only bytes and JSON travel: nothing that a peer sends is
unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import time
from typing import Any, Sequence

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import external
from collective_core.runtime.config import SEMANTICS, SERVERS, Config
from collective_core.runtime.network import choose_address, choose_rails, interfaces_of

NONCE_BYTES = 32
#: Ranks whose reasons for not connecting one error tells.
MAX_REASONS = 3
#: Packages here for one framework each, of which a program imports one; Keras's imports that of its backend.
FRAMEWORKS = ("jax", "tensorflow", "torch")


def host_identity(override: str | None = None) -> str:
    """A text that two processes share exactly when they can share memory through an abstract unix socket.

    Such sockets belong to a network namespace, so two containers of one machine count as two hosts unless they share it.
    """
    if override:
        return "override:" + override
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:
        parts.append("unknown")
    return "/".join(parts)


def meet(
    launcher: Any, config: Config, process_set: int = 0, members: Sequence[int] | None = None, numbers: Sequence[int] | None = None
) -> list[_native.PeerInfo]:
    """Tells the ranks about each other and connects those of the process set. Returns the table of its peers, in order.

    ``members``: the launcher's ranks that are in it; all without. ``numbers``: of all the launcher's ranks in the job, where it is not
    that of the job.

    Two rounds: who is on which host with which interfaces, from which each rank chooses an address and opens its listeners;
    then the addresses and a nonce, which rank 0 draws afresh for every job and process set, for their secret. Where the launcher
    hears of deaths, a third one: whether all could connect. So a rank that died meanwhile, or cannot be reached, is named by those
    too that did not need it, and who waited for it in vain is not blamed for going away.
    """
    identity = host_identity(config.host_id)
    mine: dict[str, Any] = {
        "host_id": identity,
        "host_name": socket.gethostname(),
        "pid": os.getpid(),
        "interfaces": _native.interfaces(),
        "settings": {
            "COLLECTIVE_BACKEND": config.backend,
            SEMANTICS: config.semantics,
            "COLLECTIVE_NCCL": config.nccl,
            "COLLECTIVE_SUM_ORDER": config.sum_order,
            "COLLECTIVE_RAILS": ",".join(config.rails),
            SERVERS: str(config.servers),
        },
        "sockets": config.sockets,
        "frameworks": [name for name in FRAMEWORKS if f"collective_core.{name}" in sys.modules],
    }
    everyone = exchange_first(launcher, "init()", mine)
    _refuse_different_settings(everyone)
    _refuse_different_frameworks(everyone)
    if process_set == 0 and 0 < launcher.size <= config.servers:
        text = f"{SERVERS}={config.servers} of {launcher.size} ranks are parameter servers: none is left to train; start more ranks"
        raise CollectiveError(text, "invalid")
    ranks = list(range(launcher.size)) if members is None else members
    included = launcher.rank in ranks
    first_of_host: dict[str, dict[str, Any]] = {}
    for info in (everyone[rank] for rank in ranks):
        first_of_host.setdefault(info["host_id"], info)
    address, rails = None, ""
    error = ""
    port, socket_name = 0, ""
    try:
        if process_set == 0:
            external.choose(config.backend, launcher)
        if included and len(first_of_host) > 1:
            others = [interfaces_of(info["interfaces"]) for host, info in first_of_host.items() if host != identity]
            own = interfaces_of(mine["interfaces"])
            address = choose_address(own, others, config.address, config.networks)
            rails = "".join(f",{rail}" for rail in choose_rails(own, address, config.rails))
        if included:
            port, socket_name = _native.open_listeners(address, rails)
    except CollectiveError as problem:
        error = str(problem)

    nonce = secrets.token_bytes(NONCE_BYTES).hex() if launcher.rank == 0 else ""
    try:
        endpoints = exchange_documents(
            launcher, {"address": address or "", "rails": rails, "port": port, "socket": socket_name, "nonce": nonce, "error": error}
        )
        _raise_first_error(endpoints, everyone)
        peers = [
            _native.PeerInfo(
                numbers[rank] if numbers else rank,
                *(everyone[rank][fact] for fact in ("pid", "host_id", "host_name")),
                *(endpoints[rank][fact] for fact in ("address", "port", "socket", "rails")),
            )
            for rank in ranks
        ]
        if included:
            external.join(process_set, [numbers[rank] for rank in ranks] if numbers else ranks)
            secret = session_secret(launcher.secret, bytes.fromhex(endpoints[0]["nonce"]), process_set)
            sockets = everyone[ranks[0]]["sockets"] * (1 + len(config.rails))  # which all have to agree on
            began = time.monotonic()
            failure = _connect(ranks.index(launcher.rank), peers, secret, config, process_set, sockets)
            if launcher.hears_of_deaths:
                failure = _compare_outcomes(launcher, everyone, failure, time.monotonic() - began)
            if failure:
                raise failure
    except BaseException:
        _native.close(process_set)  # whoever is not in the job does not listen
        raise
    return peers


def _connect(
    rank: int, peers: list[_native.PeerInfo], secret: bytes, config: Config, process_set: int, sockets: int
) -> CollectiveError | None:
    """Why this rank could not connect to the others, if so: it has yet to tell them. Ranks in it are numbers in the job."""
    try:
        how = config.timeout, config.start_timeout, process_set, config.stall_warning, sockets, config.single_copy
        _native.connect(rank, peers, secret, *how, _native.SEMANTICS[config.semantics], config.sum_order == "hosts")
    except CollectiveError as failure:
        return CollectiveError(str(failure), failure.kind, [peers[number].rank for number in failure.ranks])
    return None


def session_secret(job_secret: bytes, nonce: bytes, process_set: int) -> bytes:
    """What the ranks of a process set prove to each other. Never travels.

    Without a secret of the job (mpirun's network, one user's sockets on one host) whoever reads the nonce there knows it.
    """
    return hmac.new(job_secret, b"session" + nonce + str(process_set).encode(), hashlib.sha256).digest()


def exchange_documents(launcher: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' JSON documents, by rank."""
    return [json.loads(text.decode()) for text in launcher.exchange(json.dumps(mine).encode())]


def exchange_first(launcher: Any, call: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """:func:`exchange_documents` where the ranks may have come by different ``call``: raises the same on all of them, if so."""
    everyone = exchange_documents(launcher, {"call": call, **mine})
    differing, fewest = _compare([info["call"] for info in everyone])
    if differing:
        raise CollectiveError(f"the ranks do not call the same to join the job: {differing}", "invalid", fewest)
    return everyone


def _compare(values: Sequence[str | None]) -> tuple[str, list[int]]:
    """Which value is on which ranks, and the ranks of the rarest one; nothing where all ranks that have a value have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) < 2:
        return "", []
    text = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items())
    return text, min(ranks_of.values(), key=len)


def _refuse_different_settings(everyone: list[dict[str, Any]]) -> None:
    """Raises the same on all ranks, when a setting that must be the same is set on some of them only."""
    for name in everyone[0]["settings"]:
        differing, fewest = _compare([info["settings"][name] for info in everyone])
        if differing:
            text = f"{name} must be the same on all ranks, and is {differing}: set it on all hosts or on none"
            if name == SEMANTICS:
                text += " (the package horovod sets it: import that on all ranks or on none)"
            raise CollectiveError(text, "invalid", fewest)


def _refuse_different_frameworks(everyone: list[dict[str, Any]]) -> None:
    """Raises the same on all ranks, when those that use a framework have none in common: each gives operations names of its own."""
    used = [set(info["frameworks"]) for info in everyone if info["frameworks"]]
    if not used or set.intersection(*used):
        return
    names = [[f"collective_core.{name}" for name in info["frameworks"]] for info in everyone]
    differing, fewest = _compare([" and ".join(of_rank) or None for of_rank in names])
    text = (
        f"the ranks use different frameworks: {differing}. Import the same on all ranks, or collective_core alone, which has NumPy arrays"
    )
    raise CollectiveError(text, "invalid", fewest)


def _raise_first_error(endpoints: list[dict[str, Any]], everyone: list[dict[str, Any]]) -> None:
    """A rank that cannot start says so to all: nobody waits for it in vain."""
    failed = [(rank, endpoint["error"]) for rank, endpoint in enumerate(endpoints) if endpoint["error"]]
    if failed:
        rank, text = failed[0]
        who = f"rank {rank} (host {everyone[rank]['host_name']}, pid {everyone[rank]['pid']})"
        raise CollectiveError(f"{who} cannot start: {text}", "invalid", [number for number, _ in failed])


def _compare_outcomes(launcher: Any, everyone: list[dict[str, Any]], own: CollectiveError | None, spent: float) -> CollectiveError | None:
    """Why the ranks are not all connected, if so. ``spent``: seconds that this rank has tried."""
    mine = {"error": str(own), "kind": own.kind, "ranks": own.ranks} if own else {"error": ""}
    try:
        outcomes = [json.loads(text.decode()) for text in launcher.exchange(json.dumps(mine).encode(), spent)]
    except CollectiveError as error:
        if own is None:
            raise
        # Whoever is gone is to blame, not whom this rank has waited for, who may have waited for that one.
        raise CollectiveError(f"{error}; rank {launcher.rank}: {own}", error.kind, error.ranks) from own
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome["error"]]
    if own or not failed:
        return own
    reasons = [f"rank {rank} (host {everyone[rank]['host_name']}) could not connect: {outcome['error']}" for rank, outcome in failed]
    first = failed[0][1]
    return CollectiveError("; ".join(reasons[:MAX_REASONS]), first["kind"], first["ranks"])
