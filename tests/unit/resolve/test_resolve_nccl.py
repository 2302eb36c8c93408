"""The resolver: prebuilt NCCL from repositories, files and indexes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from invented_hosts import changed, gpu, host, plan_for, remedies
from rollouts import manifest_with

from provision.base.versions import key
from provision.plan.model import Component
from provision.plan.requirements import Requirements
from provision.survey import Facts


def test_an_exact_version_from_nvidias_repository_is_exact_strings_to_be_held() -> None:
    made = plan_for({"a": gpu("12.4")}, Requirements(nccl_source="repository", nccl_version="2.21.5")).hosts["a"].nccl
    assert made.packages == ("libnccl2=2.21.5-1+cuda12.4", "libnccl-dev=2.21.5-1+cuda12.4")
    assert made.repository.key_url.endswith("/ubuntu2204/x86_64/cuda-keyring_1.1-1_all.deb")
    assert "signed-by=" + made.repository.keyring in made.repository.entry


def test_rpm_strings_and_repository() -> None:
    rhel = changed(gpu("12.4"), {"os": {"id": "rocky", "version": "9.4"}})
    made = plan_for({"a": rhel}, Requirements(nccl_source="repository", nccl_version="2.21.5")).hosts["a"].nccl
    assert made.packages == ("libnccl-2.21.5-1+cuda12.4", "libnccl-devel-2.21.5-1+cuda12.4")
    assert "baseurl=https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64" in made.repository.entry


LOCAL = "nccl-local-repo-ubuntu2204-2.21.5-cuda12.4_1.0-1_amd64.deb"


def test_version_and_cuda_of_a_local_repository_package_come_from_its_name() -> None:
    requirements = Requirements(nccl_source="local_repository", nccl_local=LOCAL, nccl_local_sha256="1" * 64)
    made = plan_for({"a": gpu("12.4"), "b": gpu("12.6", address="10.0.0.2")}, requirements).hosts["b"].nccl
    assert (made.source, made.package, made.version, made.cuda) == ("local_repository", LOCAL, "2.21.5", "12.4")
    assert (made.packages[0], made.sha256) == ("libnccl2=2.21.5-1+cuda12.4", "1" * 64)


def test_a_local_repository_package_that_does_not_fit_names_the_host() -> None:
    requirements = Requirements(nccl_source="local_repository", nccl_local=LOCAL)
    made = plan_for({"a": gpu("12.4"), "old": gpu("12.2", address="10.0.0.2")}, requirements)
    assert [conflict.host for conflict in made.conflicts] == ["old"]
    assert "newer than the driver's CUDA 12.2" in made.conflicts[0].what or "12.2" in made.conflicts[0].what
    assert remedies(made.conflicts[0]) == (f"leave --nccl {LOCAL} out: the plan finds one that fits", "leave old out: --limit '!old'")


def test_a_known_bad_version_is_refused_with_its_reason_unless_allowed() -> None:
    refused = plan_for({"a": gpu("12.0")}, Requirements(nccl_version="2.17.1"))
    assert "known bad: hang in alltoallv" in refused.conflicts[0].what
    assert "--allow-bad" in " ".join(remedies(refused.conflicts[0]))
    taken = plan_for({"a": gpu("12.0")}, Requirements(nccl_version="2.17.1", allow_bad=True)).hosts["a"].nccl
    assert taken.version == "2.17.1"
    assert any("--allow-bad" in why for why in taken.why)


def local(version: str) -> str:
    return f"nccl-local-repo-ubuntu2204-{version}-cuda12.0_1.0-1_amd64.deb"


def test_a_local_repository_package_of_a_known_bad_version_needs_allow_bad() -> None:
    given = Requirements(nccl_source="local_repository", nccl_local=local("2.17.1"))
    (refused,) = plan_for({"a": gpu("12.0")}, given).conflicts
    assert "2.17.1 for CUDA 12.0: known bad: hang in alltoallv" in refused.what
    assert remedies(refused) == (
        f"leave --nccl {local('2.17.1')} out: the plan finds one that fits",
        "--allow-bad takes 2.17.1 all the same",
    )
    taken = plan_for({"a": gpu("12.0")}, replace(given, allow_bad=True)).hosts["a"].nccl
    assert (taken.version, taken.source) == ("2.17.1", "local_repository")


def test_a_local_repository_package_may_be_newer_than_the_list_of_bad_releases() -> None:
    made = plan_for({"a": gpu("12.0")}, Requirements(nccl_source="local_repository", nccl_local=local("2.99.1")))
    assert made.hosts["a"].nccl.version == "2.99.1"


def test_the_repository_of_a_dropped_system_ends_with_its_last_cuda() -> None:
    focal = changed(gpu("13.0", python="3.8.10"), {"os": {"id": "ubuntu", "version": "20.04"}})
    requirements = Requirements(nccl_source="repository", nccl_version="2.28.9", torch=False)
    made = plan_for({"a": focal}, requirements).hosts["a"].nccl
    assert made.packages[0] == "libnccl2=2.28.9-1+cuda12.9"
    assert any(lost.candidate == "libnccl2=2.28.9-1+cuda13.0" and "ends with CUDA 12.9" in lost.reason for lost in made.rejected)
    assert plan_for({"a": gpu("13.0")}, requirements).hosts["a"].nccl.cuda == "13.0"
    offers = changed(focal, {"candidates": {"libnccl2": ["2.28.9-1+cuda13.0"]}})
    assert plan_for({"a": offers}, requirements).hosts["a"].nccl.cuda == "13.0", "what the host's own index offers counts"


@pytest.mark.parametrize(
    ("version", "said"), [("2.99.1", "no build of NCCL 2.99.1 is known"), ("2.31.2", "the oldest build of 2.31.2 is for CUDA 12.9")]
)
def test_an_unavailable_version_is_a_conflict_about_that_version(version: str, said: str) -> None:
    made = plan_for({"a": gpu("12.2")}, Requirements(nccl_version=version, nccl_strict=True))
    assert said in made.conflicts[0].what


def test_a_build_that_does_not_exist_for_this_distribution_is_not_chosen() -> None:
    focal = changed(gpu("12.0", python="3.8.10"), {"os": {"id": "ubuntu", "version": "20.04"}})
    requirements = Requirements(nccl_source="repository", nccl_version="2.19.3", nccl_strict=True)
    assert plan_for({"a": focal}, requirements).hosts["a"].nccl.cuda == "12.0"
    made = plan_for({"a": gpu("12.0")}, requirements).hosts["a"].nccl  # on Ubuntu 22.04 that one is reported missing
    assert made.cuda == "11.0"
    assert any(lost.candidate == "libnccl2=2.19.3-1+cuda12.0" and "does not exist" in lost.reason for lost in made.rejected)


def test_a_hosts_package_index_takes_precedence_over_the_catalogue() -> None:
    offered = {"libnccl2": ["2.29.1-1+cuda12.4", "2.21.5-1+cuda12.4", "2.18.3-1-1"]}
    made = plan_for({"a": gpu("12.4", candidates=offered)}, Requirements(nccl_strict=True))
    assert made.hosts["a"].nccl.package == "libnccl2=2.29.1-1+cuda12.4"


def test_nvidias_repository_is_not_added_where_a_configured_one_offers_the_build() -> None:
    version = "2.21.5-1+cuda12.4"
    offers = {name: [version, "2.18.3-1+cuda12.2"] for name in ("libnccl2", "libnccl-dev")}
    asked = Requirements(nccl_source="repository")

    def taken(**elsewhere: list[str]) -> Component | None:
        return plan_for({"a": gpu("12.4", candidates=offers, candidates_elsewhere=elsewhere)}, asked).hosts["a"].nccl

    known, half, ours = taken(libnccl2=[version], **{"libnccl-dev": [version]}), taken(libnccl2=[version]), taken()
    assert [each and each.packages for each in (known, half, ours)] == [(f"libnccl2={version}", f"libnccl-dev={version}")] * 3
    assert known is not None
    assert known.repository is None
    assert any("configured on the host offers it" in why for why in known.why)
    assert all(each and each.repository and each.repository.name == "cuda-ubuntu2204-x86_64" for each in (half, ours))


@pytest.mark.parametrize(("system", "python"), [(("ubuntu", "24.04"), "3.12.3"), (("debian", "13"), "3.13.5")])
def test_builds_from_before_the_distribution_are_weak_evidence(system: tuple[str, str], python: str) -> None:
    a100 = [{"name": "A100", "compute_capability": "8.0"}]
    old = {"os": {"id": system[0], "version": system[1]}, "driver": {"version": "525.147.05", "cuda": "12.0"}, "gpus": a100}
    known = changed(host(system=system, python=python), old)
    made = plan_for({"a": known}, Requirements(nccl_strict=True)).hosts["a"].nccl
    assert (made.source, made.cuda) == ("wheel", "11.0")
    lost = next(lost for lost in made.rejected if lost.candidate == "libnccl2=2.19.3-1+cuda12.0")
    assert lost.reason.startswith("weak evidence: builds for other systems")
    asked = plan_for({"a": known}, Requirements(nccl_source="repository", nccl_strict=True)).hosts["a"].nccl
    assert any(why.startswith("weak evidence:") for why in asked.why)


def test_the_rejection_names_the_cuda_that_the_gpu_needs() -> None:
    lost = plan_for({"a": gpu("13.0", "10.0")}).hosts["a"].nccl.rejected
    said = {each.reason for each in lost if "compute capability 10.0" in each.reason}
    assert said == {"its CUDA does not support compute capability 10.0 yet (12.8 or newer)"}


@pytest.mark.parametrize(
    ("capability", "cuda", "asked", "version"),
    [
        ("5.2", "12.9", {}, "2.27.7"),  # newer builds for CUDA 12 begin with 6.0
        ("5.2", "12.9", {"nccl_source": "repository"}, "2.27.7"),
        ("6.1", "12.9", {}, "2.30.7"),
        ("11.0", "12.9", {}, None),
        ("11.0", "13.0", {}, "2.30.7"),
        ("12.0", "12.9", {}, "2.30.7"),
    ],
)
def test_the_build_has_code_for_the_gpu(capability: str, cuda: str, asked: dict[str, Any], version: str | None) -> None:
    made = plan_for({"a": gpu(cuda, capability)}, Requirements(torch=False, **asked))
    assert (made.hosts["a"].nccl.version if made.hosts else None) == version
    assert version or f"compute capability {capability}" in made.conflicts[0].what


NEWER = {"libnccl2": "2.27.3-1+cuda12.4", "libnccl-dev": "2.27.3-1+cuda12.4"}
OF_AN_EARLIER_RUN = {
    "system_packages": {"added": ["libnccl-dev"], "replaced": ["libnccl2"]},
    "manifest": manifest_with(nccl={"source": "repository", "packages": [f"{name}={version}" for name, version in NEWER.items()]}),
}


def test_a_newer_nccl_that_is_installed_is_replaced_only_with_allow_downgrade() -> None:
    older = Requirements(torch=False, nccl_source="repository", nccl_version="2.21.5")
    theirs = gpu("12.4", packages=NEWER)
    unfit = gpu("12.4", packages={"libnccl2": "2.29.7-1+cuda13.2"})
    assert plan_for({"a": unfit}, Requirements(torch=False)).hosts["a"].nccl.source == "wheel", "which is in the prefix"
    (conflict,) = plan_for({"a": theirs}, older).conflicts
    assert "libnccl2 2.27.3-1+cuda12.4 is installed there, which is newer" in conflict.what
    assert any(way.startswith("--allow-downgrade") for way in remedies(conflict))
    told = plan_for({"a": theirs}, replace(older, allow_downgrade=True))
    assert told.hosts["a"].nccl.packages == ("libnccl2=2.21.5-1+cuda12.4", "libnccl-dev=2.21.5-1+cuda12.4")
    assert any("libnccl2 2.27.3-1+cuda12.4 is replaced by the older 2.21.5-1+cuda12.4" in note for note in told.notes)
    kept = plan_for({"a": theirs}, Requirements(torch=False, nccl_source="repository", nccl_strict=True)).hosts["a"].nccl
    assert (kept.packages, kept.repository) == (("libnccl2=2.27.3-1+cuda12.4", "libnccl-dev=2.27.3-1+cuda12.4"), None)


@pytest.mark.parametrize(("version", "ours"), [("2.27.3-1+cuda12.4", True), ("2.27.5-1+cuda12.4", False)])
def test_an_nccl_of_an_earlier_run_is_replaced_unless_somebody_has_installed_another_since(version: str, ours: bool) -> None:
    packages = dict.fromkeys(NEWER, version)
    made = plan_for(
        {"a": gpu("12.4", packages=packages, installed=OF_AN_EARLIER_RUN)},
        Requirements(torch=False, nccl_source="repository", nccl_version="2.21.5"),
    )
    assert bool(made.hosts) == ours


def test_the_same_release_for_a_larger_cuda_is_newer_too_and_one_for_a_smaller_is_not() -> None:
    asked = Requirements(torch=False, nccl_source="repository", nccl_version="2.21.5")
    assert plan_for({"a": gpu("12.4", packages={"libnccl2": "2.21.5-1+cuda13.1"})}, asked).conflicts
    assert not plan_for({"a": gpu("12.4", packages={"libnccl2": "2.21.5-1+cuda12.2"})}, asked).conflicts


NO_GPU = "none of these hosts has an NVIDIA GPU that is used"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, None),
        ({"nccl_version": "2.21.5"}, f"--nccl 2.21.5 has no effect: {NO_GPU}"),
        ({"nccl_source": "repository"}, f"--nccl repository has no effect: {NO_GPU}"),
        ({"nccl_version": "2.21.5", "kept": ("nccl",)}, None),  # the lock's, which hosts with GPUs outside --limit have
    ],
)
def test_options_for_nccl_have_no_effect_without_gpus(asked: dict[str, Any], said: str | None) -> None:
    assert [note for note in plan_for({"a": host()}, Requirements(torch=False, **asked)).notes if "no effect" in note] == (
        [said] if said else []
    )


def with_driver(driver: str, cuda: str, *capabilities: str) -> Facts:
    gpus = [{"compute_capability": each} for each in capabilities] or [{"name": "GPU"}]
    return changed(gpu(cuda), driver={"version": driver, "cuda": cuda}, gpus=gpus)


@pytest.mark.parametrize(
    ("driver", "cuda", "capabilities", "build"),
    [
        ("525.147.05", "12.0", ["8.0"], ("2.30.7", "12.9")),
        ("535.104.05", "12.2", ["7.0", "9.0"], ("2.30.7", "12.9")),
        ("535.104.05", "12.2", ["5.2"], ("2.27.7", "12.9")),  # newer builds have no machine code for it
        ("535.104.05", "12.2", [], ("2.26.2", "12.2")),  # GPUs of unknown kind
        ("580.65.06", "13.0", ["9.0"], ("2.30.7", "13.3")),
        ("470.82.01", "11.4", ["7.0"], ("2.21.5", "11.0")),  # never above the major
    ],
)
def test_a_build_for_a_newer_cuda_of_the_drivers_major_fits_where_it_has_machine_code_for_all_gpus(
    driver: str, cuda: str, capabilities: list[str], build: tuple[str, str]
) -> None:
    host_facts = with_driver(driver, cuda, *capabilities)
    made = plan_for({"a": host_facts}, Requirements(torch=False)).hosts["a"].nccl
    assert (made.version, made.cuda) == build
    assert any("minor-version compatibility" in why for why in made.why) == (key(build[1]) > key(cuda))
    strict = plan_for({"a": host_facts}, Requirements(torch=False, nccl_strict=True)).hosts["a"]
    assert key(strict.nccl.cuda) <= key(cuda)
    assert "nccl-strict" in strict.engine.options  # later runs know


def test_a_conflict_of_nccl_strict_offers_to_leave_it() -> None:
    (conflict,) = plan_for({"a": with_driver("535.104.05", "12.2", "8.0")}, Requirements(nccl_version="2.30.7", nccl_strict=True)).conflicts
    assert any(way.startswith("--nccl compatible") for way in remedies(conflict))


def test_several_hosts_with_infiniband_are_told_of_the_nccl_inside_pytorch() -> None:
    port = {"infiniband": [{"device": "mlx5_0", "port": 1, "state": "active", "link_layer": "InfiniBand"}]}
    one = changed(with_driver("580.65.06", "13.0", "9.0"), port)
    two = changed(changed(one, port), hostname="other")
    older = Requirements(torch_version="2.13.0")
    (note,) = [each for each in plan_for({"a": one, "b": two}, older).notes if "inside PyTorch" in each]
    assert note.startswith("a and b: the NCCL 2.29.7 inside PyTorch: hang on several hosts with InfiniBand")
    assert "load another NCCL into the ranks, 2.30.7 of this plan" in note
    assert not [each for each in plan_for({"a": one}, older).notes if "inside PyTorch" in each]
    assert not [each for each in plan_for({"a": one, "b": two}).notes if "inside PyTorch" in each]
