"""The hosts' own container engines, by their command line over SSH: which there are, what they can do and what they hold already."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from provision.base.errors import ProvisionError
from provision.remote import shell
from provision.remote.session import Session
from provision.survey import collect

LABEL = "org.provision.run"  # of containers: the run that they belong to
NAME = "provision-run"  # of containers and images that a run brings; the run's id follows
REMOVE_S = 120.0
_MARK = "===PROVISION-ENGINE==="  # a login may print something first
_NONE, _REFUSED = 71, 72  # exit codes
_SSH_ITSELF = 255

# Without the right to use the engine, whoever may become root without being asked does it as root.
_FIND = f"""docker=docker
command -v docker >/dev/null 2>&1 || exit {_NONE}
said=$(docker version --format '{{{{.Server.Version}}}}' 2>&1) || {{
    docker='sudo -n docker'
    $docker version --format '{{{{.Server.Version}}}}' >/dev/null 2>&1 || {{ echo "$said" >&2; exit {_REFUSED}; }}
}}
echo {_MARK}
echo "$docker"
"""
_HOLDINGS = f"""$docker ps -a --filter label={LABEL} --format 'container {{{{.Label "{LABEL}"}}}} {{{{.ID}}}}'
$docker image ls --format 'image {{{{.Tag}}}} {{{{.Repository}}}}:{{{{.Tag}}}}' {NAME}
$docker info --format 'runtimes {{{{json .Runtimes}}}}'
command -v nvidia-container-runtime-hook nvidia-container-cli
$docker image ls -aq --no-trunc | sort -u | xargs -r $docker image inspect --format 'layers {{{{json .RootFS.Layers}}}}' 2>/dev/null
exit 0
"""


@dataclass(frozen=True)
class Engine:
    """A host's engine.

    Attributes:
        docker: the words with which it is called there.
        nvidia: whether it can give GPUs to a container.
        layers: of each image that it holds, the layers from the bottom.
        left: (run, what takes it off) of each thing of a run that it still holds.
    """

    docker: str
    nvidia: bool
    layers: tuple[tuple[str, ...], ...]
    left: tuple[tuple[str, str], ...]


def look(session: Session) -> dict[str, Engine]:
    """The engine of every host.

    Raises:
        ProvisionError: a host has none, or none that this user may use; it names the hosts and what to do there.
    """
    answers = shell.ask(session, {host.name: _FIND + _HOLDINGS for host in session.inventory.hosts})
    _complain(session, answers)
    return {name: _read(answer.out.partition(_MARK)[2].strip().splitlines()) for name, answer in answers.items()}


def inspect(session: Session, engines: Mapping[str, Engine], references: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What each of these hosts' engines tells of the images that it has under any of these names."""
    script = f"echo {_MARK}; docker image inspect {shlex.join(references)} 2>/dev/null || true"
    answers = on_engines(session, {name: (engine, script) for name, engine in engines.items()})
    for name, answer in answers.items():
        if answer.code != 0:
            raise ProvisionError(f"its container engine does not tell what images it has: {answer.complaint}", where=name)
    return {name: json.loads(answer.out.partition(_MARK)[2].strip() or "[]") for name, answer in answers.items()}


def on_engines(
    session: Session,
    scripts: Mapping[str, tuple[Engine, str]],
    *,
    stdin: bytes | Mapping[str, bytes] = b"",
    patience: float = shell.PATIENCE_S,
) -> dict[str, shell.Answer]:
    """Scripts in which ``docker`` is each host's own way to call it. Raises Interrupted after Ctrl-C."""
    if not scripts:
        return {}
    return shell.ask(session, {name: calling(*each) for name, each in scripts.items()}, stdin=stdin, patience=patience)


def calling(engine: Engine, script: str) -> str:
    """A script in which ``docker`` is the host's own way to call it."""
    return script if engine.docker == "docker" else f'docker() {{ {engine.docker} "$@"; }}\n{script}'


def put_away(session: Session, engines: Mapping[str, Engine], scripts: Mapping[str, Sequence[str]]) -> None:
    """Run what takes things off, whatever comes between; what could not be taken off is said, with how to do it by hand."""
    wanted = {name: lines for name, lines in scripts.items() if lines}
    if not wanted:
        return
    # Each line counts for itself: one that fails does not keep the next ones from being tried.
    every = {name: "code=0\n" + "".join(f"{line} || code=1\n" for line in lines) + "exit $code" for name, lines in wanted.items()}
    answers = shell.tidy(session, {name: calling(engines[name], script) for name, script in every.items()}, patience=REMOVE_S)
    for name, answer in answers.items():
        if answer.code != 0:
            session.locks_left = True  # the note of this run stays, and the next one sweeps
            session.progress.line(f"{name}: not all was removed: {answer.complaint}; by hand there: {'; '.join(wanted[name])}", "bold red")


def sweep(session: Session, engines: Mapping[str, Engine]) -> None:
    """Take off what runs left that were started on this machine and killed."""
    dead = set(session.dead_runs())
    put_away(session, engines, {name: [line for run, line in engine.left if run in dead] for name, engine in engines.items()})


def _complain(session: Session, answers: Mapping[str, shell.Answer]) -> None:
    """Raise for what stands in the way, the hosts with the same trouble together."""
    troubles: dict[tuple[str, str], list[str]] = {}
    for name, answer in answers.items():
        if answer.code != 0:
            troubles.setdefault(_trouble(session, name, answer), []).append(name)
    if troubles:
        (what, todo), names = next(iter(troubles.items()))
        others = sorted({name for named in troubles.values() for name in named} - set(names))
        more = f" (and something else with {', '.join(others)})" if others else ""
        raise ProvisionError(f"{what}{more}", where=", ".join(names), todo=todo)


def _trouble(session: Session, name: str, answer: shell.Answer) -> tuple[str, str]:
    host, said = session.inventory.host(name), " ".join(answer.err.split())
    if answer.code is None:
        return "its container engine did not answer in time", "see there: docker info"
    if answer.code == _NONE:
        return (
            "it has no container engine: there is no `docker`",
            "install one there: sudo apt-get install docker.io (or Docker's own packages)",
        )
    if answer.code == _REFUSED and "permission denied" in said.lower():
        return (
            f"its user may not use the container engine, and may not become root without a password: {said}",
            f"let that user: sudo usermod -aG docker {host.user or '$USER'}, and log in anew",
        )
    if answer.code == _REFUSED:
        return f"its container engine does not answer: {said}", "start it there: sudo systemctl start docker"
    if answer.code == _SSH_ITSELF:
        problem = collect.connection_problem(host, answer.err)
        return problem.what, problem.todo or ""
    return f"its container engine cannot be looked at: {said or f'exit code {answer.code}'}", "see there: docker info"


def _read(lines: Iterable[str]) -> Engine:
    docker, *rest = lines
    layers: list[tuple[str, ...]] = []
    left: list[tuple[str, str]] = []
    nvidia = False
    for line in rest:
        kind, _, told = line.partition(" ")
        if kind == "layers":
            layers.append(tuple(json.loads(told) or ()))
        elif kind in ("container", "image"):
            run, _, it = told.partition(" ")
            left.append((run, f"docker rm -f -v {it} >/dev/null" if kind == "container" else f"docker image rm {it} >/dev/null"))
        elif kind == "runtimes":
            nvidia = nvidia or "nvidia" in (json.loads(told) or {})
        else:
            nvidia = nvidia or line.startswith("/")
    return Engine(docker, nvidia, tuple(layers), tuple(left))
