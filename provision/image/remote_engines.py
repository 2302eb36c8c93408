"""The hosts' own container engines, by their command line over SSH: finding them, bringing an image, removing what a run brought.

On each host the image gets a name of the run's own, which goes at the end: what else the host has, and how that is called, stays.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import docker.errors

from provision.base import signals
from provision.base.errors import ProvisionError
from provision.containers import container_engine
from provision.image import archive, labels
from provision.image.archive import Archive
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey import collect

LABEL = "org.provision.run"  # of containers: the run that they belong to
NAME = "provision-run"  # of containers and images that a run brings; the run's id follows
_REMOVE_S = 120.0
_COPY_S = 3600.0
_COPIES_AT_ONCE = 8  # they share this machine's way out
_MARK = "===PROVISION-ENGINE==="  # a login may print something first
_NONE, _REFUSED = 71, 72  # exit codes
_SSH_ITSELF = 255

# Without the right to use the engine, whoever may become root without being asked does it as root.
_LOOK = f"""docker=docker
command -v docker >/dev/null 2>&1 || exit {_NONE}
said=$(docker version --format '{{{{.Server.Version}}}}' 2>&1) || {{
    docker='sudo -n docker'
    $docker version --format '{{{{.Server.Version}}}}' >/dev/null 2>&1 || {{ echo "$said" >&2; exit {_REFUSED}; }}
}}
echo {_MARK}
echo "$docker"
$docker ps -a --filter label={LABEL} --format 'container {{{{.Label "{LABEL}"}}}} {{{{.ID}}}}'
$docker image ls --format 'image {{{{.Tag}}}} {{{{.Repository}}}}:{{{{.Tag}}}}' {NAME}
$docker info --format 'runtimes {{{{json .Runtimes}}}}'
command -v nvidia-container-runtime-hook nvidia-container-cli
exit 0
"""


@dataclass(frozen=True)
class Engine:
    """A host's engine.

    Attributes:
        docker: the words with which it is called there.
        nvidia: whether it can give GPUs to a container.
        left: (run, what removes it) of each thing of a run that it still holds.
    """

    docker: str
    nvidia: bool
    left: tuple[tuple[str, str], ...]


def look(session: Session) -> dict[str, Engine]:
    """The engine of every host.

    Raises:
        ProvisionError: a host has none, or none that this user may use; it names the hosts and what to do there.
    """
    answers = ssh.run(session, {host.name: _LOOK for host in session.inventory.hosts})
    _complain(session, answers)
    return {name: _read(answer.out.partition(_MARK)[2].strip().splitlines()) for name, answer in answers.items()}


def on_engines(
    session: Session,
    scripts: Mapping[str, tuple[Engine, str]],
    *,
    stdin: ssh.Input = b"",
    timeout: float = ssh.TIMEOUT_S,
) -> dict[str, ssh.Answer]:
    """Scripts in which ``docker`` is each host's own way to call it. Raises Interrupted after Ctrl-C."""
    if not scripts:
        return {}
    return ssh.run(session, {name: _calling(*each) for name, each in scripts.items()}, stdin=stdin, timeout=timeout)


def remove(session: Session, engines: Mapping[str, Engine], scripts: Mapping[str, Sequence[str]]) -> None:
    """Run what removes things, whatever comes between; what could not be removed is printed, with how to do it by hand."""
    wanted = {name: lines for name, lines in scripts.items() if lines}
    if not wanted:
        return
    # Each line counts for itself: one that fails does not keep the next ones from being tried.
    every = {name: "code=0\n" + "".join(f"{line} || code=1\n" for line in lines) + "exit $code" for name, lines in wanted.items()}
    answers = ssh.run_cleanup(session, {name: _calling(engines[name], script) for name, script in every.items()}, timeout=_REMOVE_S)
    for name, answer in answers.items():
        if answer.code != 0:
            session.locks_left = True  # the note of this run stays, and the next one sweeps
            session.progress.line(f"{name}: not all was removed: {answer.error}; by hand there: {'; '.join(wanted[name])}", "bold red")


def sweep(session: Session, engines: Mapping[str, Engine]) -> None:
    """Remove what runs left that were started on this machine and killed."""
    dead = set(session.dead_runs())
    remove(session, engines, {name: [line for run, line in engine.left if run in dead] for name, engine in engines.items()})


# --- the image ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """Where an image comes from.

    Attributes:
        name: as the user called it.
        attributes: what an engine tells of it; None while only its registry knows.
        digest: ``NAME@sha256:…``, at which a registry has it; None where that is not known.
        kept: whether this machine's own engine has it, so that it can be copied.
        file: the archive that it is.
    """

    name: str
    attributes: dict[str, Any] | None = None
    digest: str | None = None
    kept: bool = False
    file: Archive | None = None

    @property
    def stays_as(self) -> str:
        """The name under which it is kept on hosts; empty for a file that names none. For a digest, its beginning is the tag."""
        if self.file is not None:
            return self.file.name
        repository, _, digest = self.name.partition("@sha256:")
        return f"{repository}:{digest[:12]}" if digest else self.name


def source(name: str) -> Source:
    """What ``name`` stands for: a file of `docker save`, an image that this machine keeps, else one that the hosts can pull.

    Raises:
        UsageError: it is not an image of ours, or not a name of an image.
    """
    if Path(name).is_file():
        held = archive.read(Path(name))
        labels.read(name, held.attributes)
        return Source(name, held.attributes, file=held)
    try:
        client = container_engine.connect()
    except ProvisionError:
        return Source(name)  # the hosts have engines; this machine needs none for pulling
    try:
        with container_engine.explained(f"looking at {name}"):
            attributes = client.images.get(name).attrs
    except ProvisionError as refused:
        if isinstance(refused.__cause__, docker.errors.ImageNotFound):
            return Source(name)
        raise
    finally:
        client.close()
    labels.read(name, attributes)
    return Source(name, attributes, next(iter(attributes.get("RepoDigests") or ()), None), kept=True)


@contextlib.contextmanager
def image_on(session: Session, engines: Mapping[str, Engine], wanted: Source, *, keep: bool) -> Iterator[dict[str, str]]:
    """Have the image on every host: pulled by its digest, else copied; yields what each host calls it. ``wanted`` has attributes then.

    Args:
        keep: leave it there, under `Source.stays_as`.

    Raises:
        ProvisionError: a host could not get it, or got another one.
    """
    ours = f"{NAME}:{session.run_id}"
    session.progress.stage(f"Copy {wanted.name} to hosts", list(engines))
    held = _held(session, engines, wanted)
    lacking = {name: engine for name, engine in engines.items() if name not in held}
    try:
        _run(
            session, {name: (engines[name], f"docker tag {shlex.quote(image)} {ours}") for name, image in held.items()}, "naming the image"
        )
        pulled = _pull(session, lacking, wanted, ours)
        _copy(session, {name: each for name, each in lacking.items() if name not in pulled}, wanted, ours)
        _verify(session, engines, wanted, ours)
        if keep:
            script = f"docker tag {ours} {shlex.quote(wanted.stays_as)}"
            _run(session, {name: (engine, script) for name, engine in lacking.items()}, "keeping the image")
        yield dict.fromkeys(engines, ours)
    finally:
        with signals.ignored():
            gone = f"docker version >/dev/null && {{ ! docker image inspect {ours} >/dev/null 2>&1 || docker image rm {ours} >/dev/null; }}"
            remove(session, engines, {name: [gone] for name in engines})


def _held(session: Session, engines: Mapping[str, Engine], wanted: Source) -> dict[str, str]:
    """Host → id of this very image there, where it has it. Of one that only its registry knows, none is believed to have it."""
    if wanted.attributes is None:
        return {}
    references = [str(wanted.attributes["Id"]), *filter(None, [wanted.digest, wanted.stays_as])]
    found = _inspect(session, engines, references)
    same = labels.layers(wanted.attributes)
    return {name: str(one["Id"]) for name, images in found.items() for one in images if labels.layers(one) == same}


def _inspect(session: Session, engines: Mapping[str, Engine], references: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What each engine tells of the images that it has under any of these names."""
    script = f"echo {_MARK}; docker image inspect {shlex.join(references)} 2>/dev/null || true"
    answers = _run(session, {name: (engine, script) for name, engine in engines.items()}, "inspecting images")
    return {name: _parsed(name, answer.out.partition(_MARK)[2].strip() or "[]") for name, answer in answers.items()}


def _parsed(host: str, text: str) -> list[dict[str, Any]]:
    """What `docker image inspect` printed. Raises ProvisionError for anything else: it comes from the host."""
    try:
        found = json.loads(text)
        return [{**one, "Id": str(one["Id"])} for one in found]
    except (ValueError, TypeError, KeyError) as error:
        raise ProvisionError("its container engine gave an answer that is not one", where=host, hint="see there: docker info") from error


def _pull(session: Session, engines: Mapping[str, Engine], wanted: Source, ours: str) -> list[str]:
    """The hosts that pulled it.

    What this machine can copy is not insisted on; of what it cannot, the first host finds out the digest for the others.
    """
    own = wanted.kept or wanted.file is not None
    if own and wanted.digest is None:
        return []
    names, reference = list(engines), wanted.digest if own and wanted.digest else wanted.name
    pulled: list[str] = []
    for some in [names] if "@" in reference else [names[:1], names[1:]]:
        answers = on_engines(session, {name: (engines[name], _pulling(reference, ours)) for name in some}, timeout=_COPY_S)
        for name, answer in answers.items():
            if answer.code == 0:
                pulled.append(name)
                session.progress.line(f"{name}: pulled {reference}")
            elif not own:
                hint = "see that the host reaches the registry and is logged in there; or pull or load it here, from where it is copied"
                raise ProvisionError(f"it could not pull {wanted.name}: {answer.error}", where=name, hint=hint)
        if some and "@" not in reference:
            reference = _digest(answers[some[0]].out, reference)
    return pulled


def _pulling(reference: str, ours: str) -> str:
    """Pulls an image, names it for the run and prints its digests. The name that was pulled goes, or back to the image that had it."""
    word = shlex.quote(reference)
    inspect = "docker image inspect --format"
    return f"""before=$({inspect} '{{{{.Id}}}}' {word} 2>/dev/null)
restore() {{
    if [ -z "$before" ]; then docker image rm {word} >/dev/null 2>&1
    else case {word} in *@*) ;; *) docker tag "$before" {word} ;; esac; fi
}}
trap restore EXIT
trap 'exit 1' HUP INT TERM
docker pull -q {word} >/dev/null && docker tag {word} {ours} || exit 1
echo {_MARK}
{inspect} '{{{{json .RepoDigests}}}}' {ours}
exit 0
"""


def _digest(said: str, reference: str) -> str:
    """The digest of what was just pulled; the reference itself where the engine names none."""
    pattern = re.escape(labels.parted(reference)[0]) + r"@sha256:[0-9a-f]{64}"
    found = re.search(rf'"({pattern})"', said.rpartition(_MARK)[2])
    return found[1] if found else reference


def _copy(session: Session, engines: Mapping[str, Engine], wanted: Source, ours: str) -> None:
    """By `docker load` over SSH, under the run's name alone."""
    if not engines:
        return
    saved = session.folder / "image.tar"
    try:
        held = wanted.file or archive.read(_save(wanted, saved, session))
        session.progress.line(f"copying {held.size / 1e6:.0f} MB to {', '.join(engines)}")

        def write(pipe: IO[bytes]) -> None:
            held.write(pipe, ours)

        names = list(engines)
        for some in (names[at : at + _COPIES_AT_ONCE] for at in range(0, len(names), _COPIES_AT_ONCE)):
            scripts = {name: (engines[name], "docker load -q") for name in some}
            for name, answer in on_engines(session, scripts, stdin=write, timeout=_COPY_S).items():
                if answer.code != 0:
                    raise ProvisionError(f"it did not take the image: {answer.error}", where=name)
    finally:
        saved.unlink(missing_ok=True)


def _save(wanted: Source, path: Path, session: Session) -> Path:
    session.progress.line(f"saving {wanted.name}")
    client = container_engine.connect()
    try:
        with container_engine.explained(f"saving {wanted.name} to {path}"), path.open("wb") as file:
            for chunk in client.images.get(str((wanted.attributes or {})["Id"])).save():
                file.write(chunk)
    finally:
        client.close()
    return path


def _verify(session: Session, engines: Mapping[str, Engine], wanted: Source, ours: str) -> None:
    """Raise where a host has another image than the others, or than this machine."""
    for name, images in _inspect(session, engines, [ours]).items():
        if images and wanted.attributes is None:
            labels.read(wanted.name, images[0])
            wanted.attributes = images[0]
        if not images or labels.layers(images[0]) != labels.layers(wanted.attributes or {}):
            has = f"it is {images[0]['Id'][7:19]} there" if images else "it is not there"
            raise ProvisionError(f"the image that came is not {wanted.name}: {has}", where=name, hint="run the same command again")


def _run(session: Session, scripts: Mapping[str, tuple[Engine, str]], doing: str) -> dict[str, ssh.Answer]:
    """`on_engines`, of which each must succeed. Raises ProvisionError."""
    answers = on_engines(session, scripts)
    for name, answer in answers.items():
        if answer.code != 0:
            raise ProvisionError(answer.error, where=f"{name}, {doing}")
    return answers


# --- what is wrong with an engine -----------------------------------------------------------------------------------------------------


def _calling(engine: Engine, script: str) -> str:
    """A script in which ``docker`` is the host's own way to call it."""
    return script if engine.docker == "docker" else f'docker() {{ {engine.docker} "$@"; }}\n{script}'


def _complain(session: Session, answers: Mapping[str, ssh.Answer]) -> None:
    """Raise for what stands in the way, the hosts with the same trouble together."""
    troubles: dict[tuple[str, str], list[str]] = {}
    for name, answer in answers.items():
        if answer.code != 0:
            troubles.setdefault(_trouble(session, name, answer), []).append(name)
    if troubles:
        (what, hint), names = next(iter(troubles.items()))
        others = sorted({name for named in troubles.values() for name in named} - set(names))
        more = f" (and something else with {', '.join(others)})" if others else ""
        raise ProvisionError(f"{what}{more}", where=", ".join(names), hint=hint)


def _trouble(session: Session, name: str, answer: ssh.Answer) -> tuple[str, str]:
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
            f"let that user: sudo usermod -aG docker {host.user or '$USER'}, and log in again",
        )
    if answer.code == _REFUSED:
        return f"its container engine does not answer: {said}", "start it there: sudo systemctl start docker"
    if answer.code == _SSH_ITSELF:
        problem = collect.connection_problem(host, answer.err)
        return problem.what, problem.hint or ""
    return f"its container engine cannot be looked at: {said or f'exit code {answer.code}'}", "see there: docker info"


def _read(lines: Iterable[str]) -> Engine:
    docker, *rest = list(lines) or ["docker"]
    left: list[tuple[str, str]] = []
    nvidia = False
    for line in rest:
        kind, _, told = line.partition(" ")
        if kind in ("container", "image"):
            run, _, it = told.partition(" ")
            words = ["docker", "rm", "-f", "-v", it] if kind == "container" else ["docker", "image", "rm", it]
            left.append((run, f"{shlex.join(words)} >/dev/null"))
        elif kind == "runtimes":
            nvidia = nvidia or '"nvidia"' in told
        else:
            nvidia = nvidia or line.startswith("/")
    return Engine(docker, nvidia, tuple(left))
