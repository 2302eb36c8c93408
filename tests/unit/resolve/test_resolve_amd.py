"""Hosts with GPUs of AMD: their builds of PyTorch, next to NVIDIA's and CPUs, and what is in the way. The hosts are invented."""

from __future__ import annotations

from typing import Any

import pytest
from invented_hosts import changed, host, plan_for, remedies

from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.image import bases
from provision.install.bundle import gather
from provision.plan.model import Plan
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import host_class_of
from provision.survey import Facts

MI300X, MI250X, RX_7900, RX_580, STRIX = "gfx942", "gfx90a", "gfx1100", "gfx803", "gfx1152"
ON_BUS = {"devices": [{"vendor": "1002", "device": "74a1", "pci_class": "1200", "address": "0000:05:00.0"}], "nodes": ["/dev/kfd"]}


def amd(*targets: str | None, driver: str | None = "6.16.13", address: str = "10.0.0.1", **more: Any) -> Facts:
    gpus = [{"target": target, "address": f"0000:{5 + place:02x}:00"} for place, target in enumerate(targets)]
    found = {"driver": driver, "gpus": gpus, **more.pop("amd", {})}
    return changed(host(address, system=("ubuntu", "22.04"), python="3.10.12"), amd=found, **{"accelerators": ON_BUS, **more})


def nvidia(address: str = "10.0.0.2") -> Facts:
    return changed(host(address, system=("ubuntu", "22.04"), python="3.10.12", cuda="13.0"), gpus=[{"compute_capability": "9.0"}] * 8)


def torches(plan: Plan) -> dict[str, str]:
    assert not plan.conflicts
    return {name: each.torch.version for name, each in plan.hosts.items() if each.torch}


@pytest.mark.parametrize(
    ("one", "version"),
    [
        (amd(*[MI300X] * 8), "2.14.1+rocm7.2"),
        (amd(MI250X, MI250X), "2.14.1+rocm7.2"),
        (amd(RX_7900), "2.14.1+rocm7.2"),
        (amd(MI300X, driver=None), "2.14.1+rocm7.2"),  # the kernel's own, which has no version
        (amd(MI300X, driver="6.10.5"), "2.14.1+rocm7.2"),
        (amd(MI300X, driver="6.8.5"), "2.10.0+rocm7.0"),
        (amd(RX_7900, driver="6.7.0"), "2.9.1+rocm6.4"),
        (amd(MI250X, driver="6.3.6"), "2.7.1+rocm6.2.4"),
    ],
)
def test_the_newest_build_with_code_for_the_gpus_that_the_driver_runs(one: Facts, version: str) -> None:
    made = plan_for({"a": one})
    torch = made.hosts["a"].torch
    assert torches(made) == {"a": version}
    assert torch
    assert torch.index == f"https://download.pytorch.org/whl/{version.partition('+')[2]}"
    assert torch.cuda is None
    assert made.hosts["a"].slots == len(one.amd.gpus if one.amd else ())
    assert made.hosts["a"].nccl is None
    assert any("nothing here has ever run on one" in note for note in made.notes)
    assert any("what lifts it: amdgpu 6.10.5 or newer" in note for note in made.notes) is not version.startswith("2.14")
    doubt = "AMD's matrix of drivers begins with that of 6.4"
    assert any(doubt in note for note in made.notes) is (one.amd is not None and one.amd.driver == "6.10.5")


def test_graphics_of_a_processor_that_the_driver_lists_are_told() -> None:
    graphics = {"vendor": "1002", "device": "15bf", "pci_class": "0300", "address": "0000:05:00.0", "memory_mb": 512}
    made = plan_for({"a": amd("gfx1103", accelerators={"devices": [graphics], "nodes": ["/dev/kfd"]})})
    assert torches(made) == {"a": "2.14.1+cpu"}
    assert made.notes == ("a: gfx1103: a processor's own graphics share its memory and stay unused",)


def test_code_that_only_amds_own_builds_have_comes_from_its_index_apart() -> None:
    torch = plan_for({"a": amd(STRIX, MI300X)}).hosts["a"].torch
    assert torch
    assert (torch.version, torch.index) == ("2.14.0+rocm10.1.0", "https://stable.repo.amd.com/rocm/whl-next/")
    assert torch.packages == tuple(f"amd-torch-device-{each}==2.14.0+rocm10.1.0" for each in (STRIX, MI300X))
    assert "torch==2.14.0+rocm7.2" in {each.candidate for each in torch.rejected if each.cause.endswith(f"no code for {STRIX}")}


def test_a_requested_index_has_to_have_amds_build() -> None:
    made = plan_for({"a": amd(MI300X), "b": nvidia()}, Requirements(torch_index="https://index.example/simple"))
    assert torches(made) == {"a": "2.14.1+rocm7.2", "b": "2.14.1"}


def test_one_release_over_both_vendors_and_cpus_and_gradients_through_host_memory() -> None:
    made = plan_for({"amd": amd(MI300X), "cpu": host("10.0.0.3", system=("ubuntu", "22.04"), python="3.10.12"), "nv": nvidia()})
    assert torches(made) == {"amd": "2.14.1+rocm7.2", "cpu": "2.14.1+cpu", "nv": "2.14.1+cu130"}
    assert {name for name, each in made.hosts.items() if each.nccl} == {"nv"}
    (note,) = (each for each in made.notes if "neither NCCL nor RCCL" in each)
    assert note.startswith("amd: AMD's GPUs, and nv NVIDIA's")
    assert "host memory" in note
    assert not any("neither NCCL" in note for note in plan_for({"amd": amd(MI300X), "b": amd(RX_7900, address="10.0.0.2")}).notes)


@pytest.mark.parametrize("asked", [{"nccl_version": "2.30.7"}, {"nccl_source": "wheel"}])
def test_a_requested_nccl_is_a_conflict_next_to_amds_gpus(asked: dict[str, Any]) -> None:
    (conflict,) = plan_for({"a": amd(MI300X), "n": nvidia()}, Requirements(**asked)).conflicts
    assert conflict.host == "a"
    assert "NCCL connects NVIDIA's GPUs only" in conflict.what
    assert [each.split(":")[0] for each in remedies(conflict)] == ["leave --nccl out", "leave a out"]
    alone = plan_for({"a": amd(MI300X)}, Requirements(**asked))
    assert any("none of these hosts has an NVIDIA GPU" in note for note in alone.notes)


def test_hosts_with_different_rccls_inside_get_one_that_fits_all() -> None:
    made = plan_for({"a": amd(MI300X, driver="6.8.5"), "b": amd(RX_7900, address="10.0.0.2")})
    assert torches(made) == {"a": "2.10.0+rocm7.0", "b": "2.10.0+rocm7.0"}


@pytest.mark.parametrize(
    ("one", "what", "remedy"),
    [
        (amd(RX_580), f"has no code for {RX_580}", "--cpu"),
        (amd(MI250X, driver="6.2.4"), "needs amdgpu 6.10.5, and 6.2.4 is loaded", "update the driver amdgpu of a to 6.3.6 or newer"),
        (amd(MI300X, arch="aarch64"), "those that are known are for x86_64", "--cpu"),
        (amd(MI300X, amd={"usable": False}), "may not use /dev/kfd", "usermod -aG render,video"),
        (amd(None), "invalid target", "amdgpu-dkms"),
        (amd(), "lists none for computing", "amdgpu-dkms"),
        (changed(host(), accelerators=ON_BUS), "the driver amdgpu is not loaded", "sudo modprobe amdgpu"),
    ],
)
def test_what_is_in_the_way_is_named_with_what_helps(one: Facts, what: str, remedy: str) -> None:
    made = plan_for({"a": one})
    (conflict,) = made.conflicts
    assert what in conflict.what
    assert any(remedy in each for each in remedies(conflict))
    assert not any("HSA_OVERRIDE" in each for each in remedies(conflict))
    cpu = plan_for({"a": one}, Requirements(cpu=True))
    assert torches(cpu)["a"].endswith("+cpu")
    assert any("): --cpu was requested" in note and "unused GPUs (" in note for note in cpu.notes)


@pytest.mark.parametrize("listed", [[], [{"target": MI300X}]])  # a container may see the machine's KFD without being given it
def test_a_container_without_kfd_was_given_none_of_the_gpus(listed: list[dict[str, str]]) -> None:
    hidden = {"gpus": listed, "usable": False}
    made = plan_for({"a": amd(container="docker", accelerators={**ON_BUS, "nodes": ["/dev/dri/renderD128"]}, amd=hidden)})
    assert torches(made)["a"].endswith("+cpu")
    assert [note for note in made.notes if "unused GPUs (" in note and "its container was given none of the machine's GPUs" in note]
    given = plan_for({"a": amd(MI300X, container="docker")})
    assert torches(given) == {"a": "2.14.1+rocm7.2"}


def test_graphics_of_a_processor_and_amds_gpus_next_to_nvidias_are_not_used() -> None:
    graphics = {"vendor": "1002", "device": "164e", "pci_class": "0300", "address": "0000:05:00.0", "memory_mb": 512}
    assert torches(plan_for({"a": amd("gfx1036", accelerators={"devices": [graphics], "nodes": ["/dev/kfd"]})}))["a"].endswith("+cpu")
    both = changed(nvidia(), amd={"driver": "6.16.13", "gpus": [{"target": MI300X}]}, accelerators=ON_BUS)
    made = plan_for({"a": both})
    assert torches(made)["a"].endswith("+cu130")
    assert any("1 x AMD GPU unused:" in note for note in made.notes)


def test_cards_that_current_rocm_has_left_stay_used_with_what_runs_all() -> None:
    made = plan_for({"a": amd(*["gfx906"] * 8, RX_7900)})
    assert torches(made) == {"a": "2.9.1+rocm6.3"}
    assert made.hosts["a"].slots == 9
    assert any("a: 8 x gfx906 next to other AMD GPUs: current ROCm has no code for them" in note for note in made.notes)
    assert any(f"its GPUs differ ({RX_7900} and gfx906)" in note for note in made.notes)
    for alike in (amd("gfx906", "gfx906"), amd(RX_7900, MI300X), changed(nvidia(), amd=amd("gfx906", RX_7900).model_dump()["amd"])):
        assert not any("next to other AMD GPUs" in note for note in plan_for({"a": alike}).notes)


def test_images_and_bundles_refuse_what_they_cannot_make() -> None:
    with pytest.raises(UsageError, match="not for AMD's GPUs"):
        bases.base(host_class_of(amd(MI300X), OURS))
    with pytest.raises(ProvisionError, match="source distribution"):
        gather._check(plan_for({"a": amd(STRIX)}), None)
    gather._check(plan_for({"a": amd(MI300X)}), None)
