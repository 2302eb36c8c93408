"""Brings an image to the hosts' engines: pulled from its registry by digest, else copied over SSH without the layers that are there.

On each host it gets a name of the run's own, which goes at the end: what else the host has, and how that is called, stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import docker.errors

from provision.base import signals
from provision.base.errors import ProvisionError
from provision.image import archive, far, labels
from provision.image.archive import Archive
from provision.image.far import Engine
from provision.remote import shell
from provision.remote.session import Session
from provision.sandbox import engine as own_engine

PULL_S = 3600.0
_COPIES_AT_ONCE = 8  # they share this machine's way out
_POLL_S = 0.2
_SAID = 64 << 10


@dataclass
class Source:
    """Where an image can be had from.

    Attributes:
        name: as the user called it.
        attributes: what an engine tells of it; None while only its registry knows.
        digests: ``NAME@sha256:…``, at which registries have it.
        kept: whether this machine's own engine has it, so that it can be copied.
        file: the archive that it is.
    """

    name: str
    attributes: dict[str, Any] | None = None
    digests: tuple[str, ...] = ()
    kept: bool = False
    file: Archive | None = None

    @property
    def called(self) -> str:
        """The name under which it stays where it is kept; empty for a file that names none."""
        return self.file.name if self.file is not None else self.name


def source(name: str) -> Source:
    """What ``name`` stands for: a file of `docker save`, an image that this machine keeps, else one that the hosts can pull.

    Raises:
        UsageError: it is no image of ours, or no name of an image.
    """
    if Path(name).is_file():
        held = archive.read(Path(name))
        labels.read(name, held.attributes)
        return Source(name, held.attributes, file=held)
    try:
        client = own_engine.connect()
    except ProvisionError:
        return Source(name)  # the hosts have engines; this machine needs none for pulling
    try:
        with own_engine.explained(f"looking at {name}"):
            attributes = client.images.get(name).attrs
    except ProvisionError as refused:
        if isinstance(refused.__cause__, docker.errors.ImageNotFound):
            return Source(name)
        raise
    finally:
        client.close()
    labels.read(name, attributes)
    return Source(name, attributes, tuple(attributes.get("RepoDigests") or ()), kept=True)


@contextlib.contextmanager
def brought(session: Session, engines: Mapping[str, Engine], wanted: Source, *, keep: bool) -> Iterator[dict[str, str]]:
    """Have the image on every host; yields what each of them calls it. ``wanted`` knows its attributes then.

    Args:
        keep: leave it there, under the name that it has here.

    Raises:
        ProvisionError: a host could not get it, or got another one.
    """
    ours = f"{far.NAME}:{session.run_id}"
    session.progress.stage(f"Bring {wanted.name}", list(engines))
    before = _before(session, engines, wanted)
    held = _held(before, wanted)
    lacking = {name: each for name, each in engines.items() if name not in held}
    come: dict[str, list[str]] = {name: [ours] for name in lacking}  # by which names it may be there afterwards
    try:
        pulled = _pull(session, lacking, wanted, ours, come)
        _copy(session, {name: each for name, each in lacking.items() if name not in pulled}, wanted, ours)
        _verify(session, lacking, wanted, ours)
        if keep and lacking:
            _tell_renamed(session, before, list(lacking), wanted)
            _keep(session, {name: each for name, each in lacking.items() if name not in pulled or "@" not in wanted.name}, wanted, ours)
            come = {name: [ours] for name in lacking}
        yield {**dict.fromkeys(lacking, ours), **held}
    finally:
        # What a host had under one of these names before is the host's own; `_pull` has put it back where it was.
        gone = {name: [each for each in names if each == ours or not _under(before[name], each)] for name, names in come.items()}
        with signals.ignored():
            far.put_away(session, engines, {name: [_untagging(each) for each in names] for name, names in gone.items()})


def _before(session: Session, engines: Mapping[str, Engine], wanted: Source) -> dict[str, list[dict[str, Any]]]:
    """What the hosts have of it, or under its name."""
    known = [str(wanted.attributes["Id"]), *wanted.digests] if wanted.attributes is not None else []
    return far.inspect(session, engines, [*known, *([wanted.called] if wanted.called else [])])


def _held(before: Mapping[str, Sequence[Mapping[str, Any]]], wanted: Source) -> dict[str, str]:
    """The hosts that have this very image, and its id there. Of one that only its registry knows, all or none are believed to."""
    if wanted.attributes is None:
        alike = {labels.layers(each[0]) if each else "" for each in before.values()}
        if len(alike) > 1 or "" in alike:
            return {}
        wanted.attributes = dict(next(iter(before.values()))[0])
        labels.read(wanted.name, wanted.attributes)
    same = labels.layers(wanted.attributes)
    return {name: str(one["Id"]) for name, each in before.items() for one in each if labels.layers(one) == same}


def _under(before: Sequence[Mapping[str, Any]], reference: str) -> bool:
    """Whether a host had an image under this name."""
    repository, tag = labels.parted(reference)
    names = {str(name) for each in before for name in [*(each.get("RepoTags") or ()), *(each.get("RepoDigests") or ())]}
    return reference in names or f"{repository}:{tag}" in names


def _pull(session: Session, engines: Mapping[str, Engine], wanted: Source, ours: str, come: dict[str, list[str]]) -> list[str]:
    """The hosts that pulled it.

    What this machine can bring itself is not insisted on; of what it cannot, the first host finds out the digest for the others.
    """
    own = wanted.kept or wanted.file is not None
    if not engines or (own and not wanted.digests):
        return []
    names, reference = list(engines), wanted.digests[0] if own else wanted.name
    pulled: list[str] = []
    for some in [names] if "@" in reference else [names[:1], names[1:]]:
        if not some:
            continue
        for name in some:
            come[name].append(reference)
        answers = far.on_engines(session, {name: (engines[name], _pulling(reference, ours)) for name in some}, patience=PULL_S)
        for name, answer in answers.items():
            if answer.code == 0:
                pulled.append(name)
                session.progress.line(f"{name}: pulled {reference}")
            elif not own:
                todo = "see that the host reaches the registry and is logged in there; or have the image here, from where it is copied"
                raise ProvisionError(f"it could not pull {wanted.name}: {answer.complaint}", where=name, todo=todo)
        if "@" not in reference:
            reference = _digest(answers[some[0]].out, reference)
            come[some[0]].append(reference)
    return pulled


def _pulling(reference: str, ours: str) -> str:
    """Pulls an image and names it for the run; a name that the host has for another image stays with that one."""
    word = shlex.quote(reference)
    told = "docker image inspect --format"
    return f"""old=$({told} '{{{{.Id}}}}' {word} 2>/dev/null)
docker pull -q {word} >/dev/null && docker tag {word} {ours} || exit 1
echo pulled=
{told} '{{{{json .RepoDigests}}}}' {ours}
case {word} in *@*) ;; *) [ -z "$old" ] || docker tag "$old" {word} ;; esac
"""


def _digest(said: str, reference: str) -> str:
    """By which digest what was just pulled is known; the reference itself where the engine names none."""
    known = json.loads(said.rpartition("pulled=")[2].strip() or "null") or []
    repository = labels.parted(reference)[0]
    return next((each for each in known if each.startswith(f"{repository}@")), known[0] if known else reference)


def _copy(session: Session, engines: Mapping[str, Engine], wanted: Source, ours: str) -> None:
    if not engines:
        return
    saved = session.folder / "image.tar"
    try:
        held = wanted.file or archive.read(_save(wanted, saved, session))
        failed = _load(session, engines, held, ours, {name: held.there(each.layers) for name, each in engines.items()})
        if failed:  # an engine that keeps its layers otherwise takes nothing from itself
            failed = _load(session, {name: engines[name] for name in failed}, held, ours, dict.fromkeys(failed, 0))
        for name, answer in failed.items():
            raise ProvisionError(f"it did not take the image: {answer.complaint}", where=name)
    finally:
        saved.unlink(missing_ok=True)


def _save(wanted: Source, path: Path, session: Session) -> Path:
    session.progress.line(f"saving {wanted.name}, which is copied")
    client = own_engine.connect()
    try:
        with own_engine.explained(f"saving {wanted.name} to {path}"), path.open("wb") as file:
            for chunk in client.images.get(str((wanted.attributes or {})["Id"])).save():
                file.write(chunk)
    finally:
        client.close()
    return path


def _load(session: Session, engines: Mapping[str, Engine], held: Archive, ours: str, without: Mapping[str, int]) -> dict[str, shell.Answer]:
    """Copies to these hosts, some at a time; those that did not take it, with what they said. Raises Interrupted after Ctrl-C."""
    processes: list[subprocess.Popen[bytes]] = []
    answers: dict[str, shell.Answer] = {}
    with signals.noted() as interrupted, ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:

        def one(name: str) -> None:
            if interrupted.is_set():
                return
            left, whole = sum(held.sizes[without[name] :]), sum(held.sizes)
            rest = "; it has the other layers" if left < whole else ""
            session.progress.line(f"{name}: copying {left / 1e6:.0f} of {whole / 1e6:.0f} MB{rest}")
            command = far.calling(engines[name], "docker load -q 2>&1")
            with shell.start(session, name, command, stderr=subprocess.STDOUT) as process:
                processes.append(process)
                stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
                with contextlib.suppress(BrokenPipeError):  # it gave up; what it said follows
                    held.write(stdin, ours, without=without[name])
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
                said = stdout.read(_SAID).decode(errors="replace")
            answers[name] = shell.Answer(process.returncode, said, "")

        waiting = {pool.submit(one, name) for name in engines}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_POLL_S)
                if interrupted.is_set():
                    _end(processes)
                for each in done:
                    each.result()
        except BaseException:  # one could not be copied: the others are not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            _end(processes)
            raise
    if interrupted.is_set():
        session.abort()
    return {name: answer for name, answer in answers.items() if answer.code != 0}


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _verify(session: Session, engines: Mapping[str, Engine], wanted: Source, ours: str) -> None:
    found = far.inspect(session, engines, [ours])
    if wanted.attributes is None:
        wanted.attributes = next((each[0] for each in found.values() if each), None)
        if wanted.attributes is not None:
            labels.read(wanted.name, wanted.attributes)
    for name, each in found.items():
        if not each or wanted.attributes is None or labels.layers(each[0]) != labels.layers(wanted.attributes):
            has = f"it is {each[0]['Id'][7:19]} there" if each else "it is not there"
            raise ProvisionError(f"the image that came is not {wanted.name}: {has}", where=name, todo="run the same command again")


def _keep(session: Session, engines: Mapping[str, Engine], wanted: Source, ours: str) -> None:
    """The name under which it stays. What is named by a digest has none but its registry's: it gets the digest's beginning as its tag."""
    repository, _, digest = wanted.called.partition("@sha256:")
    called = shlex.quote(f"{repository}:{digest[:12]}" if digest else wanted.called)
    scripts = {name: (each, f"docker tag {ours} {called}") for name, each in engines.items()}
    for name, answer in (far.on_engines(session, scripts) if scripts else {}).items():
        if answer.code != 0:
            raise ProvisionError(answer.complaint, where=f"{name}, keeping the image")


def _tell_renamed(session: Session, before: Mapping[str, Sequence[Mapping[str, Any]]], names: Iterable[str], wanted: Source) -> None:
    """As after `docker pull`, the name goes to the new image; the one before stays, and is said, for it has only its id now."""
    for name in names:
        for old in before[name]:
            if wanted.called in (old.get("RepoTags") or ()):
                session.progress.line(f"{name}: {wanted.called} was {old['Id'][7:19]} there, which stays without that name", "yellow")


def _untagging(reference: str) -> str:
    word = shlex.quote(reference)
    return f"docker version >/dev/null && {{ ! docker image inspect {word} >/dev/null 2>&1 || docker image rm {word} >/dev/null; }}"
