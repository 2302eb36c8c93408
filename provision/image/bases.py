"""Base images: the distribution's own, or NVIDIA's for a CUDA. Pure: what does not exist is refused, with what does."""

from __future__ import annotations

import re
from dataclasses import dataclass

from provision.base.errors import UsageError
from provision.base.validation import did_you_mean
from provision.base.versions import key, minor
from provision.catalog import Catalog
from provision.resolve.host_classes import HostClass

_SYSTEM = re.compile(r"(?P<id>[a-z]+)[-: ]?(?P<version>\d+(\.\d+)?)")
_OTHER_NAMES = {"rockylinux": "rocky"}
FLAVOUR = "base"  # CUDA's own run time and nothing else: NCCL comes from the plan, and what PyTorch needs from its wheels


@dataclass(frozen=True)
class Base:
    """The image that another begins with.

    Attributes:
        reference: as a Dockerfile names it, with its digest where that is known.
        system: its distribution and release, e.g. ``ubuntu 22.04``.
        cuda: of the image, e.g. ``12.4.1``; None without: then PyTorch's wheels contain theirs.
        name: of the system and the CUDA, e.g. ``ubuntu22.04-cuda12.4``.
    """

    reference: str
    system: str
    cuda: str | None
    name: str


def checked_system(text: str, catalog: Catalog) -> str:
    """``ubuntu22.04`` → ``ubuntu 22.04``. Raises UsageError for a system without a base image."""
    found = _SYSTEM.fullmatch(text.strip().lower())
    system = f"{_OTHER_NAMES.get(found['id'], found['id'])} {found['version']}" if found else ""
    if system not in systems(catalog):
        # Of a name that is misspelt; another release is not a spelling of one that does not exist.
        same_release = [short(known) for known in systems(catalog) if found and known.split()[1] == found["version"]]
        expected = ", ".join(map(short, systems(catalog)))
        raise UsageError(f"invalid --os {text}: expected one of {expected}{did_you_mean(short(system), same_release)}")
    return system


def checked_cuda(cuda: str, catalog: Catalog) -> str:
    """``--cuda`` as it was given: ``12.4`` or ``12.4.1``. Raises UsageError for one that NVIDIA has no images of."""
    known = sorted({minor(each) for system in systems(catalog) for each in cudas(system, catalog)}, key=key)
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", cuda) or minor(cuda) not in known:
        raise UsageError(f"invalid --cuda {cuda}: expected one of {', '.join(known)}")
    return cuda


def systems(catalog: Catalog) -> list[str]:
    """Every system that images are made of, ``ubuntu 22.04`` …"""
    return list(catalog.images().distributions.images)


def short(system: str) -> str:
    """``ubuntu 22.04`` → ``ubuntu22.04``"""
    return system.replace(" ", "")


def cudas(system: str, catalog: Catalog) -> list[str]:
    """The CUDAs, with their last number, that there are images of this system for; oldest first."""
    name, release = system.split()
    tags = catalog.cuda_images().tags.get(name)
    return sorted((cuda for cuda, releases in tags.of.items() if release in releases), key=key) if tags else []


def release_of(system: str, cuda: str, catalog: Catalog) -> str:
    """The full number of the image for this CUDA, ``12.4`` → ``12.4.1``. Raises UsageError, with what exists, where there is none."""
    fitting = [each for each in cudas(system, catalog) if cuda in (each, minor(each))]
    if not fitting:
        raise UsageError(f"unknown image: {system} with CUDA {cuda}", hint=_what_exists(system, cuda, catalog))
    return fitting[-1]


def newest_system(cuda: str, catalog: Catalog) -> str:
    """The newest Ubuntu that NVIDIA has an image for this CUDA of, else the newest other system."""
    having = [system for system in systems(catalog) if minor(cuda) in map(minor, cudas(system, catalog))]
    return max(having, key=lambda system: (system.startswith("ubuntu"), key(system.split()[1])))


def base(host_class: HostClass, *, cuda: str | None = None, own: str | None = None) -> Base:
    """What an image for this host class begins with.

    Args:
        cuda: the requested CUDA; without, the newest that the host's driver runs natively, and none where NVIDIA has no such image.
        own: the user's image, which replaces the catalogue's.

    Raises:
        UsageError: there is none; the hint says what exists.
    """
    if host_class.targets:
        raise UsageError("images are for NVIDIA's GPUs and for CPUs, not for AMD's GPUs", hint="--cpu, or leave these hosts out: --limit")
    system, catalog = _system(host_class), host_class.catalog
    full = None if host_class.cuda is None or own is not None else _release(system, host_class.cuda, cuda, catalog)
    name = short(system) + (f"-cuda{minor(full or host_class.cuda)}" if host_class.cuda is not None else "")
    if own is not None:
        return Base(own, system, full, name)
    if full is None:
        return Base(catalog.images().distributions.images[system], system, None, name)
    known = catalog.cuda_images()
    tag = known.tag.format(cuda=full, flavour=FLAVOUR, system=short(system).replace("rocky", "rockylinux"))
    digest = known.digests.of.get(tag) if host_class.arch == "x86_64" else None
    place = known.registries[0].removeprefix("docker.io/")
    return Base(f"{place}:{tag}" + (f"@sha256:{digest}" if digest else ""), system, full, name)


def _release(system: str, driver: str, cuda: str | None, catalog: Catalog) -> str | None:
    if cuda is not None:
        return release_of(system, cuda, catalog)
    return max((each for each in cudas(system, catalog) if key(minor(each)) <= key(driver)), key=key, default=None)


def _system(host_class: HostClass) -> str:
    known = host_class.catalog.images()
    names = (host_class.os_id, host_class.catalog.os().id_of(host_class.os_id))  # for RHEL and kin Rocky's, which is binary compatible
    for system in (f"{name} {version}" for name in names for version in (host_class.os_version, host_class.os_version.split(".")[0])):
        if system in known.distributions.images:
            return system
    hint = f"name a system instead of hosts: --os with one of {', '.join(map(short, known.distributions.images))}"
    raise UsageError(f"unknown image: {host_class.system.strip()}", hint=hint)


def _what_exists(system: str, cuda: str, catalog: Catalog) -> str:
    """The CUDAs of a system, and the systems that have this CUDA."""
    ways = [f"{short(system)} has CUDA {', '.join(cudas(system, catalog))}"] if cudas(system, catalog) else []
    others = [short(each) for each in systems(catalog) if minor(cuda) in map(minor, cudas(each, catalog))]
    ways += [f"CUDA {minor(cuda)} is in images of {', '.join(others)}"] if others else []
    return "; ".join([*ways, "or name one: --base IMAGE"])
