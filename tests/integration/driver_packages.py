"""Fake packages of NVIDIA's driver with the names and dependencies of those in NVIDIA's repository for Debian, and of what they need.

They hold nothing but the pins of the branch. `dkms` and the kernel are fake, too, because the real ones would build modules for a kernel
that the test's container does not run.
"""

from __future__ import annotations

from pathlib import Path

from nccl_packages import package

FLAVOUR = "provision-amd64"
OPEN, OTHER = ("nvidia-kernel-open-dkms", "nvidia-kernel-dkms")


def driver(folder: Path, work: Path, version: str) -> None:
    """The packages of one version, e.g. ``580.126.20-1``."""
    same = f"(= {version})"
    depends = {
        "firmware-nvidia-gsp": "",
        "nvidia-modprobe": "",
        "nvidia-kernel-support": f"nvidia-modprobe (>= {version})",
        "nvidia-persistenced": f"libnvidia-cfg1 {same}",
        "libnvidia-cfg1": "",
        "libnvidia-ml1": "",
        "libcuda1": f"libnvidia-ptxjitcompiler1 {same}",
        "libnvidia-ptxjitcompiler1": "",
        OPEN: f"dkms (>= 3.1.8), firmware-nvidia-gsp {same}, nvidia-kernel-support {same}",
        OTHER: f"dkms (>= 3.1.8), firmware-nvidia-gsp {same}, nvidia-kernel-support {same}",
        "nvidia-driver-cuda": f"libcuda1 {same}, libnvidia-ml1 {same}, nvidia-persistenced {same}, {OPEN} {same} | {OTHER} {same}",
    }
    conflicts = {OPEN: OTHER, OTHER: OPEN}
    for name, needs in depends.items():
        tree = work / f"{name}-{version}"
        tree.mkdir(parents=True)
        more = [f"Conflicts: {conflicts[name]}"] if name in conflicts else []
        package(folder, name, version, tree, depends=needs, more=more)


def pinning(folder: Path, work: Path, branch: str) -> None:
    """nvidia-driver-pinning-BRANCH."""
    name = f"nvidia-driver-pinning-{branch}"
    tree = work / name / "etc/apt/preferences.d"
    tree.mkdir(parents=True)
    pins = "Package: *nvidia* libcuda1\nPin: version {}\nPin-Priority: {}\n"
    (tree / name).write_text(pins.format(f"{branch}.*", 1000))
    package(folder, name, f"{branch}-1", work / name, arch="all")


def surroundings(folder: Path, work: Path) -> None:
    """DKMS, the kernel and its headers."""
    for name, version in (("dkms", "99.0-1"), (f"linux-image-{FLAVOUR}", "6.1.140-1"), (f"linux-headers-{FLAVOUR}", "6.1.140-1")):
        tree = work / name
        tree.mkdir(parents=True)
        package(folder, name, version, tree, arch="all")
