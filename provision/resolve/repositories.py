"""NVIDIA's package repository for a kind of host."""

from __future__ import annotations

from provision import catalog
from provision.plan.model import Repository
from provision.resolve.machine import Machine


def repository(kind: Machine) -> Repository | str:
    """The repository with its key's checksum, or why there is none. Nothing is trusted whose checksum is not known."""
    known = catalog.cuda_repositories()
    system, arch = kind.repository, known.architectures.get(kind.arch)
    if system is None or arch is None:
        return f"NVIDIA has no package repository for {kind.system} on {kind.arch}"
    base = known.base.format(system=system, arch=arch)
    name = f"cuda-{system}-{arch}"
    if kind.family == "rhel":
        key = known.rpm.keys.get(system)
        if key is None or key.sha256 is None:
            return f"the key of NVIDIA's repository {system} is not known"
        keyring = known.rpm.keyring
        entry = f"[{name}]\nname={name}\nbaseurl={base}\nenabled=1\ngpgcheck=1\ngpgkey=file://{keyring}\n"
        return Repository("rpm", name, base, entry, f"{base}/{key.file}", keyring, key_sha256=key.sha256)
    sha256 = known.apt.sha256.get(system, {}).get(kind.arch)
    if sha256 is None:
        return f"no checksum of the key of NVIDIA's repository {system} for {kind.arch} is known"
    keyring = known.apt.keyring
    return Repository(
        "apt",
        name,
        base,
        known.apt.list_line.format(base=base, keyring=keyring),
        known.apt.keyring_deb.format(base=base),
        keyring,
        key_fingerprint=known.keys.fingerprints.get(known.keys.of.get(system, "")),
        key_sha256=sha256,
    )
