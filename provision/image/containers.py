"""Containers of an image for a job: one on every host, in the host's own network, with an sshd and keys for this run alone.

The image is pulled by its digest, or loaded over ssh where only this machine has it. What a run puts on a host's container engine has the
run's id as label or tag, and is removed by it at the end, also after a failure; names of the host's own stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from provision.base import signals
from provision.base.errors import ProvisionError, UsageError
from provision.image import container_hosts, local_images
from provision.launch import placement
from provision.launch.launchers import RunOptions
from provision.launch.program import Containers
from provision.launch.push import hand_on
from provision.plan.model import Plan
from provision.remote import ssh
from provision.remote.session import Session
from provision.resolve import network
from provision.sandbox.containers import container_engine
from provision.survey import Facts, collect
from provision.survey.model import Installed

LABEL = "org.provision.run"  # of containers: the run that they belong to
NAME = "provision-run"  # of containers and images; the run's id follows
_START_S = 120.0
_CLEAN_UP_S = 120.0
_COPY_S = 3600.0
_MARK = "===PROVISION==="  # a login may print something first
_NO_ENGINE, _REFUSED = 71, 72  # exit codes
PORTS = range(20000, 32768)  # below those that Linux uses for outgoing connections
_TRIES = 20
_UNLIMITED = ("--ulimit", "memlock=-1:-1")  # an engine without the right to raise limits refuses it
_RUN_KEY = "the run"  # the key by which the first container logs in to the others; no host is called like this
MIN_MEMORY = 1 << 30  # /dev/shm: Docker's 64 MiB are too few for PyTorch's loaders

# A user without the right to use the engine, who can become root without a password, uses it as root.
_LOOK = f"""docker=docker
command -v docker >/dev/null 2>&1 || exit {_NO_ENGINE}
error=$(docker version --format '{{{{.Server.Version}}}}' 2>&1) || {{
    docker='sudo -n docker'
    $docker version --format '{{{{.Server.Version}}}}' >/dev/null 2>&1 || {{ echo "$error" >&2; exit {_REFUSED}; }}
}}
echo {_MARK}
echo "$docker"
if $docker info --format '{{{{json .Runtimes}}}}' | grep -q '"nvidia"' || command -v nvidia-container-cli >/dev/null
then echo yes; else echo no; fi
$docker ps -a --filter label={LABEL} --format '{{{{.Label "{LABEL}"}}}}'
$docker image ls --format '{{{{.Tag}}}}' {NAME}
"""
# sshd finds out whether a port is free: it ends where it cannot listen, and the next port is tried.
_SERVE = """for port; do
    echo "$port" > ~/.provision-sshd/port
    /usr/sbin/sshd -D -e -f /etc/provision/sshd_config -p "$port" -o ListenAddress="$address"
done
"""
WAIT_FOR_SSHD = "n=0; until [ -s ~/.provision-sshd/sshd.pid ]; do n=$((n + 1)); [ $n -lt 600 ] || exit 1; sleep 0.1; done"
_READY = f'{WAIT_FOR_SSHD}; cat ~/.provision-sshd/port "$1/manifest.json"'


@dataclass(frozen=True)
class Engine:
    """A host's container engine: its command, whether it can give GPUs to a container, and the runs that left something there."""

    docker: str
    nvidia: bool
    runs: frozenset[str] = frozenset()


@contextlib.contextmanager
def started(session: Session, image: str, options: RunOptions, *, volumes: Sequence[str] = (), keep: bool = False) -> Iterator[Containers]:
    """Containers of ``image`` on the session's hosts; nothing of them is left there, however the job ends.

    Args:
        image: a name that this machine or a registry knows.
        options: the job, whose ranks must fit.
        volumes: folders of the hosts in the containers, ``FOLDER:FOLDER[:ro]``.
        keep: leave the image on the hosts, under its name.

    Raises:
        UsageError: it is not an image of provision, or not for these hosts' processors.
        ProvisionError: a host cannot be used; it names it.
        Interrupted: after Ctrl-C, when everything has been ended.
    """
    attributes = _attributes_here(image)
    with signals.termination_as_interrupt():
        hosts = _Hosts(session, _facts(session), _engines(session))
        dead = set(session.dead_runs())
        hosts.clean_up({name: engine.runs & dead for name, engine in hosts.engines.items()})
        placement.of_program([(name, hosts.slots(name)) for name in hosts.engines], options)
        if attributes is not None:
            hosts.check_image(image, attributes)  # before it is copied anywhere
        try:
            info = hosts.check_image(image, hosts.get_image(image, attributes, keep=keep))
            if not info.ready:
                session.progress.line(f"{image} is not verified: provision image verify")
            yield Containers(hosts.start(info, volumes), {name: hosts.inside(name) for name in hosts.engines})
        finally:
            with signals.ignored():
                hosts.clean_up({name: {session.run_id} for name in hosts.engines})


def _attributes_here(image: str) -> local_images.Attributes | None:
    """What this machine's engine says of the image; None where it does not have it, or there is no engine: then the hosts pull it."""
    if Path(image).is_file():
        raise UsageError("invalid image: expected a name, not a file", where=image, hint="load it here, then name it: docker load -i FILE")
    with contextlib.suppress(ProvisionError), local_images.engine() as client, container_engine.explained(f"inspecting {image}"):
        return local_images.attributes(client, image)
    return None


def _facts(session: Session) -> dict[str, Facts]:
    survey = collect.survey_hosts(session)
    for problem in survey.problems:
        if problem.host not in survey.hosts:  # the others' problems are about installing
            raise ProvisionError(problem.what, where=problem.host, hint=problem.hint)
    return survey.hosts


def _engines(session: Session) -> dict[str, Engine]:
    """The engine of every host. Raises ProvisionError for hosts without one that this user may use: which they are and what to do."""
    answers = ssh.run(session, {host.name: _LOOK for host in session.inventory.hosts})
    problems = {name: engine_problem(session, name, answer) for name, answer in answers.items() if answer.code != 0}
    for what, hint in problems.values():  # one of them, with all hosts that have it
        names = [name for name, problem in problems.items() if problem == (what, hint)]
        raise ProvisionError(what, where=", ".join(names), hint=hint)
    return {name: read_engine(answer.out) for name, answer in answers.items()}


def read_engine(output: str) -> Engine:
    """The engine in what a host printed."""
    command, nvidia, *runs = [*output.partition(_MARK)[2].split("\n")[1:], "", ""]
    return Engine("sudo -n docker" if command.startswith("sudo") else "docker", nvidia == "yes", frozenset(filter(None, runs)))


def engine_problem(session: Session, name: str, answer: ssh.Answer) -> tuple[str, str]:
    """(what is wrong with a host's engine, hint)."""
    host, error = session.inventory.host(name), " ".join(answer.err.split())
    if answer.code == _NO_ENGINE:
        return "no container engine (no docker command)", "install one there: sudo apt-get install docker.io (or Docker's packages)"
    if answer.code == _REFUSED and "permission denied" in error.lower():
        what = f"its user may not use the container engine, and cannot become root without a password: {error}"
        return what, f"let that user: sudo usermod -aG docker {host.user or '$USER'}, and log in again"
    if answer.code == _REFUSED:
        return f"its container engine does not answer: {error}", "start it there: sudo systemctl start docker"
    if answer.code == ssh.UNREACHABLE:
        problem = collect.connection_problem(host, answer.err, session.catalog)
        return problem.what, problem.hint or ""
    return f"its container engine cannot be used: {answer.error}", "see there: docker info"


@dataclass(frozen=True)
class _Hosts:
    """The hosts of a run, and what is done on their engines."""

    session: Session
    facts: Mapping[str, Facts]
    engines: Mapping[str, Engine]

    @property
    def container(self) -> str:
        """The name of the run's container, on each host."""
        return f"{NAME}-{self.session.run_id}"

    @property
    def tag(self) -> str:
        """The run's name for the image, on each host."""
        return f"{NAME}:{self.session.run_id}"

    def inside(self, name: str) -> str:
        """The words before a command that runs in a host's container."""
        return f"{self.engines[name].docker} exec -i {self.container}"

    def slots(self, name: str) -> int:
        """How many ranks a host takes: as the inventory says, else one for each GPU that its container gets, else one."""
        gpus = len(self.facts[name].gpus) if self.engines[name].nvidia else 0
        return self.session.inventory.host(name).slots or gpus or 1

    def _ask(self, scripts: Mapping[str, str], *, stdin: ssh.Input = b"", timeout: float = ssh.TIMEOUT_S) -> dict[str, ssh.Answer]:
        """Run scripts in which ``docker`` is each host's own command for it. Raises Interrupted after Ctrl-C."""
        if not scripts:
            return {}
        return ssh.run(self.session, {name: self._with_docker(name, text) for name, text in scripts.items()}, stdin=stdin, timeout=timeout)

    def _with_docker(self, name: str, script: str) -> str:
        command = self.engines[name].docker
        return script if command == "docker" else f'docker() {{ {command} "$@"; }}\n{script}'

    def clean_up(self, runs: Mapping[str, Collection[str]]) -> None:
        """Remove the containers and images of runs from each host; what could not be removed is printed."""
        scripts = {}
        for name, ids in runs.items():
            lines = ["code=0"]
            for each in map(shlex.quote, sorted(ids)):
                lines.append(
                    f'c=$(docker ps -aq --filter label={LABEL}={each}) && {{ [ -z "$c" ] || docker rm -f -v $c >/dev/null; }} || code=1'
                )
                image = f"{NAME}:{each}"
                lines.append(f"! docker image inspect {image} >/dev/null 2>&1 || docker image rm {image} >/dev/null || code=1")
            if ids:
                scripts[name] = self._with_docker(name, "\n".join([*lines, "exit $code"]))
        if not scripts:
            return
        for name, answer in ssh.run_cleanup(self.session, scripts, timeout=_CLEAN_UP_S).items():
            if answer.code != 0:
                self.session.locks_left = True  # the note of this run stays, and the next run cleans up
                by_hand = f"docker ps -a --filter label={LABEL}; docker image ls {NAME}"
                self.session.progress.line(f"{name}: not all was removed: {answer.error}; see there: {by_hand}", "bold red")

    def check_image(self, image: str, attributes: local_images.Attributes) -> local_images.ImageInfo:
        """What the image says of itself. Raises where these hosts cannot run it."""
        info = local_images.info(image, attributes)
        arch = self.session.catalog.os().kernel_name(attributes.get("Architecture", ""))
        others = [name for name, each in self.facts.items() if arch and each.arch != arch]
        if others:
            raise UsageError(f"the image is for {arch}, and these hosts are not", where=", ".join(others), hint="leave them out: --limit")
        blind = [name for name, each in self.facts.items() if each.gpus and not self.engines[name].nvidia]
        if info.of("nccl") and blind:
            what = "the image is for GPUs, and its container engine cannot give them to a container"
            raise ProvisionError(what, where=", ".join(blind), hint="install there: nvidia-container-toolkit, then restart docker")
        return info

    def get_image(self, image: str, attributes: local_images.Attributes | None, *, keep: bool) -> local_images.Attributes:
        """Have the image on every host, under the run's name for it; returns what an engine says of it.

        Args:
            attributes: what this machine's engine says of it; None where only its registry has it.
        """
        self.session.progress.stage(f"Copy {image} to hosts", list(self.engines))
        lacking = list(self.engines)
        if attributes is None:
            attributes = self._pull_from_registry(image)
        else:
            present = self._ask({name: f"docker tag {shlex.quote(attributes['Id'])} {self.tag}" for name in self.engines})
            lacking = [name for name, answer in present.items() if answer.code != 0]
            digest = next(iter(attributes.get("RepoDigests") or ()), None)
            pulled = self._pull(lacking, digest) if digest else {}
            self._load(image, attributes, [name for name in lacking if name not in pulled or pulled[name].code != 0])
        if keep:
            repository, _, digest = image.partition("@sha256:")
            name = f"{repository}:{digest[:12]}" if digest else image
            self._must(self._ask({host: f"docker tag {self.tag} {shlex.quote(name)}" for host in lacking}), "keeping the image")
        return attributes

    def _pull_from_registry(self, image: str) -> local_images.Attributes:
        """The first host finds out the digest of the image, by which the others pull it."""
        first, *others = self.engines
        hint = "see that the host reaches the registry and is logged in there; or pull or load the image here, and it is copied"
        pulled = self._pull([first], image)
        self._must(pulled, f"pulling {image}", hint)
        try:
            attributes: local_images.Attributes = json.loads(pulled[first].out.partition(_MARK)[2])[0]
            digests = [str(each) for each in attributes["RepoDigests"] or ()]
        except (ValueError, LookupError, TypeError) as error:
            raise ProvisionError("its container engine gave no valid answer", where=first, hint="see there: docker info") from error
        repository = local_images.split_name(image.partition("@")[0])[0]
        digest = next((each for each in digests if each.startswith(f"{repository}@sha256:")), image)
        if others and digest == image and "@" not in image:
            what = "the registry gives this image no digest, so it is unknown whether the other hosts would pull the same one"
            raise ProvisionError(what, where=first, hint="pull or load the image on this machine: it is copied to the hosts")
        self._must(self._pull(others, digest), f"pulling {digest}", hint)
        return attributes

    def _pull(self, names: Sequence[str], reference: str) -> dict[str, ssh.Answer]:
        """Pull the image and name it for the run; the name that was pulled goes, or back to the image that had it."""
        word = shlex.quote(reference)
        restore = "true" if "@" in reference else f'docker tag "$before" {word}'
        script = f"""before=$(docker image inspect --format '{{{{.Id}}}}' {word} 2>/dev/null)
restore() {{ if [ -n "$before" ]; then {restore}; else docker image rm {word} >/dev/null 2>&1; fi; }}
trap restore EXIT
trap 'exit 1' HUP INT TERM
docker pull -q {word} >/dev/null && docker tag {word} {self.tag} || exit 1
echo {_MARK}
docker image inspect {self.tag}
"""
        answers = self._ask(dict.fromkeys(names, script), timeout=_COPY_S)
        for name, answer in answers.items():
            if answer.code == 0:
                self.session.progress.line(f"{name}: pulled {reference}")
        return answers

    def _load(self, image: str, attributes: local_images.Attributes, names: Sequence[str]) -> None:
        """Copy the image from this machine by `docker load` over ssh: without a name of its own, which might be one of the host's."""
        if not names:
            return
        saved = self.session.folder / "image.tar"
        self.session.progress.line(f"copying {attributes['Size'] / 1e6:.0f} MB to {', '.join(names)}")
        try:
            with local_images.engine() as client, container_engine.explained(f"saving {image} to {saved}"), saved.open("wb") as file:
                for chunk in client.images.get(attributes["Id"]).save():
                    file.write(chunk)

            def write(pipe: IO[bytes]) -> None:
                with saved.open("rb") as file:
                    shutil.copyfileobj(file, pipe, 1 << 20)

            there = hand_on(self.session, saved, attributes["Id"].rpartition(":")[2], names)
            load = f"id=$(docker load -q | sed -n 's/^Loaded image[^:]*: *//p') && docker tag \"$id\" {self.tag}"
            scripts = {name: f"trap 'rm -f {there[name]}' EXIT; exec <{there[name]}; {load}" if name in there else load for name in names}
            stdin = {name: write for name in names if name not in there}
            self._must(self._ask(scripts, stdin=stdin, timeout=_COPY_S), f"loading {image}")
        finally:
            saved.unlink(missing_ok=True)

    def _must(self, answers: Mapping[str, ssh.Answer], doing: str, hint: str | None = None) -> None:
        for name, answer in answers.items():
            if answer.code != 0:
                raise ProvisionError(answer.error, where=f"{name}, {doing}", hint=hint)

    def start(self, info: local_images.ImageInfo, volumes: Sequence[str]) -> Plan:
        """Start a container on every host that the first one can log in to; returns what they hold.

        Raises:
            ProvisionError: a container does not come up.
        """
        alone = len(self.engines) == 1
        inventory = self.session.inventory
        networks = {name: network.network(name, self.facts[name], inventory.host(name).interface, alone=alone) for name in self.engines}
        self.session.progress.stage("Start a container", list(self.engines))
        with tempfile.TemporaryDirectory(prefix="provision-keys-") as folder:
            keys = container_hosts.make_keys(Path(folder), [*self.engines, _RUN_KEY])
        first = next(iter(self.engines))
        scripts, archives = {}, {}
        for name in self.engines:
            words = [*container_options(self.facts[name], self.engines[name]), *(word for each in volumes for word in ("-v", each))]
            scripts[name] = self._start_script(info.of("prefix"), networks[name].address, words)
            files = {container_hosts.HOST_KEY: keys[name].private, container_hosts.AUTHORIZED: f"restrict {keys[_RUN_KEY].public}"}
            files |= {container_hosts.KEY: keys[_RUN_KEY].private} if name == first else {}
            archives[name] = container_hosts.home_archive(files, self.session.catalog)
        members, held = {}, {}
        for name, answer in self._ask(scripts, stdin=archives, timeout=_START_S).items():
            port, _, manifest = answer.out.partition(_MARK)[2].strip().partition("\n")
            try:
                started = (int(port), json.loads(manifest)) if answer.code == 0 else None
            except ValueError:
                started = None
            if started is None:
                what = f"the container does not come up: {answer.error}"
                raise ProvisionError(what, where=name, hint="see there: docker info, free -h, df -h")
            members[name] = container_hosts.member(networks[name].address, started[0], keys[name].public, self.session.catalog)
            held[name] = self.facts[name].model_copy(update={"installed": Installed.model_validate({"manifest": started[1]})})
        files = container_hosts.ssh_files(members)
        script = f"docker cp - {self.container}:{container_hosts.home(self.session.catalog)}"
        copied = self._ask({first: script}, stdin=container_hosts.home_archive(files, self.session.catalog))
        self._must(copied, "copying ssh's files into the container")
        return container_hosts.plan_of(inventory, held, alone=alone, slots={name: self.slots(name) for name in self.engines})

    def _start_script(self, prefix: str, address: str, options: Sequence[str]) -> str:
        """Creates and starts the container, its keys on standard input; prints its port and its manifest."""
        ports = [str(port) for port in random.sample(PORTS, _TRIES)]
        create = ["docker", "create", "--name", self.container, "--label", f"{LABEL}={self.session.run_id}", "--init"]
        create += ["--network", "host", "--user", str(self.session.catalog.images().user.uid), "--env", f"address={address}", *options]
        serve = ["--entrypoint", "sh", self.tag, "-c", _SERVE, "sh", *ports]
        probe = ["docker", "run", "--rm", "--network", "none", *_UNLIMITED, "--entrypoint", "true", self.tag]
        ready = shlex.join(["docker", "exec", self.container, "sh", "-c", _READY, "sh", prefix])
        return f"""set -e
! {shlex.join(probe)} >/dev/null 2>&1 || set -- {shlex.join(_UNLIMITED)}
{shlex.join(create)} "$@" {shlex.join(serve)} >/dev/null
docker cp - {self.container}:{container_hosts.home(self.session.catalog)}
echo {_MARK} # fails where the connection is gone: then the container must not start
docker start {self.container} >/dev/null
{ready} || {{ docker logs --tail 5 {self.container} >&2; exit 1; }}
"""


def container_options(facts: Facts, engine: Engine) -> list[str]:
    """What of the host the container may use: half of its memory to share, its GPUs, its InfiniBand."""
    memory = max(MIN_MEMORY, (int(facts.memory.total_mb or 0) << 20) // 2)
    words = ["--shm-size", str(memory)]
    words += ["--gpus", "all"] if facts.gpus and engine.nvidia else []
    return words + (["--device", "/dev/infiniband"] if facts.infiniband else [])
