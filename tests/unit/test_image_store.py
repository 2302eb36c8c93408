"""What images say of themselves, and where hosts differ from one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import docker.errors
import pytest

from provision.base.engine_source import EngineSource
from provision.base.errors import UsageError
from provision.cli import main
from provision.image import build, labels, recipe, store, targets
from provision.image.gateway import Gateway
from provision.image.origins import Origins
from provision.image.stream import Line, Step
from provision.image.view import View
from provision.plan.requirements import Wishes
from provision.sandbox.settings import Settings

ENGINE = EngineSource(b"sources", "0.0.0", "e" * 64)
TARGET = targets.of_system("debian 12", None, Wishes(engine_version=ENGINE.version, engine_sha256=ENGINE.sha256))
LABELS = recipe.recipe(TARGET, ENGINE).labels


def attributes(layers: list[str], **more: str) -> dict[str, Any]:
    return {"Id": "sha256:1", "Size": 5, "RootFS": {"Layers": layers}, "Config": {"Labels": {**LABELS, **more}}}


def test_ready_means_that_these_very_layers_were_run() -> None:
    proven = {labels.VERIFIED_LAYERS: labels.layers(attributes(["a", "b"]))}
    assert labels.read("mine:1", attributes(["a", "b"], **proven)).ready
    assert not labels.read("mine:1", attributes(["a", "b"])).ready
    assert not labels.read("derived:1", attributes(["a", "b", "c"], **proven)).ready


def test_ready_means_that_they_were_run_with_these_settings() -> None:
    proven = {labels.VERIFIED_LAYERS: labels.layers(attributes(["a"]))}
    image = attributes(["a"], **proven)
    assert labels.read("mine:1", image).ready
    for name, value in (("Env", ["LD_PRELOAD=/x"]), ("User", "root"), ("Entrypoint", ["sh"])):
        other = {**image, "Config": {**image["Config"], name: value}}
        assert not labels.read("mine:1", other).ready


def test_an_image_of_somebody_else_is_refused() -> None:
    with pytest.raises(UsageError, match="no image of provision"):
        labels.read("debian:12", {"Id": "sha256:1", "Size": 5, "RootFS": {}, "Config": {"Labels": None}})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mine", ("mine", "latest")),
        ("mine:1", ("mine", "1")),
        ("localhost:5000/mine", ("localhost:5000/mine", "latest")),
        ("localhost:5000/a/mine:1", ("localhost:5000/a/mine", "1")),
    ],
)
def test_names_have_two_parts(name: str, parts: tuple[str, str]) -> None:
    assert labels.parted(name) == parts


def test_a_name_that_cannot_be_given_is_refused() -> None:
    for name in ("Mine!", "a b", "mine@sha256:" + "0" * 64):
        with pytest.raises(UsageError):
            build.checked_tag(name)
    assert build.checked_tag("mine") == "mine:latest"


def test_hosts_that_hold_the_same_do_not_differ() -> None:
    told = labels.read("mine:1", attributes(["a"]))
    assert store.differences({"node1": TARGET.host, "node2": TARGET.host}, told) == []


def test_a_host_knows_its_python_more_exactly_than_an_image() -> None:
    told = labels.read("mine:1", attributes(["a"]))
    exact, other = (replace(TARGET.host, python=replace(TARGET.host.python, version=version)) for version in ("3.11.2", "3.13.5"))
    assert told.of("python") == "3.11"
    assert store.differences({"node1": exact, "node2": other}, told) == ["python: 3.13, in the image 3.11 (node2)"]


def test_what_differs_is_said_once_with_its_hosts() -> None:
    told = labels.read("mine:1", attributes(["a"]))
    host, torch = TARGET.host, TARGET.host.torch
    assert torch is not None
    older = replace(host, torch=replace(torch, version="2.11.0+cpu"), engine=replace(host.engine, sha256="f" * 64))
    lines = store.differences({"node1": older, "node2": older, "node3": None, "node4": replace(host, torch=None)}, told)
    assert lines == [
        "engine.sha256: ffffffffffff, in the image eeeeeeeeeeee (node1, node2)",
        "torch: 2.11.0+cpu, in the image 2.13.0+cpu (node1, node2)",
        "nothing is installed (node3)",
        "torch: nothing, in the image 2.13.0+cpu (node4)",
    ]


# --------------------------------------------------------------------------------------------------- when a build fails


def failure(why: str, *printed: str) -> str:
    with View() as view, Gateway("127.0.0.1", Origins(Settings())) as gateway:
        view.note(Step(2, 9, "RUN apt-get update"))
        for line in printed:
            view.note(Line(line))
        gateway.refused.append("mirror.example/x: mirror.example answers 503 Busy")
        return str(build._failure(why, view, gateway, build.Path("/log")))


def test_a_step_that_failed_is_named_with_its_last_lines_and_what_could_not_be_had() -> None:
    said = failure("The command '/bin/sh -c …' returned a non-zero code: 100", "Reading lists", "E: Unable to locate package")
    assert said.startswith("Step 2/9: RUN apt-get update: it failed with exit code 100")
    assert "E: Unable to locate package" in said
    assert "could not be had: mirror.example/x: mirror.example answers 503 Busy" in said
    assert "/log" in said


@pytest.mark.parametrize("why", ["write /x: no space left on device", "returned a non-zero code: 1"])
def test_a_full_disk_is_said_as_such(why: str) -> None:
    assert "The disk is full." in failure(why, "cp: error writing: No space left on device")


def test_no_engine_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: build.Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path))
    for words in (["build", "--cpu"], ["verify", "mine:1"], ["ls"], ["rm", "mine:1"], ["push", "mine:1"]):
        assert main.guarded(lambda words=words: main.app(args=["image", *words], prog_name="provision"), debug=False) == 1  # type: ignore[misc]
        assert "No container engine answers at DOCKER_HOST" in capsys.readouterr().err


def test_a_base_that_cannot_be_had_says_what_to_do() -> None:
    class Images:
        def get(self, _name: str) -> None:
            raise docker.errors.ImageNotFound("no such image")

    class Api:
        def pull(self, _name: str, **_: Any) -> Any:
            yield {"error": "manifest unknown", "errorDetail": {"message": "manifest unknown"}}

    class Engine:
        images, api = Images(), Api()

    with (
        View() as view,
        pytest.raises(build.ProvisionError, match=r"nvidia/cuda:1: the base image cannot be had: manifest unknown") as error,
    ):
        build.base_image(Engine(), "nvidia/cuda:1", view)  # type: ignore[arg-type]
    assert "--base IMAGE" in str(error.value)
