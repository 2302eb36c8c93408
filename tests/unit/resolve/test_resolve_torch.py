"""The resolver: PyTorch by driver, GPU and Python, and its sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from invented_hosts import changed, gpu, host, plan_for, remedies
from rollouts import host_plan

from provision.catalog import OURS
from provision.plan.requirements import Requirements
from provision.survey import Facts


def test_a_requested_release_is_checked_too() -> None:
    for asked in (host(cuda="12.2", gpus=1), host()):
        unknown = plan_for({"a": asked}, Requirements(torch_version="2.9.2"))
        assert "does not know PyTorch 2.9.2; did you mean `2.9.1`?" in unknown.conflicts[0].what


def test_a_release_that_the_catalogue_does_not_know_comes_from_the_users_wheels_or_index() -> None:
    wheels = tuple(f"torch-2.9.2+{tag}-cp311-cp311-manylinux_2_28_x86_64.whl" for tag in ("cpu", "cu118", "cu126", "cu130"))
    given = Requirements(torch_version="2.9.2", wheels=wheels)
    made = plan_for({"a": host(), "b": host("10.0.0.2", cuda="12.4", gpus=1)}, given).hosts
    assert {name: (one.torch.version, one.torch.source) for name, one in made.items()} == {
        "a": ("2.9.2+cpu", "folder"),
        "b": ("2.9.2+cu126", "folder"),
    }
    other = plan_for({"a": host(python="3.12.3")}, replace(given, python_downloads=False))
    assert other.conflicts  # these wheels are for another Python
    index = Requirements(torch_version="2.9.2", torch_index="https://index.example/simple")
    assert plan_for({"a": host(cuda="12.4", gpus=1)}, index).hosts["a"].torch.package == "torch==2.9.2"
    known = replace(index, torch_version="2.13.0", nccl_version="2.4.8", allow_bad=True)
    assert plan_for({"a": gpu("10.2", "7.0")}, known).hosts["a"].torch.package == "torch==2.13.0"


@pytest.mark.parametrize(
    ("cuda", "tag", "nccl"),
    [
        ("12.2", "cu126", "nvidia-nccl-cu12==2.30.7"),
        ("12.8", "cu126", "nvidia-nccl-cu12==2.30.7"),
        ("12.9", "cu126", "nvidia-nccl-cu12==2.30.7"),
        ("13.1", "cu132", "nvidia-nccl-cu13==2.30.7"),
    ],
)
def test_a_driver_decides_build_and_nccl(cuda: str, tag: str, nccl: str) -> None:
    made = plan_for({"a": host(cuda=cuda, gpus=4)}).hosts["a"]
    assert made.torch.version.endswith("+" + tag)
    assert made.nccl.package == nccl
    assert made.slots == 4


def test_an_old_driver_moves_the_whole_inventory_to_an_older_release() -> None:
    made = plan_for({"old": host(cuda="11.8", gpus=1), "new": host("10.0.0.2", cuda="12.8", gpus=1)})
    assert made.hosts["old"].torch.version == "2.7.1+cu118"
    assert made.hosts["new"].torch.version == "2.7.1+cu118"  # its builds bring different NCCLs, which would refuse each other


def test_a_driver_too_old_for_every_release_is_a_conflict_that_names_the_host() -> None:
    made = plan_for({"a": host(), "ancient": gpu("10.2", "7.0", "10.0.0.2")})
    assert {conflict.host for conflict in made.conflicts} == {"ancient"}
    assert all("10.2" in conflict.what and len(remedies(conflict)) == 2 for conflict in made.conflicts)


def test_a_driver_older_than_every_cuda_is_a_conflict_and_not_the_cpu_build() -> None:
    old = {"driver": {"version": "418.87"}, "gpus": [{"name": "V100", "compute_capability": "7.0"}]}
    made = plan_for({"a": changed(host(system=("ubuntu", "20.04")), old)})
    assert not made.hosts
    assert "driver 418.87 is older than every CUDA" in made.conflicts[0].what
    assert remedies(made.conflicts[0]) == (
        "update the NVIDIA driver of a to 455.23 or newer (CUDA 11.1), at most branch 580",
        "--cpu: the CPU build on all hosts, their GPUs stay unused",
    )


def test_a_pascal_gpu_gets_a_build_that_still_has_code_for_it() -> None:
    made = plan_for({"a": gpu("13.0", "6.1")}).hosts["a"]
    assert made.torch.version == "2.14.1+cu126"
    assert made.nccl.cuda == "12.9"
    assert any("no code for compute capability 6.1" in lost.reason for lost in (*made.torch.rejected, *made.nccl.rejected))


def test_a_python_without_wheels_is_a_conflict_with_remedies() -> None:
    made = plan_for({"a": host(python="3.7.3")}, Requirements(python_downloads=False))
    assert "Python 3.7" in made.conflicts[0].what
    assert "provision_python=/usr/bin/python3." in remedies(made.conflicts[0])[0]


OLD = {"system": ("debian", "11"), "python": "3.9.2"}
NEWER_TORCH = Requirements(torch_version="2.13.0")


def test_uv_downloads_a_python_where_no_other_gives_a_plan() -> None:
    made = plan_for({"a": host(**OLD), "b": host("10.0.0.2")}, NEWER_TORCH)
    python, release = made.hosts["a"].python, OURS.python_packages().uv.pythons["3.11"]
    assert (python.source, python.version) == ("uv", release)
    assert python.package == f"python/cpython-{release}-linux-x86_64-gnu/bin/python3.11"
    assert made.hosts["b"].python.source == "host"
    assert any(note.startswith("a: uv downloads Python") for note in made.notes)
    assert host_plan(made.hosts["a"].as_dict()) == made.hosts["a"]


def test_uv_downloads_a_python_for_a_newer_release_only_where_no_other_has_it() -> None:
    made = plan_for({"a": host(**OLD)})
    assert (made.hosts["a"].python.source, made.hosts["a"].torch.version) == ("uv", "2.15.0+cpu")
    without = plan_for({"a": host(**OLD)}, Requirements(python_downloads=False))
    assert (without.hosts["a"].python.source, without.hosts["a"].torch.version) == ("host", "2.8.0+cpu")
    assert any("PyTorch 2.14.1 has no wheel for Python 3.9; what lifts it: a Python 3.10 to 3.14" in note for note in without.notes)
    assert any("CVE-2026-24747" in note for note in without.notes)
    assert plan_for({"a": host()}, NEWER_TORCH).hosts["a"].python.source == "host"
    with_packages = host(system=("ubuntu", "20.04"), python="3.8.10")
    assert plan_for({"a": with_packages}, Requirements(torch_version="2.7.1")).hosts["a"].python.source == "distribution"


def test_uv_downloads_the_usual_python_of_the_architecture() -> None:
    python = plan_for({"a": host(arch="aarch64", **OLD)}, NEWER_TORCH).hosts["a"].python
    known = OURS.python_packages()
    usual, release = known.usual.version, known.uv.pythons[known.usual.version]
    assert python.package == f"python/cpython-{release}-linux-aarch64-gnu/bin/python{usual}"


def test_gpus_that_no_build_has_code_for_are_the_reason_whatever_the_driver_is() -> None:
    k80 = changed(host(python="3.11.2"), {"driver": {"version": "470.223.02"}, "gpus": [{"compute_capability": "3.7"}]})
    conflict = plan_for({"a": k80}).conflicts[0]
    assert conflict.what == "no build of PyTorch 2.14.1 for x86_64 has code for compute capability 3.7"
    assert remedies(conflict)[0].startswith("--cpu")


def test_uv_downloads_no_python_for_bundles_images_or_where_the_inventory_names_one() -> None:
    for made in (
        plan_for({"a": host(**OLD)}, replace(NEWER_TORCH, python_downloads=False)),
        plan_for({"a": host(**OLD)}, replace(NEWER_TORCH, packaged_pythons=True)),
        plan_for({"a": changed(host(**OLD), {"python": {"asked_for": {"path": "/usr/bin/python3.9", "version": "3.9.2"}}})}, NEWER_TORCH),
    ):
        assert made.conflicts[0].what == "PyTorch 2.13.0 has no wheel for Python 3.9"


@pytest.mark.parametrize(
    ("system", "python", "gets"),
    [
        (("rocky", "9.4"), {"version": "3.13.1", "executable": "/usr/local/bin/python3"}, "/usr/bin/python3.12"),
        (("ubuntu", "22.04"), {"version": "3.9.1", "executable": "/opt/conda/bin/python3", "environment": "conda"}, "/usr/bin/python3"),
        (
            ("ubuntu", "20.04"),
            {"version": "3.8.10", "executable": "/usr/bin/python3", "others": [{"path": "/usr/bin/python3.12", "version": "3.12.3"}]},
            "/usr/bin/python3.9",  # 3.12 is of a repository that an image has not
        ),
        (("debian", "12"), {"version": "3.11.2", "executable": "/usr/bin/python3"}, "/usr/bin/python3"),
    ],
)
def test_images_get_a_python_of_the_distributions_packages(system: tuple[str, str], python: dict[str, Any], gets: str) -> None:
    made = plan_for({"a": changed(host(system=system), python=python)}, Requirements(packaged_pythons=True)).hosts["a"]
    assert made.python.package == gets
    named = {"asked_for": {"path": "/usr/local/bin/python3.12", "version": "3.12.1"}}
    kept = plan_for({"a": changed(host(system=system), python={**python, **named})}, Requirements(packaged_pythons=True)).hosts["a"]
    assert kept.python.package == "/usr/local/bin/python3.12"  # which images refuse, by its name


def test_a_wheel_in_a_folder_of_the_hosts_pip_takes_precedence_over_the_index() -> None:
    wheel = "torch-2.15.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    made = plan_for({"a": host(pip={"torch_wheels": [wheel]}), "b": host("10.0.0.2", python="3.13.5", pip={"torch_wheels": [wheel]})})
    assert (made.hosts["a"].torch.source, made.hosts["a"].torch.index) == ("host", None)
    assert made.hosts["b"].torch.source == "index"  # that wheel is for another Python


def test_the_users_wheel_folder_takes_precedence() -> None:
    wheel = "torch-2.15.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert plan_for({"a": host()}, Requirements(wheels=(wheel,))).hosts["a"].torch.source == "folder"


def test_a_requested_index_is_used_with_any_build_of_the_release() -> None:
    torch = plan_for({"a": host()}, Requirements(torch_index="https://mirror.example/simple")).hosts["a"].torch
    assert (torch.package, torch.index) == ("torch==2.15.0", "https://mirror.example/simple")


def test_a_release_whose_builds_agree_about_nccl_comes_before_a_newer_one() -> None:
    def of(capability: str) -> Facts:
        gpus = [{"name": "GPU", "compute_capability": capability}]
        return changed(gpu("13.0"), driver={"version": "580.65.06", "cuda": "13.0"}, gpus=gpus)

    both = {"v100": of("7.0"), "b200": of("10.0")}
    made = plan_for(both)
    assert {name: one.torch.version for name, one in made.hosts.items()} == {"v100": "2.11.0+cu126", "b200": "2.11.0+cu130"}
    assert not any("will refuse to work" in note for note in made.notes)
    assert any("2.11.0 is not the newest: the builds of 2.14.1" in note for note in made.notes)
    assert any(lost.candidate == "torch==2.14.1" and "different NCCLs" in lost.reason for lost in made.hosts["b200"].torch.rejected)
    asked = plan_for(both, Requirements(torch_version="2.13.0"))
    assert any("different NCCLs" in note for note in asked.notes)


def test_the_newest_release_comes_before_the_hosts_own_python() -> None:
    rocky = host(system=("rocky", "9.4"), python="3.9.18")
    made = plan_for({"a": rocky}).hosts["a"]
    assert (made.python.package, made.python.packages, made.torch.version) == ("/usr/bin/python3.12", ("python3.12",), "2.15.0+cpu")
    installed = changed(rocky, python={"version": "3.9.18", "others": [{"path": "/usr/bin/python3.11", "version": "3.11"}]})
    assert plan_for({"a": installed}).hosts["a"].python.package == "/usr/bin/python3.11"  # nothing to install
    without_root = changed(rocky, user={"name": "me", "can_become": False})
    assert plan_for({"a": without_root}).hosts["a"].python.source == "uv"
    stays = plan_for({"a": without_root}, Requirements(python_downloads=False))
    assert stays.hosts["a"].torch.version == "2.8.0+cpu"
    assert any("root, who can install the distribution's python3.12" in note for note in stays.notes)


@pytest.mark.parametrize(
    ("path", "environment"),
    [
        ("/opt/miniconda3/bin/python3", None),
        ("/home/ada/.pyenv/versions/3.8.20/bin/python3", None),
        ("/data/ada/bin/python3", None),
        ("/srv/tools/bin/python3", "venv"),
        ("/srv/tools/bin/python3", "conda"),
    ],
)
def test_a_python_of_a_user_or_an_environment_is_never_the_base(path: str, environment: str | None) -> None:
    python = {"executable": path, "version": "3.13.1", "environment": environment}
    user = {"name": "ada", "home": "/data/ada", "can_become": True}
    bare = changed(host(), python=python, user=user)
    assert plan_for({"a": bare}).hosts["a"].python.package == "/usr/bin/python3"
    both = changed(host(), python={**python, "others": [{"path": "/usr/bin/python3.11", "version": "3.11"}]}, user=user)
    assert plan_for({"a": both}).hosts["a"].python.package == "/usr/bin/python3.11"
    named = changed(host(), python={**python, "asked_for": {"path": path, "version": "3.13.1"}}, user=user)
    assert plan_for({"a": named}).hosts["a"].python.package == path
