"""The resolver: NCCL built from source: CUDA, toolkit and builders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from invented_hosts import FROM_SOURCE, TOOLKITS, changed, equipped, plan_for, remedies, toolkit

from provision.catalog import OURS
from provision.plan.requirements import Requirements
from provision.resolve import HostRequirements
from provision.resolve.host_classes import host_class_of


def given(version: str, **more: Any) -> Requirements:
    name = "anything.tar.gz"
    return Requirements(nccl_source="source", nccl_tarball=name, nccl_tarball_version=version, nccl_tarball_sha256="1" * 64, **more)


def test_nccl_is_built_for_the_cuda_of_the_compiler_and_the_gpus_of_all_that_get_it() -> None:
    made = plan_for(
        {
            "h100": equipped(toolkit("12.4.1"), "12.6", "9.0", "10.0.0.2"),
            "without": equipped(toolkit(None), "12.4", "8.0"),
            "older": equipped(toolkit("12.2"), "12.2", "7.5", "10.0.0.3"),
        },
        FROM_SOURCE,
    ).hosts
    builders = {name: tuple((each.host, each.toolkit) for each in one.nccl.builders) for name, one in made.items()}
    assert {name: (one.nccl.version, one.nccl.cuda, builders[name]) for name, one in made.items()} == {
        "h100": ("2.29.7", "12.4", (("h100", "/usr/local/cuda"),)),
        "without": ("2.29.7", "12.4", (("h100", "/usr/local/cuda"),)),
        "older": ("2.29.7", "12.2", (("older", "/usr/local/cuda"),)),
    }
    assert made["h100"].nccl == replace(made["without"].nccl, why=made["h100"].nccl.why, rejected=made["h100"].nccl.rejected)
    code = "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90"
    assert made["h100"].nccl.options == (f"NVCC_GENCODE={code}",)
    assert made["h100"].nccl.url == "https://github.com/NVIDIA/nccl/archive/refs/tags/v2.29.7-1.tar.gz"
    assert made["h100"].nccl.sha256 == "e67239212c395bfdb398a7519491840d06fdf6b599c299f97c7ed0109777bba1"
    assert "make" in made["h100"].packages
    assert made["h100"].library_folders[1] == "/opt/provision/nccl-built/lib"
    assert any("built on h100, once for" in why for why in made["without"].nccl.why)


def test_gpus_that_the_facts_do_not_name_get_what_the_makefile_takes_by_default() -> None:
    unknown = changed(equipped(toolkit("12.4"), "12.4"), gpus=[{"name": "GPU"}])
    assert plan_for({"a": unknown}, FROM_SOURCE).hosts["a"].nccl.options == ()


NEEDS_NVCC = "it needs a CUDA compiler, nvcc, and there is none (in CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda*, /opt/cuda and"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (toolkit(None), NEEDS_NVCC),
        (toolkit("12.4", nvcc=False), NEEDS_NVCC),
        (None, "the facts do not say whether there is a CUDA compiler"),
        (toolkit("13.0"), "its CUDA compiler is newer than the driver's CUDA 12.4: that at /usr/local/cuda is of 13.0"),
    ],
)
def test_without_a_fitting_compiler_the_conflict_names_the_host_and_two_remedies(found: dict[str, Any] | None, said: str) -> None:
    a, like_it = equipped(toolkit("12.4"), "12.4"), equipped(found, "12.4", address="10.0.0.2")
    alone = changed(like_it, {"os": {"id": "ubuntu", "version": "24.04"}})
    (conflict,) = plan_for({"a": a, "alone": alone}, FROM_SOURCE).conflicts
    assert conflict.host == "alone"
    assert said in conflict.what
    assert remedies(conflict) == (
        "leave --nccl source out: the plan finds one that fits",
        "install a CUDA toolkit of 12.4 or older with nvcc on alone",
    )


def test_a_compiler_that_does_not_support_the_gpu_does_not_count() -> None:
    (conflict,) = plan_for({"a": equipped(toolkit("12.4"), "12.8", "10.0")}, FROM_SOURCE).conflicts
    assert "no CUDA compiler of it fits driver and GPUs: that at /usr/local/cuda is of 12.4" in conflict.what


def test_of_several_toolkits_the_largest_that_the_driver_runs_is_chosen() -> None:
    made = plan_for({"a": equipped(TOOLKITS, "12.6")}, FROM_SOURCE).hosts["a"].nccl
    (builder,) = made.builders
    assert (made.cuda, builder.toolkit) == ("12.4", "/usr/local/cuda-12.4")
    assert builder.why == "it is in a usual place, of CUDA 12.4, the largest that driver and GPUs support"
    assert f"with the CUDA toolkit at /usr/local/cuda-12.4 (on a: {builder.why})" in made.why
    assert plan_for({"a": equipped(TOOLKITS, "12.2")}, FROM_SOURCE).hosts["a"].nccl.builders[0].toolkit == "/home/me/cuda"
    newest = plan_for({"a": equipped(TOOLKITS, "13.0", "8.0")}, FROM_SOURCE).hosts["a"].nccl
    assert newest.builders[0].toolkit == "/usr/local/cuda"


def test_hosts_whose_toolkits_are_the_same_besides_unknown_facts_are_one_class() -> None:
    folder = {"path": "/usr/local/cuda", "nvcc": True}
    listed = [{**folder, "version": "12.4.1"}, {**folder, "version": "12.4.0", "libraries": 7}, {**folder, "version": "12.5"}]
    classes = [host_class_of(equipped({"toolkits": [each], "nvcc": None}, "12.6"), OURS) for each in listed]
    assert classes[0] == classes[1] != classes[2]


def test_a_toolkit_that_an_earlier_run_built_with_is_kept() -> None:
    kept = {"a": HostRequirements(builds=(("nccl-2.21.5-1.tar.gz", "11.8"), ("torch==2.11.0+cu126", "12.4")))}
    made = plan_for({"a": equipped(TOOLKITS, "12.6")}, FROM_SOURCE, **kept).hosts["a"].nccl
    assert (made.cuda, made.builders[0].toolkit) == ("11.8", "/home/me/cuda")


def test_sources_whose_checksum_is_not_known_need_a_file() -> None:
    requirements = Requirements(nccl_source="source", nccl_version="2.28.9")
    (conflict,) = plan_for({"a": equipped(toolkit("12.4"), "12.4")}, requirements).conflicts
    assert "no checksum of the sources of NCCL 2.28.9 is known" in conflict.what
    assert remedies(conflict)[1] == "--nccl nccl-2.28.9-1.tar.gz, your own file"


@pytest.mark.parametrize(
    ("version", "said"), [("2.22.3", "its checksum is not that of the official one"), ("2.28.9", "no checksum of that release is known")]
)
def test_a_given_tarball_is_built(version: str, said: str) -> None:
    made = plan_for({"a": equipped(toolkit("12.4"), "12.4")}, given(version)).hosts["a"].nccl
    assert (made.version, made.package, made.sha256, made.url) == (version, "anything.tar.gz", "1" * 64, None)
    assert any(said in why for why in made.why)


def test_a_tarball_of_a_known_bad_release_needs_allow_bad() -> None:
    hosts = {"a": equipped(toolkit("12.4"), "12.4")}
    (conflict,) = plan_for(hosts, given("2.17.1")).conflicts
    assert remedies(conflict) == ("leave --nccl anything.tar.gz out: the plan finds one that fits", "--allow-bad takes 2.17.1 all the same")
    assert plan_for(hosts, given("2.17.1", allow_bad=True)).hosts["a"].nccl.version == "2.17.1"


def test_a_release_that_nvidia_never_built_for_that_cuda_comes_after_one_that_it_did() -> None:
    made = plan_for({"a": equipped(toolkit("11.8"), "11.8")}, FROM_SOURCE).hosts["a"].nccl
    assert made.version == "2.21.5"
    lost = next(lost for lost in made.rejected if lost.candidate == "nccl-2.29.7-1.tar.gz (CUDA 11.8)")
    assert "NVIDIA has built 2.29 for CUDA 12.x and 13.x only" in lost.reason


def test_nothing_is_built_unless_requested() -> None:
    made = plan_for({"a": equipped(toolkit("12.2"), "12.2")}).hosts["a"].nccl
    assert made.source == "wheel"
    lost = next(lost for lost in made.rejected if lost.candidate == "a build from source")
    assert "--nccl source" in lost.reason
