"""Ranks on a Ray cluster: one actor per rank, in a placement group that Ray gives as a whole or not at all.

Each actor starts its rank as a process of its own (processes.py) and hands on what happens to it as frames, so that output appears as
it comes. When an actor is gone, so is its rank. The function and the job's secret travel as Ray's own do: encrypted where Ray is told to
(RAY_USE_TLS).
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from typing import Any, Mapping

from collective_core.errors import CollectiveError
from collective_core.launch import frames
from collective_core.launch.frames import Frame
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.outcomes import LOST, Outcomes, show
from collective_core.launch.processes import Processes, rank_settings
from collective_core.runtime import horovod_variables, network, torch_variables

#: What a rank gets if nobody says more.
ONE_PROCESSOR = {"CPU": 1.0}
#: Frames that an actor hands over at once, and seconds after which it answers though there is none.
MAX_FRAMES, INTERVAL = 256, 1.0
#: Seconds that the others get to say what they know when a rank has failed, or to end when all functions have returned.
GRACE, LEAVING = 1.5, 15.0
#: Seconds that actors get to end their ranks.
PATIENCE = 6.0


class RankActor:
    """The actor: starts one rank and follows it."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._processes: Processes | None = None

    def meet(self) -> dict[str, Any]:
        """What the controller must know of this actor's node."""
        import ray

        address, node, ports = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), network.free_ports(2)
        return {"address": address, "port": ports[0], "master_port": ports[1], "node": node}

    def start(self, rank: int, variables: Mapping[str, str], call: bytes, environment: Mapping[str, str], address: str) -> None:
        """Starts the rank; its search path for modules is the worker's, which has what the user gave to Ray."""
        settings = rank_settings(variables, sys.path, int(variables[horovod_variables.LOCAL_SIZE]), address)
        self._processes = Processes({rank: settings}, call, self._mailbox, environment)

    def follow(self) -> list[Any]:
        """What has happened since the last call, after a moment at most."""
        found: list[Any] = []
        frame = self._mailbox.get(timeout=INTERVAL)
        while frame is not None:
            found.append((frame.kind, frame.rank, bytes(frame.body)))
            frame = self._mailbox.get(timeout=0) if len(found) < MAX_FRAMES else None
        return found

    def end(self) -> None:
        """Ends the rank and all that it has started."""
        self._mailbox.close()
        if self._processes is not None:
            self._processes.ask_to_end()
            self._processes.wait(time.monotonic() + PATIENCE / 2)
            self._processes.kill()


def run(resources: Any, np: int | None, call: bytes, environment: Mapping[str, str], start_timeout: float, prefix: bool) -> list[Any]:
    """Runs a packed call on ``np`` ranks (default: as many as the cluster has room for).

    ``resources``: what each rank gets, e.g. ``{"CPU": 1, "GPU": 1}``, or True for one processor. Raises :class:`RankFailedError` for the
    rank that failed first, and :class:`CollectiveError` when Ray is not there, or has no room.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not ray.is_initialized():
        raise CollectiveError("Ray is not started in this process: call ray.init() first", "invalid")
    each = {name: float(number) for name, number in resources.items()} if isinstance(resources, Mapping) else ONE_PROCESSOR
    size = np or _room(ray.cluster_resources(), each)
    group = placement_group([dict(each)] * size, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(start_timeout):
            text = f"Ray has no room for {size} ranks with {_said(each)} each: it has {_said(ray.available_resources(), each)} free"
            raise CollectiveError(text, "invalid")
        actors = _actors(ray, group, each, size)
        return _follow(ray, actors, call, environment, start_timeout, prefix)
    finally:
        _end(ray, actors)
        remove_placement_group(group)


def _room(there: Mapping[str, float], each: Mapping[str, float]) -> int:
    """How many ranks fit into what the cluster has in all."""
    return max(1, int(min(there.get(name, 0.0) // number for name, number in each.items() if number)))


def _said(resources: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names or resources)


def _actors(ray: Any, group: Any, each: Mapping[str, float], size: int) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others = {name: number for name, number in each.items() if name not in ("CPU", "GPU")}
    actor = ray.remote(RankActor)
    options = {"num_cpus": each.get("CPU", 0), "num_gpus": each.get("GPU", 0), "resources": others, "max_restarts": 0}
    # follow and end at the same time.
    return [
        actor.options(
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            **options,
        ).remote()
        for number in range(size)
    ]


def _follow(ray: Any, actors: list[Any], call: bytes, environment: Mapping[str, str], start_timeout: float, prefix: bool) -> list[Any]:
    try:
        met = ray.get([actor.meet.remote() for actor in actors], timeout=start_timeout)
    except ray.exceptions.RayError as error:
        raise CollectiveError(f"Ray did not start its workers: {_first_line(error)}", "peer_lost") from error
    nodes = list(dict.fromkeys(one["node"] for one in met))
    # Ranks of one node stand together.
    by_rank = [number for node in nodes for number, one in enumerate(met) if one["node"] == node]
    hosts = [met[number]["node"] for number in by_rank]
    first = met[by_rank[0]]
    meeting = {
        "COLLECTIVE_SIZE": str(len(actors)),
        "COLLECTIVE_STORE": f"{first['address']}:{first['port']}",
        "COLLECTIVE_SECRET": secrets.token_hex(32),
        "COLLECTIVE_START_TIMEOUT": str(start_timeout),
    }
    outcomes = Outcomes({rank: met[number]["address"] for rank, number in enumerate(by_rank)})
    shared = ray.put(call)
    asked: dict[Any, int] = {}
    for rank, number in enumerate(by_rank):
        address = str(met[number]["address"])
        ours = {horovod_variables.HOSTNAME: address, "COLLECTIVE_RANK": str(rank)}
        of_torch = torch_variables.rank_variables(rank, hosts, (str(first["address"]), int(first["master_port"])), environment)
        variables = {**meeting, **horovod_variables.rank_variables(rank, hosts), **of_torch, **ours}
        started = actors[number].start.remote(rank, variables, shared, dict(environment), address if len(nodes) > 1 else "")
        asked[started] = rank
    end: float | None = None
    while not outcomes.complete and (end is None or time.monotonic() < end):
        ready, _ = ray.wait(list(asked), timeout=INTERVAL)
        for answer in ready:
            rank = asked.pop(answer)
            for frame in _answer(ray, answer, rank):
                if frame.kind in ("out", "err"):
                    show(frame, prefix)
                outcomes.note(frame)
            if not outcomes.has_ended(rank):
                asked[actors[by_rank[rank]].follow.remote()] = rank
        if end is None and (outcomes.failed or outcomes.returned):
            end = time.monotonic() + (GRACE if outcomes.failed else LEAVING)
    return outcomes.results()


def _answer(ray: Any, answer: Any, rank: int) -> list[Frame]:
    """The frames in an actor's answer; that it is lost, when it does not answer any more."""
    try:
        return [Frame(kind, number, body) for kind, number, body in ray.get(answer) or ()]
    except ray.exceptions.RayError as error:
        return [Frame("lost", rank, _first_line(error).encode()), frames.exit_of(rank, LOST)]


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0]


def _end(ray: Any, actors: list[Any]) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=PATIENCE) if actors else None
    for actor in actors:
        ray.kill(actor)
