"""Images on this machine: labels, names, differences from hosts; and builds that fail."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from provision.base.engine_source import EngineSource
from provision.base.errors import UsageError
from provision.base.terminal import Console
from provision.cli import image, main
from provision.image import build, local_images, recipe, render, targets
from provision.image.output import BuildOutput
from provision.image.render import File
from provision.plan.options import Options
from provision.plan.requirements import Requirements
from provision.remote.progress import LiveProgress, Progress
from provision.sandbox.containers.controller_settings import Settings

ENGINE = EngineSource(b"sources", "0.0.0", "e" * 64)
TARGET = targets.of_system("debian 12", None, Requirements(engine_version=ENGINE.version, engine_sha256=ENGINE.sha256), ENGINE)
LABELS = recipe.recipe(TARGET).labels


def attributes(layers: list[str], **more: str) -> dict[str, Any]:
    return {"Id": "sha256:1", "Size": 5, "RootFS": {"Layers": layers}, "Config": {"Labels": {**LABELS, **more}}}


def test_ready_means_that_these_layers_were_verified() -> None:
    proven = {local_images.VERIFIED_LAYERS: local_images.layers_digest(attributes(["a", "b"]))}
    assert local_images.info("mine:1", attributes(["a", "b"], **proven)).ready
    assert not local_images.info("mine:1", attributes(["a", "b"])).ready
    assert not local_images.info("derived:1", attributes(["a", "b", "c"], **proven)).ready


def test_ready_means_that_these_settings_were_verified() -> None:
    proven = {local_images.VERIFIED_LAYERS: local_images.layers_digest(attributes(["a"]))}
    image = attributes(["a"], **proven)
    assert local_images.info("mine:1", image).ready
    for name, value in (("Env", ["LD_PRELOAD=/x"]), ("User", "root"), ("Entrypoint", ["sh"])):
        other = {**image, "Config": {**image["Config"], name: value}}
        assert not local_images.info("mine:1", other).ready


def test_an_image_of_somebody_else_is_refused() -> None:
    with pytest.raises(UsageError, match="not an image of provision"):
        local_images.info("debian:12", {"Id": "sha256:1", "Size": 5, "RootFS": {}, "Config": {"Labels": None}})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mine", ("mine", "latest")),
        ("mine:1", ("mine", "1")),
        ("localhost:5000/mine", ("localhost:5000/mine", "latest")),
        ("localhost:5000/a/mine:1", ("localhost:5000/a/mine", "1")),
    ],
)
def test_a_name_is_split_into_repository_and_tag(name: str, parts: tuple[str, str]) -> None:
    assert local_images.split_name(name) == parts


def test_an_invalid_name_is_refused() -> None:
    for name in ("Mine!", "a b", "mine@sha256:" + "0" * 64):
        with pytest.raises(UsageError):
            build.checked_tag(name)
    assert build.checked_tag("mine") == "mine:latest"


# --------------------------------------------------------------------------------------------------- when a build fails


STEP = "[system 2/2] RUN apt-get update"


def failure(*printed: str) -> str:
    log = io.StringIO()
    output = BuildOutput(log, Progress())
    for line in ("#5 [build 1/9] RUN true", f"#7 {STEP}", *printed, "------", f" > {STEP}:", "#7 9.1 again"):
        output.note(line)
    assert f"#7 {STEP}\n" in log.getvalue()
    return str(build.failure(["executor failed running [/bin/sh]: exit code: 100"], output, build.Path("/log")))


def test_a_failed_step_is_named_with_its_last_lines() -> None:
    printed = ["#7 sha256:0123", "#7 0.3 Reading lists", "#5 0.4 of another step", "#7 1.5 E: Unable to locate package", "#7 ERROR: failed"]
    message = failure(*printed)
    assert message.startswith(f"{STEP}: it failed; its last lines:\n    Reading lists\n    E: Unable to locate package\n")
    assert "/log" in message


def test_error_lines_of_programs_do_not_fail_a_step() -> None:
    message = failure("#7 0.3 ERROR: No matching distribution", "#5 0.4 ERROR: harmless", "#7 ERROR: exit code: 1")
    assert message.startswith(f"{STEP}: it failed; its last lines:\n    ERROR: No matching distribution\n")


def test_a_silent_step_is_explained_by_buildkits_error() -> None:
    assert f"{STEP}: it failed; its last lines:\n    ERROR: pull: i/o timeout" in failure("#7 ERROR: pull: i/o timeout")


def test_logins_of_mirrors_stay_out_of_log_and_error() -> None:
    log = io.StringIO()
    output = BuildOutput(log, Progress())
    for line in (f"#7 {STEP}", "#7 0.3 Err http://me:s3cr3t@mirror.example/debian", "#7 ERROR: exit code: 1"):
        output.note(line)
    assert "mirror.example" in log.getvalue()
    assert "s3cr3t" not in log.getvalue() + str(output.tail(STEP))


def test_folders_of_a_context_are_open_whatever_the_umask(tmp_path: build.Path) -> None:
    """BuildKit gives the image's folders their modes, and the image's user must get through."""
    before = os.umask(0o077)
    try:
        files = {"files/etc/provision/sshd_config": File(b"x"), "Dockerfile": File(b"FROM x")}
        render.write_files(tmp_path / "built", files)
        render.write(tmp_path / "rendered", files)
    finally:
        os.umask(before)
    for context in ("built", "rendered"):
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / context / "files").rglob("*") if path.is_dir()} == {0o755}


def test_a_build_that_fails_before_its_steps_shows_its_last_lines() -> None:
    message = failure()
    assert message.startswith("before the first step: the build failed; its last lines:\n    executor failed running")


def test_a_full_disk_is_reported() -> None:
    assert "The disk is full." in failure("#7 2.0 cp: error writing: No space left on device", "#7 ERROR: exit code: 1")


def test_the_first_docker_command_with_buildkit_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: build.Path) -> None:
    for name, code in (("without", 1), ("with", 0)):
        command = tmp_path / name / "docker"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\n[ "$DOCKER_BUILDKIT $1 $2" = "1 build --secret" ] && exit {code}\nexit 1\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/without:{tmp_path}/with:/usr/bin:/bin")
    assert build.buildkit() == [f"{tmp_path}/with/docker", "build"]
    monkeypatch.setenv("PATH", f"{tmp_path}/without")
    with pytest.raises(build.ProvisionError, match="no docker command here builds with BuildKit"):
        build.buildkit()


def test_without_an_engine_the_error_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: build.Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    for words in (["build", "--cpu"], ["verify", "mine:1"]):
        assert main.guarded(lambda words=words: main.app(args=["image", *words], prog_name="provision"), debug=False) == 1  # type: ignore[misc]
        assert "No container engine answers at DOCKER_HOST" in capsys.readouterr().err


class _EngineWithoutRegistry:
    """Has the images that were imported; nothing can be pulled."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.images = self.api = self

    def get(self, name: str) -> None:
        if name not in self.known:
            raise docker.errors.ImageNotFound("no such image")

    def pull(self, _name: str, **_: Any) -> Any:
        yield {"error": "manifest unknown", "errorDetail": {"message": "manifest unknown"}}

    def import_image(self, file: str, repository: str, tag: str) -> None:
        assert file.endswith("bookworm.tar")
        assert f"{repository}:{tag}" not in self.known
        self.known.add(f"{repository}:{tag}")


@pytest.mark.parametrize(
    ("base", "missing", "hint"),
    [("nvidia/cuda:1", None, "--base IMAGE"), ("debian:12-slim", "debootstrap needs root", "debootstrap needs root")],
)
def test_an_unavailable_base_gives_a_hint(monkeypatch: pytest.MonkeyPatch, base: str, missing: str | None, hint: str) -> None:
    monkeypatch.setattr(build.debootstrap, "missing", lambda: missing)
    with pytest.raises(build.ProvisionError, match=rf"{base}: the base image is unavailable: manifest unknown") as error:
        build.obtain_base(_EngineWithoutRegistry(), base, Settings(), BuildOutput(io.StringIO(), Progress()))  # type: ignore[arg-type]
    assert hint in str(error.value)


def test_debian_is_made_here_where_it_cannot_be_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = _EngineWithoutRegistry()
    monkeypatch.setattr(build.debootstrap, "missing", lambda: None)
    monkeypatch.setattr(build.debootstrap, "make", lambda suite, _settings, _say: build.Path(f"/cache/{suite}.tar"))
    for _ in ("made", "already there"):
        log = io.StringIO()
        assert build.obtain_base(engine, "debian:12-slim", Settings(), BuildOutput(log, Progress())) == "provision-base:bookworm"
        said = "debian:12-slim: the base image is unavailable: manifest unknown; provision-base:bookworm, made by debootstrap, replaces it"
        assert log.getvalue().splitlines() == ["pulling debian:12-slim", said]
    engine.known.add("debian:12-slim")
    assert build.obtain_base(engine, "debian:12-slim", Settings(), BuildOutput(io.StringIO(), Progress())) == "debian:12-slim"


def test_what_is_fetched_for_a_build_passes_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: build.Path) -> None:
    def fetch(*_: Any, say: Any) -> list[Any]:
        say("fetching torch.whl")
        return []

    def fetch_uv(_arch: str, _index: Any, _catalog: Any, say: Any) -> build.Path:
        say("fetching uv.whl")
        (tmp_path / "uv.whl").touch()
        return tmp_path / "uv.whl"

    (tmp_path / "python/build").mkdir(parents=True)
    monkeypatch.setattr(build.wheels, "gather", fetch)
    monkeypatch.setattr(build.artifacts, "uv_wheel", fetch_uv)
    screen, log = io.StringIO(), io.StringIO()
    progress = LiveProgress(Console(file=screen, width=80, force_terminal=True, color_system=None))
    with progress:
        progress.stage("Build mine:1")
        build._fetch_wheels(TARGET, Options(), tmp_path, BuildOutput(log, progress))
    assert set(log.getvalue().splitlines()) == {"fetching torch.whl", "fetching uv.whl"}
    assert screen.getvalue().endswith("\x1b[2K"), "their line is erased, and nothing comes after it"
    assert "fetching torch.whl\n" not in screen.getvalue()


def test_the_time_of_a_build_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [0.0]

    def passing(by: float, result: Any) -> Any:
        seconds[0] += by
        return result

    made = [SimpleNamespace(name="debian12"), SimpleNamespace(name="debian13")]
    monkeypatch.setattr(image, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(image, "_plan", lambda *_: passing(30, made))
    monkeypatch.setattr(build, "check_mirror", lambda *_: None)
    monkeypatch.setattr(build, "build", lambda _target, tag, *_, **__: passing(12, build.Built(tag, "sha256:0", 0, build.Path("log"))))
    assert main.guarded(lambda: main.app(args=["image", "build", "--cpu"], prog_name="provision"), debug=False) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert " 42 s, " in first
    assert " 12 s, " in second
