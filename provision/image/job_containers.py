"""A container of an image on every host, in the host's own network, with sshd for this run alone; all of it is gone afterwards.

Their keys are made here for the run and lie nowhere but in the containers. Only the first can log in to the others: the job starts there.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provision import catalog
from provision.base import signals
from provision.base.errors import ProvisionError
from provision.containers import ssh_keys
from provision.facts import Facts
from provision.facts.model import Installed
from provision.image import mesh, remote_engines
from provision.image.labels import Told
from provision.image.remote_engines import Engine
from provision.inventory import Inventory
from provision.plan.model import Plan
from provision.remote.session import Session
from provision.resolve import network
from provision.survey import installed

START_S = 120.0
_MARK = "===PROVISION-CONTAINER==="
_PORTS = range(20000, 32768)  # below what Linux hands out to outgoing connections
_TRIES = 20
_LOCKED = ("--ulimit", "memlock=-1:-1")  # an engine without the right to raise limits refuses it
_LEAST_MEMORY = 1 << 30  # /dev/shm: Docker's 64 MiB are too few for PyTorch's loaders

# sshd itself finds out whether a port is free: what it cannot have ends it, and the next one is tried.
_SERVE = """for port; do
    echo "$port" > ~/.provision-sshd/port
    /usr/sbin/sshd -D -e -f /etc/provision/sshd_config -p "$port" -o ListenAddress="$address"
done
"""
_READY = """n=0
until [ -s ~/.provision-sshd/sshd.pid ]; do n=$((n + 1)); [ $n -lt 600 ] || exit 1; sleep 0.1; done
cat ~/.provision-sshd/port "$1/manifest.json"
"""


def name(session: Session) -> str:
    """Of the run's container on each host."""
    return f"{remote_engines.NAME}-{session.run_id}"


def inside(session: Session, engine: Engine) -> str:
    """The words with which a command runs in a host's container."""
    return f"{engine.docker} exec -i {name(session)}"


@contextlib.contextmanager
def up(
    session: Session,
    engines: Mapping[str, Engine],
    facts: Mapping[str, Facts],
    told: Told,
    images: Mapping[str, str],
    volumes: Sequence[str] = (),
) -> Iterator[Plan]:
    """A container on every host, that reach each other; yields what they hold, as a plan.

    Args:
        facts: of the hosts.
        told: what the image says of itself.
        images: how each host calls it.
        volumes: ``FOLDER:FOLDER[:ro]`` as docker takes them.

    Raises:
        ProvisionError: a container does not come up.
    """
    alone = len(engines) == 1
    places = {host: network.network(host, facts[host], session.inventory.host(host).interface, alone=alone) for host in engines}
    session.progress.stage("Start a container", list(engines))
    private, public = _keys(engines)
    try:
        scripts, given = {}, {}
        for number, (host, engine) in enumerate(engines.items()):
            words = [*_resources(facts[host], engine), *(word for each in volumes for word in ("-v", each))]
            scripts[host] = (engine, _script(name(session), session.run_id, images[host], told, places[host].address, words))
            files = {
                mesh.HOST_KEY: private[host],
                mesh.AUTHORIZED: f"restrict {public['']}",
                **({mesh.KEY: private[""]} if number == 0 else {}),
            }
            given[host] = mesh.archive(files)
        answers = remote_engines.on_engines(session, scripts, stdin=given, timeout=START_S)
        ports, holdings = {}, {}
        for host, answer in answers.items():
            port, _, manifest = answer.out.partition(_MARK)[2].strip().partition("\n")
            if answer.code != 0 or not port.isdigit():
                raise ProvisionError(
                    f"the container does not come up: {answer.complaint}", where=host, hint="see there: docker info, free -h, df -h"
                )
            ports[host], holdings[host] = int(port), json.loads(manifest)
        members = {host: mesh.member(places[host].address, port, public[host]) for host, port in ports.items()}
        _acquaint(session, engines, members)
        inside = {host: facts[host].model_copy(update={"installed": Installed(manifest=held)}) for host, held in holdings.items()}
        taken = {host: slots(session.inventory, host, facts, engines) for host in engines}
        yield plan_of(session.inventory, inside, alone=alone, slots=taken)
    finally:
        with signals.ignored():
            gone = f'it=$(docker ps -aq --filter name=^/{name(session)}$) && {{ [ -z "$it" ] || docker rm -f -v $it >/dev/null; }}'
            remote_engines.remove(session, engines, {host: [gone] for host in engines})


def _keys(hosts: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """(private, public) host keys by host; under the empty name the one by which the first container logs in to the others."""
    with tempfile.TemporaryDirectory(prefix="provision-keys-") as folder:
        public, private = {}, {}
        for number, host in enumerate(["", *hosts]):
            file = Path(folder) / str(number)
            public[host] = ssh_keys.make_pair(file, f"provision {host or 'run'}")
            private[host] = file.read_text(encoding="utf-8")
        return private, public


def _resources(found: Facts, engine: Engine) -> list[str]:
    """What of the host the container may use: half of its memory to share, its GPUs, its InfiniBand."""
    memory = max(_LEAST_MEMORY, (int(found.memory.total_mb or 0) << 20) // 2)
    words = ["--shm-size", str(memory)]
    words += ["--gpus", "all"] if found.gpus and engine.nvidia else []
    return words + (["--device", "/dev/infiniband"] if found.infiniband else [])


def _script(container: str, run: str, image: str, told: Told, address: str, words: Sequence[str]) -> str:
    """Makes and starts the container, its keys on standard input; prints its port and its manifest."""
    user = str(catalog.images().user.uid)
    ports = [str(port) for port in random.sample(_PORTS, _TRIES)]
    create = ["docker", "create", "--name", container, "--label", f"{remote_engines.LABEL}={run}", "--init"]
    create += ["--network", "host", "--user", user]
    create += ["--env", f"address={address}", *words]
    serve = ["--entrypoint", "sh", image, "-c", _SERVE, "sh", *ports]
    probe = ["docker", "run", "--rm", "--network", "none", *_LOCKED, "--entrypoint", "true", image]
    ready = shlex.join(["docker", "exec", container, "sh", "-c", _READY, "sh", told.of("prefix")])
    return f"""set -e
! {shlex.join(probe)} >/dev/null 2>&1 || set -- {shlex.join(_LOCKED)}
{shlex.join(create)} "$@" {shlex.join(serve)} >/dev/null
docker cp - {container}:{mesh.home()}
echo {_MARK} # fails where nobody listens any more: then it must not start
docker start {container} >/dev/null
{ready} || {{ docker logs --tail 5 {container} >&2; exit 1; }}
"""


def _acquaint(session: Session, engines: Mapping[str, Engine], members: Mapping[str, Any]) -> None:
    """Tell the first container of all of them."""
    first = next(iter(engines))
    script = f"docker cp - {name(session)}:{mesh.home()}"
    answers = remote_engines.on_engines(session, {first: (engines[first], script)}, stdin=mesh.archive(mesh.known(members)))
    for host, answer in answers.items():
        if answer.code != 0:
            raise ProvisionError(f"its container takes no files: {answer.complaint}", where=host)


def slots(inventory: Inventory, host: str, facts: Mapping[str, Facts], engines: Mapping[str, Engine]) -> int:
    """How many ranks a host takes: as the inventory says, else one for each GPU that its container gets, else one."""
    return inventory.host(host).slots or (len(facts[host].gpus) if engines[host].nvidia else 0) or 1


def plan_of(inventory: Inventory, facts: Mapping[str, Facts], *, alone: bool, slots: Mapping[str, int] | None = None) -> Plan:
    """What an image's manifest, which is among the facts, says; with what is the containers' own."""
    made = installed.plan(inventory, facts)
    hosts = {}
    for name, held in made.hosts.items():
        found = facts[name]
        place = network.network(name, found, inventory.host(name).interface, alone=alone)
        taken = slots[name] if slots else held.slots
        hosts[name] = replace(held, hostname=str(found.hostname or name), network=place, slots=taken, root=False)
    return replace(made, hosts=hosts)
