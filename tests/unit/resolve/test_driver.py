"""NVIDIA's driver: the branch and the packages for GPUs and systems, what prevents it, and the playbook that installs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from invented_hosts import REQUIREMENTS, changed, host, plan_for, remedies
from rendered import variables_in
from rollouts import rollout

from provision import inventory
from provision.base import resources
from provision.base.errors import UsageError
from provision.catalog import OURS
from provision.install import installer
from provision.plan.requirements import Requirements
from provision.resolve.driver import known_branch
from provision.survey import Facts

H100, A100, V100, P100, GB200 = "2330", "20b2", "1db5", "15f8", "2941"
UBUNTU, DEBIAN, ROCKY = ("ubuntu", "24.04"), ("debian", "12"), ("rocky", "9.6")
KERNELS = {UBUNTU: "6.8.0-60-generic", DEBIAN: "6.1.0-37-amd64", ROCKY: "5.14.0-570.12.1.el9_6.x86_64"}


def machine(system: tuple[str, str] = DEBIAN, *ids: str, nvidia: dict[str, Any] | None = None, **more: Any) -> Facts:
    """A machine with GPUs on its PCI bus and no driver."""
    seen = {"pci_devices": ["0000:41:00.0"], "pci_ids": list(ids or (H100,)), **(nvidia or {})}
    named = {"id": system[0], "version": system[1], "kernel": KERNELS[system]}
    return changed(host(system=system), os=named, nvidia=seen, **more)


def requirements(driver: str | None = "auto", **more: Any) -> Requirements:
    return Requirements(engine_version="0.1.0", engine_sha256="0" * 64, torch=False, driver=driver, **more)


def planned(facts: Facts, driver: str = "auto", **more: Any) -> Any:
    plan = plan_for({"a": facts}, requirements(driver, **more))
    assert plan.conflicts == ()
    return plan.hosts["a"].driver


def conflict(facts: Facts, driver: str = "auto") -> Any:
    (problem,) = plan_for({"a": facts}, requirements(driver)).conflicts
    return problem


@pytest.mark.parametrize(
    ("system", "ids", "branch", "packages"),
    [
        (UBUNTU, [H100], "580", {"nvidia-headless-no-dkms-580-server-open", "linux-modules-nvidia-580-server-open-generic"}),
        (UBUNTU, [V100], "580", {"nvidia-headless-no-dkms-580-server", "linux-modules-nvidia-580-server-generic"}),
        (DEBIAN, [H100], "620", {"nvidia-driver-cuda", "nvidia-kernel-open-dkms", "linux-headers-amd64"}),
        (DEBIAN, [P100, H100], "580", {"nvidia-driver-cuda", "nvidia-kernel-dkms"}),
        (ROCKY, [A100], "620", {"nvidia-driver-cuda", "kmod-nvidia-open-dkms", "kernel-devel-matched"}),
        (ROCKY, [V100], "580", {"kmod-nvidia-latest-dkms"}),
    ],
)
def test_auto_takes_the_longest_supported_branch_for_production_that_gpus_and_system_support(system, ids, branch, packages):
    driver = planned(machine(system, *ids))
    assert driver.version == branch
    assert packages <= set(driver.packages)
    assert driver.modules == ("proprietary" if {V100, P100} & set(ids) else "open")


def test_what_chooses_the_branch_comes_first():
    assert planned(machine(DEBIAN), "580").first == ("nvidia-driver-pinning-580",)
    assert planned(machine(ROCKY), "580").stream == "nvidia-driver:580-open"
    assert planned(machine(ROCKY, V100), "580").stream == "nvidia-driver:580-dkms"
    assert planned(machine(ROCKY), "580").first == ("epel-release",)


def test_nvswitches_get_the_fabric_manager_and_racks_imex():
    driver = planned(machine(UBUNTU, nvidia={"pci_switches": 4, "fabric_manager": False}))
    assert "nvidia-fabricmanager-580" in driver.held
    assert driver.services == ("nvidia-fabricmanager",)
    plan = plan_for({"a": machine(DEBIAN, GB200)}, requirements("580"))
    assert plan.hosts["a"].driver.packages[-1] == "nvidia-imex-580"
    assert plan.hosts["a"].driver.services == ()
    assert any("nodes_config.cfg" in note for note in plan.notes)


def test_the_kernel_is_held_where_its_modules_are_not_built_on_the_host():
    assert "linux-image-generic" in planned(machine(UBUNTU)).held
    assert not [name for name in planned(machine(DEBIAN)).held if name.startswith("linux-")]


def test_everything_else_is_planned_for_the_driver():
    plan = plan_for({"a": machine(DEBIAN, nvidia={"pci_devices": ["0", "1"]})}, requirements("580"))
    assert plan.hosts["a"].slots == 2
    assert plan.hosts["a"].nccl is not None
    assert plan.hosts["a"].nccl.cuda.startswith("13.")


def test_hosts_without_gpus_and_plans_without_the_option_have_no_driver():
    plan = plan_for({"a": host(), "b": machine(DEBIAN, address="10.0.0.2")}, requirements())
    assert plan.hosts["a"].driver is None
    working = host(cuda="12.2", gpus=1)
    assert plan_for({"a": working}, REQUIREMENTS).hosts["a"].driver is None


def with_driver(version: str) -> Facts:
    return changed(machine(UBUNTU), driver={"version": version, "cuda": "13.0"}, gpus=[{"compute_capability": "9.0"}])


def test_a_driver_is_replaced_by_a_newer_one_and_by_an_older_one_only_if_allowed():
    assert planned(with_driver("535.183.01")).version == "580"
    kept = planned(with_driver("595.71.05"))
    assert (kept.source, [each.candidate for each in kept.rejected]) == ("host", ["620", "610"])
    assert planned(with_driver("610.43.02")).source == "host"
    assert planned(with_driver("580.65.06"), "580").source == "host"
    problem = conflict(with_driver("610.43.02"), "580")
    assert "driver 610.43.02 works there, and 580 is older" in problem.what
    assert remedies(problem)[-1].startswith("--allow-downgrade")
    assert planned(with_driver("610.43.02"), "580", allow_downgrade=True).version == "580"


@pytest.mark.parametrize(
    ("facts", "driver", "what", "remedy"),
    [
        (machine(DEBIAN, security={"secure_boot": True}), "580", "Secure Boot is on", "mokutil --import"),
        (machine(DEBIAN, nvidia={"runfile": True}), "580", "NVIDIA's installer (.run)", "nvidia-uninstall"),
        (machine(DEBIAN, user={"sudo": "none"}), "580", "only root can install a driver", "sudo"),
        (machine(DEBIAN, V100), "595", "GPUs of compute capability 7.0 (Volta, such as V100) end with 580", "--driver 580"),
        (machine(DEBIAN, V100, "2901"), "580", "no kernel modules run all its GPUs", "take the GPUs of one kind out"),
        (machine(UBUNTU), "620", "no package of it is known for that system", "--driver 595"),
        (machine(DEBIAN, "3fff"), "auto", "which GPUs it has is not known (PCI device 10de:3fff)", "--driver 620"),
    ],
)
def test_what_prevents_it_is_a_conflict_with_a_remedy(facts, driver, what, remedy):
    problem = conflict(facts, driver)
    assert what in problem.what
    assert any(remedy in each for each in remedies(problem))


def test_signed_modules_and_an_enrolled_key_satisfy_secure_boot():
    assert "signed by the distribution, for Secure Boot" in "; ".join(planned(machine(UBUNTU, security={"secure_boot": True})).why)
    assert planned(machine(DEBIAN, security={"secure_boot": True, "dkms_key_enrolled": True})).is_new


def test_a_host_without_a_driver_is_told_of_the_option():
    (problem,) = plan_for({"a": machine(DEBIAN)}, requirements(None)).conflicts
    assert remedies(problem)[0].startswith("--driver auto")


def test_auto_as_a_remedy_names_every_host_whose_driver_it_changes():
    old, new = (changed(with_driver(version), boot_id=version) for version in ("535.183.01", "595.71.05"))
    (problem,) = plan_for({"dark": machine(UBUNTU), "new": new}, requirements(None)).conflicts
    assert remedies(problem)[0] == "--driver auto: provision installs NVIDIA's driver on dark, and reboots all of these"
    (problem,) = plan_for({"dark": machine(UBUNTU), "new": new, "old": old}, requirements(None)).conflicts
    assert "on dark, replaces the older one of old, and reboots all of these" in remedies(problem)[0]


@pytest.mark.parametrize(
    "other",
    [
        changed(with_driver("535.183.01"), container="lxc"),
        changed(with_driver("535.183.01"), nvidia={"pci_devices": ["0"], "pci_ids": [H100], "runfile": True}),
        machine(UBUNTU, "ffff"),
        changed(machine(UBUNTU), user={"can_become": False}),
    ],
)
def test_auto_is_no_remedy_where_it_has_a_conflict_on_any_host(other):
    conflicts = plan_for({"dark": machine(UBUNTU), "other": other}, requirements(None)).conflicts
    assert conflicts
    assert not [way for each in conflicts for way in remedies(each) if "--driver" in way]


def test_an_unknown_branch_is_an_error_that_lists_the_known_ones():
    assert known_branch("580", "--driver 580", OURS) == "580"
    with pytest.raises(UsageError, match="--driver 58: not a branch") as raised:
        known_branch("58", "--driver 58", OURS)
    assert "580" in str(raised.value.hint)


def test_every_pci_id_that_is_named_has_a_compute_capability():
    known = OURS.hardware()
    assert [known.pci_ids.capability(each) for each in (H100, A100, V100, P100, GB200)] == ["9.0", "8.0", "7.0", "6.0", "10.0"]
    assert all(known.pci_ids.capability(each) for each in (*known.fabric.nvswitch, *known.fabric.imex))
    assert known.pci_ids.capability("3fff") is None


@pytest.mark.parametrize("system", [UBUNTU, DEBIAN, ROCKY])
def test_the_playbook_installs_on_all_hosts_and_reboots_one_at_a_time(system, tmp_path: Path):
    hosts = tmp_path / "hosts.ini"
    hosts.write_text("a ansible_host=10.0.0.1\nb ansible_host=10.0.0.2\n")
    facts = {"a": machine(system), "b": host("10.0.0.2", system=system)}
    plan = plan_for(facts, requirements("580"))
    listed = inventory.load(str(hosts))
    installer.render(rollout(plan, listed, facts), tmp_path / "book", fetch=False)
    install, reboot, release = yaml.safe_load((tmp_path / "book/driver.yml").read_text())
    assert [each["hosts"] for each in (install, reboot, release)] == [["a"]] * 3
    assert [each["role"] for each in install["roles"]] == ["guard", "driver"]
    assert (reboot["serial"], reboot["max_fail_percentage"]) == (1, 0)
    assert yaml.safe_load((tmp_path / "book/site.yml").read_text())[0]["import_playbook"] == "driver.yml"
    found = variables_in(tmp_path / "book/vars.json")
    assert found["provision_plan"]["hosts"]["a"]["driver"]["version"] == "580"
    assert "driver" not in found["provision_manifests"]["a"]["host"]


OWN = """
    nvidia-driver-580-server-open nvidia-headless-no-dkms-580-server-open nvidia-utils-580-server nvidia-compute-utils-580
    nvidia-dkms-580 nvidia-kernel-common-580 nvidia-kernel-source-580-open nvidia-firmware-580-580.95.05 nvidia-fabricmanager-580
    nvidia-imex-580 libnvidia-compute-580-server libnvidia-gl-580:i386 libnvidia-decode-580 libnvidia-encode-580 libnvidia-cfg1-580
    libnvidia-common-580 libnvidia-extra-580 libnvidia-fbc1-580 libnvidia-nscq-580 xserver-xorg-video-nvidia-580
    linux-modules-nvidia-580-server-open-generic linux-modules-nvidia-580-open-6.8.0-60-generic
    linux-objects-nvidia-580-6.8.0-60-generic linux-signatures-nvidia-6.8.0-60-generic nvidia-384 libcuda1-384 nvidia-opencl-icd-384
    nvidia-open-580 cuda-drivers cuda-drivers-fabricmanager-580 nvlink5-580 nvlsm libnvsdm-580 nvidia-driver-pinning-580 nvidia-driver
    nvidia-driver-bin nvidia-driver-cuda nvidia-driver-libs:amd64 nvidia-kernel-open-dkms nvidia-kernel-dkms nvidia-kernel-support
    nvidia-kernel-common nvidia-modprobe nvidia-persistenced nvidia-smi nvidia-alternative nvidia-legacy-check firmware-nvidia-gsp
    libcuda1 libcudadebugger1 libnvcuvid1 libnvidia-ml1 libnvidia-cfg1 libnvidia-ptxjitcompiler1 libnvidia-nvvm4 libnvidia-nvvm70
    libnvidia-pkcs11-openssl3 libnvidia-egl-wayland1 libnvidia-glcore libegl-nvidia0 libgles-nvidia2 libgl1-nvidia-glvnd-glx
    glx-alternative-nvidia nvidia-tesla-470-driver libnvidia-tesla-470-cuda1 nvidia-legacy-390xx-driver nvidia-cuda-mps
    nvidia-driver-cuda-libs nvidia-driver-NVML nvidia-kmod-common kmod-nvidia-open-dkms kmod-nvidia-latest-dkms kmod-nvidia
    kmod-nvidia-580.95.05-5.14.0-570.12.1 akmod-nvidia akmod-nvidia-470xx dkms-nvidia nvidia-fabric-manager nvidia-libXNVCtrl
    libnvidia-ml libnvidia-cfg nvidia-settings nvidia-xconfig xorg-x11-nvidia xorg-x11-drv-nvidia-cuda dnf-plugin-nvidia
"""
OF_OTHERS = """
    nvidia-container-toolkit nvidia-container-toolkit-base nvidia-container-runtime libnvidia-container1 libnvidia-container-tools
    nvidia-docker2 nvidia-cuda-toolkit nvidia-cuda-dev nvidia-cuda-gdb nvidia-cudnn nvidia-visual-profiler nvidia-opencl-dev
    nvidia-openjdk-8-jre libnvidia-ml-dev nvidia-gds nvidia-gds-12-4 nvidia-fs nvidia-fs-dkms linux-modules-nvidia-fs-6.8.0-60-generic
    kmod-nvidia-fs libnvinfer10 libnvjpeg-12-4 libnvvm4 libnvtoolsext1 libnvpair3linux libcudart12 libcudnn9-cuda-13 libnccl2
    cuda-toolkit-13-0 cuda-compat-13-0 cuda-13-0 nvtop nvme-cli nvidia-jetpack datacenter-gpu-manager-4-core gpu-monitor
"""


def test_only_packages_of_the_driver_may_go_for_another_branch():
    own = re.compile(yaml.safe_load((resources.folder("playbooks") / "roles/driver/vars/main.yml").read_text())["driver_own"])
    assert [name for name in OWN.split() if not own.match(name)] == []
    assert [name for name in OF_OTHERS.split() if own.match(name)] == []
    branches = {"branch": "580", "flavour": "generic"}
    for of_system in OURS.driver().packages.values():
        named = (*of_system.open, *of_system.proprietary, *of_system.fabric, *of_system.imex)
        assert all(own.match(name.format(**branches)) for name in named)
