"""Fake packages of NVIDIA's driver for RHEL's family: the names, epoch, dependencies and streams of those in NVIDIA's repository.

The host is a sandbox host with Debian's dnf and rpm that says that it is Rocky Linux: dnf, its streams, its versionlock and rpm's
signatures are real. The packages hold nothing but nvidia-smi, and are built on the host, because rpmbuild need not be on this machine.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from hosts import container, root

from provision.sandbox import SandboxHost

WORK = "/srv/rpms"
KEY = "D42D0685.pub"
#: Stream of the module nvidia-driver: {branch}-{kind}; the package with the kernel modules.
MODULES = {"open": "kmod-nvidia-open-dkms", "dkms": "kmod-nvidia-latest-dkms"}
DRIVER = ("nvidia-driver-cuda", "nvidia-driver-cuda-libs", "nvidia-persistenced", "nvidia-kmod-common")
NEEDS = "dnf python3-dnf dnf-plugins-core rpm file createrepo-c gnupg"

RELEASE = """NAME="Rocky Linux"
VERSION="9.6 (Blue Onyx)"
ID="rocky"
ID_LIKE="rhel centos fedora"
VERSION_ID="9.6"
PLATFORM_ID="platform:el9"
"""

MODULE = """---
document: modulemd
version: 2
data:
  name: nvidia-driver
  stream: "{branch}-{kind}"
  version: 20260101000000
  context: "{branch}{number}"
  arch: x86_64
  summary: fake
  description: fake
  license: {{module: [MIT]}}
  artifacts:
    rpms: [{artifacts}]
...
"""


def _package(name: str, *lines: str) -> str:
    return "\n".join([f"%package -n {name}", "Summary: fake", "AutoReqProv: no", *lines, f"%description -n {name}", "fake", ""])


def _spec(name: str, version: str, release: str, *lines: str) -> str:
    head = [f"Name: {name}", f"Version: {version}", f"Release: {release}", "Summary: fake", "License: none", "AutoReqProv: no", *lines]
    return "\n".join([*head, "%description", "fake", ""])


def _driver(version: str) -> str:
    """The specification of all packages of one version."""
    same = f"= 3:{version}"
    needs = ", ".join(f"{each} {same}" for each in DRIVER[1:])
    parts = [_spec("nvidia-driver", version, "1.el9", "Epoch: 3"), _package(DRIVER[0], f"Requires: {needs}")]
    parts += [_package(DRIVER[1]), _package(DRIVER[2]), _package(DRIVER[3], f"Requires: nvidia-kmod {same}")]
    for kind, name in MODULES.items():
        other = MODULES["dkms" if kind == "open" else "open"]
        lines = (f"Provides: nvidia-kmod {same}", f"Requires: dkms, nvidia-kmod-common {same}", f"Conflicts: {other}")
        parts.append(_package(name, *lines))
    smi = "%{buildroot}/usr/bin/nvidia-smi"
    parts.append(f"%install\nmkdir -p %{{buildroot}}/usr/bin\nprintf '#!/bin/sh\\necho {version}\\n' > {smi}\nchmod 755 {smi}\n")
    parts.append(f"%files -n {DRIVER[0]}\n/usr/bin/nvidia-smi")
    parts += [f"%files -n {name}" for name in (*DRIVER[1:], *MODULES.values())]
    return "\n".join(parts) + "\n"


def _streams(version: str) -> str:
    branch = version.split(".")[0]
    texts = []
    for number, (kind, module) in enumerate(MODULES.items()):
        artifacts = ", ".join(f'"{name}-3:{version}-1.el9.x86_64"' for name in (*DRIVER, module))
        texts.append(MODULE.format(branch=branch, kind=kind, number=number, artifacts=artifacts))
    return "".join(texts)


def make(host: SandboxHost, site: Path, versions: Sequence[str], oldest: str) -> bytes:
    """Make the host one of Rocky Linux with a repository of its own, and NVIDIA's repository in ``site``; returns the key of that.

    gpu-monitor, of the distribution, needs the proprietary modules of ``oldest``.
    """
    root(host, f"apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install {NEEDS}")
    plain = ["dkms", "kernel-devel-matched", "epel-release", "python3-dnf-plugin-versionlock"]  # Debian's dnf has the plugin already
    specs = {f"nvidia/{version}": _driver(version) for version in versions}
    specs |= {f"rocky/{name}": _spec(name, "1.0", "1") + "%files\n" for name in plain}
    specs["rocky/gpu-monitor"] = _spec("gpu-monitor", "1.0", "1", f"Requires: {MODULES['dkms']} = 3:{oldest}") + "%files\n"
    files = {f"{WORK}/specs/{name}.spec": text for name, text in specs.items()}
    files[f"{WORK}/modules.yaml"] = "".join(map(_streams, versions))
    files["/etc/yum.repos.d/rocky.repo"] = f"[rocky]\nname=rocky\nbaseurl=file://{WORK}/rocky\nenabled=1\ngpgcheck=0\n"
    files["/etc/dnf/vars/releasever"] = "9\n"
    files["/etc/os-release"] = RELEASE
    root(
        host,
        f"""set -e; mkdir -p {WORK}/specs/nvidia {WORK}/specs/rocky /etc/yum.repos.d /etc/pki/rpm-gpg
        rm /etc/dnf/plugins/local.conf /etc/os-release
        mv /usr/bin/apt-get /usr/bin/apt-get.debian  # by which Ansible knows the package manager""",
    )
    _put(host, files)
    root(
        host,
        f"""set -e; cd {WORK}; export GPG_TTY=/dev/null
        for repository in nvidia rocky; do
            for spec in specs/$repository/*.spec; do
                rpmbuild -bb --quiet --define "_rpmdir $PWD/$repository" --define '_build_name_fmt %%{{NAME}}-%%{{VERSION}}.rpm' $spec
            done
        done
        gpg --batch --quiet --passphrase '' --quick-generate-key 'test <test@example.org>' rsa3072 sign never
        rpmsign --define '__gpg /usr/bin/gpg' --define '_gpg_name test@example.org' --addsign nvidia/*.rpm
        gpg --armor --export test@example.org > nvidia/{KEY}
        createrepo_c --quiet nvidia && modifyrepo_c --mdtype=modules modules.yaml nvidia/repodata && createrepo_c --quiet rocky""",
    )
    stream, _stat = container(host).get_archive(f"{WORK}/nvidia/.")
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
        tar.extractall(site, filter="data")
    return (site / KEY).read_bytes()


def _put(host: SandboxHost, files: dict[str, str]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    assert container(host).put_archive("/", buffer.getvalue())
