"""Building an image with BuildKit, by the docker command; certificates, proxies and mirrors of this machine are secrets of its steps.

Python packages are fetched here, with this machine's pip settings, and no step asks an index. An image gets its name when all of it is
there: what fails or is interrupted leaves nothing but the engine's cache, with which the next build continues.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import docker.errors
from docker import DockerClient

from provision.base import aptsources, paths, signals
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.catalog import OURS
from provision.diagnosis import logs
from provision.image import local_images, render
from provision.image.output import BuildOutput
from provision.image.recipe import recipe
from provision.image.targets import Locked, Target
from provision.install import artifacts, wheels
from provision.plan.options import Options
from provision.remote.progress import Progress
from provision.sandbox import debootstrap
from provision.sandbox.containers import container_engine, controller_settings, image_names
from provision.sandbox.containers.controller_settings import Settings
from provision.sandbox.docker_engine import base_image

_MADE_BASE = "provision-base"  # repository of the images that debootstrap makes; the tag is the suite
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")
_LAST = 12  # lines of an error
_END_S = 30.0  # until a build that is interrupted has ended its steps


@dataclass(frozen=True)
class Built:
    """A finished image: its name, id, size in bytes and log."""

    tag: str
    image: str
    size: int
    log: Path


def build(target: Target, tag: str, options: Options, progress: Progress, *, mirror: str | None = None, cache: bool = True) -> Built:
    """Build one image and name it ``tag``.

    Args:
        mirror: where the base's distribution is taken from, instead of where this machine takes its own from.
        cache: use what earlier builds left.

    Raises:
        ProvisionError: no engine, no BuildKit, no base, no wheel, a step that failed (with its last lines), a full disk.
    """
    progress.stage(f"Build {tag}")
    settings = controller_settings.read(os.environ, prefix=Path(sys.prefix))
    artifacts.torch_wheel(target.host, options.wheels)  # the user's must be there
    named = False
    try:
        with (
            local_images.engine() as client,
            signals.termination_as_interrupt(),
            container_engine.explained(f"building {tag}"),
            (path := _log(target.name)).open("w", encoding="utf-8") as log,
            _work_folder() as work,
        ):
            output = BuildOutput(log, progress)
            command = buildkit()
            _refuse_other_processor(client, target)
            base = target.base.reference
            made = _MADE_BASE, debootstrap.suite_of(base) or ""
            base = base_image(client, base, made, settings, output.doing, remark=lambda text: _remark(text, output, progress))
            target = replace(target, base=replace(target.base, reference=base))
            folder = work / "context"
            locked = _fetch_wheels(target, options, folder, output)
            render.write_files(folder, render.context(replace(target, locked=locked), fetched=True))
            words, environment = _access(settings, target, mirror, work)
            words += [] if cache else ["--no-cache"]
            image = _run([*command, *words], environment, folder, output, path)
            with signals.deferred():
                client.images.get(image).tag(*local_images.split_name(tag))
                named = True
            size = int(client.images.get(image).attrs["Size"])
    except KeyboardInterrupt:
        what = f"interrupted after the build: {tag} is there" if named else "interrupted; no image was named, and no step runs any more"
        raise Interrupted(what, hint="run the same command again: it continues from the cache") from None
    finally:
        progress.close()
    return Built(tag, image, size, path)


def _remark(text: str, output: BuildOutput, progress: Progress) -> None:
    """A line that stays, on the terminal and in the log."""
    output.note(text)
    progress.line(text)


def buildkit() -> list[str]:
    """The docker command that builds with BuildKit and takes secrets: of several in PATH, the first that can.

    Raises:
        ProvisionError: there is none.
    """
    for folder in os.get_exec_path():
        path = shutil.which("docker", path=folder)
        probe = [str(path), "build", "--secret", "id=probe", "--help"]
        if path and subprocess.run(probe, env=_environment(), capture_output=True, check=False).returncode == 0:
            return [path, "build"]
    what = "no docker command here builds with BuildKit"
    raise ProvisionError(what, hint="install Docker's buildx plugin (docker-buildx-plugin), or on Debian and Ubuntu the package docker.io")


def check_mirror(mirror: str | None, targets: Sequence[Target]) -> None:
    """Raise UsageError for a mirror of a distribution that is not Debian or Ubuntu."""
    others = [each.name for each in targets if each.host.family != "debian"]
    if mirror is not None and others:
        what = "--mirror: only Debian's and Ubuntu's packages can be taken from a mirror"
        raise UsageError(what, where=", ".join(others), hint="leave it out, and begin with an image that names your mirror: --base IMAGE")


def checked_tag(tag: str) -> str:
    """A name for an image, ``NAME:TAG`` (``:latest`` where there is none). Raises UsageError."""
    if "@" in tag:
        raise UsageError(f"'{tag}': a new image cannot be named by a digest.", hint="Name it like mine:1.")
    return image_names.checked(tag)


def _refuse_other_processor(client: DockerClient, target: Target) -> None:
    """Raise ProvisionError where the engine's machine has another architecture: an image is built by running its steps."""
    arch = target.host.arch
    there = target.catalog.os().kernel_name(str(client.info().get("Architecture", arch)))
    if there != arch:
        what = f"this machine's container engine runs on {there}, and the image is for {arch}"
        raise ProvisionError(what, hint="build it on a machine of that kind: provision image render … -o DIR, then docker build there")


def _fetch_wheels(target: Target, options: Options, context: Path, output: BuildOutput) -> Locked:
    """Put the wheels of every environment into the context; returns their names, versions and checksums."""
    made = recipe(target)
    platform = wheels.Platform(made.python, target.host.arch, target.catalog.images().distributions.libc[target.base.system])
    indexes = wheels.Indexes(options.index_url, made.torch_index, options.wheels)
    locked = {}
    for environment, pins in made.environments.items():
        folder, before = context / "python" / environment, target.locked.get(environment, [])
        locked[environment] = wheels.gather(pins, platform, folder, indexes, before, say=output.doing)
    uv_wheel = artifacts.uv_wheel(target.host.arch, options.index_url, target.catalog, output.doing)
    shutil.copyfile(uv_wheel, context / "python/build" / uv_wheel.name)
    return locked


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    """A folder for the context and the secrets of one build, on the cache's file system; those of killed builds are removed."""
    builds = paths.cache() / "builds"
    builds.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in builds.iterdir():
        if not Path(f"/proc/{left.name.partition('-')[0]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=builds, prefix=f"{os.getpid()}-"))
    try:
        yield folder
    finally:
        with signals.ignored():
            shutil.rmtree(folder, ignore_errors=True)


def _access(settings: Settings, target: Target, mirror: str | None, folder: Path) -> tuple[list[str], dict[str, str]]:
    """(options of `docker build`, its environment) by which steps reach packages: proxies, and apt's options, sources and certificates.

    All of it may hold passwords. It goes into the environment and files that only this user reads, and into no layer.
    """
    proxies = {name: value for name in _PROXIES if (value := (settings.proxies or {}).get(name))}
    words = [word for name in proxies for spelt in (name, name.upper()) for word in ("--build-arg", spelt)]
    environment = {**_environment(), **{spelt: value for name, value in proxies.items() for spelt in (name, name.upper())}}
    sources = _sources(settings, target, mirror)
    if target.host.family == "debian":
        for name, content in _apt(settings, target, sources).items():
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(content, encoding="utf-8")
            words += ["--secret", f"id={name},src={path}"]
    places = [*(value for name, value in proxies.items() if name != "no_proxy"), *(settings.apt or {}).values(), *sources.split()]
    if any(map(controller_settings.is_loopback, places)):
        words += ["--network", "host"]  # a step's own network does not reach this machine's loopback address
    return words, environment


def _apt(settings: Settings, target: Target, sources: str) -> dict[str, str]:
    """Secret → its text: apt's options, and the files that they name."""
    options, files = controller_settings.apt_conf(settings), {}
    if sources:
        options += 'Dir::Etc::sourcelist "/run/secrets/sources";\n'
        nccl = target.host.nccl
        if nccl is None or nccl.source == "wheel":  # else NVIDIA's repository is among the base's own
            options += 'Dir::Etc::sourceparts "/dev/null";\n'
        files["sources"] = sources
    if settings.bundle:  # a minimal base trusts no one yet, and the mirror may speak https
        options += 'Acquire::https::CaInfo "/run/secrets/certificates";\n'
        files["certificates"] = settings.bundle
    return {"apt": options, **files}


def _sources(settings: Settings, target: Target, mirror: str | None) -> str:
    """The text of ``sources.list`` for the base; empty where it keeps its own."""
    distribution, version = target.base.system.split()
    place = aptsources.mirror_at(mirror, distribution) if mirror else settings.mirror if settings.distribution == distribution else None
    listed = target.catalog.os().distribution(distribution)
    codename = listed.codenames.get(version) if listed else None
    return aptsources.sources_list(place, codename) if place and codename else ""


def _environment() -> dict[str, str]:
    """Environment of the docker command: BuildKit, with the engine that the SDK uses."""
    return {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDX_BUILDER": "default", "DOCKER_CONTEXT": "default"}


def _run(command: Sequence[str], environment: Mapping[str, str], folder: Path, output: BuildOutput, log: Path) -> str:
    """Run the build; returns the image's id."""
    names = folder.parent / "image-id"
    words = [*command, "--progress", "plain", "--iidfile", str(names), str(folder)]
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    last: list[str] = []
    try:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        for line in process.stdout:
            last = [*last[-_LAST:], line.rstrip()]
            output.note(line.rstrip())
        code = process.wait()
    except BaseException:
        with signals.ignored():
            _end(process)
        raise
    if code != 0 or not names.exists():
        raise failure(last, output, log)
    return names.read_text(encoding="utf-8").strip()


def _end(process: subprocess.Popen[str]) -> None:
    """Stop the docker command as Ctrl-C does, which also stops the running steps."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # its plugin, too
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
            return


def failure(last: Sequence[str], output: BuildOutput, log: Path) -> ProvisionError:
    lines = (output.tail(output.failed) if output.failed else []) or list(last)
    text = "\n".join([*lines, *last])
    if "no space left on device" in text.lower():
        return container_engine.explain(docker.errors.APIError("no space left on device"), output.step)
    known = logs.root_cause(text, output.failed, OURS)
    advice = f"{known.what}: {known.fix[0]}; the whole log: {log}" if known else f"read the whole log: {log}"
    what = "it failed; its last lines:" if output.failed else "the build failed; its last lines:"
    return ProvisionError("\n    ".join([what, *lines]), where=output.failed[:110] or "before the first step", hint=advice)


def _log(name: str) -> Path:
    folder = paths.home() / "builds"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{name}.log"
