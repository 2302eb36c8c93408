"""What an image begins with: the distribution's own, or NVIDIA's for its CUDA. Pure: what does not exist is refused, with the nearest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from provision import catalog
from provision.base.errors import UsageError
from provision.base.versions import key, minor
from provision.resolve.host_classes import HostClass

_SYSTEM = re.compile(r"(?P<id>[a-z]+)[-: ]?(?P<version>\d+(\.\d+)?)")
_OTHER_NAMES = {"rockylinux": "rocky"}
FLAVOUR = "base"  # CUDA's own run time and nothing else: NCCL comes from the plan, and PyTorch brings what it needs


@dataclass(frozen=True)
class Base:
    """The image that another begins with.

    Attributes:
        reference: as a Dockerfile names it, with its digest where that is known.
        system: its distribution and release, e.g. ``ubuntu 22.04``.
        cuda: of the image, e.g. ``12.4.1``; None without.
        name: of the system and the CUDA, e.g. ``ubuntu22.04-cuda12.4``.
    """

    reference: str
    system: str
    cuda: str | None
    name: str


def system_of(text: str) -> str:
    """``ubuntu22.04`` → ``ubuntu 22.04``. Raises UsageError for a system that there is no image of."""
    found = _SYSTEM.fullmatch(text.strip().lower())
    system = f"{_OTHER_NAMES.get(found['id'], found['id'])} {found['version']}" if found else ""
    if system not in systems():
        raise UsageError(f"--os {text}: no image of it is known", hint="there are " + ", ".join(map(short, systems())))
    return system


def systems() -> list[str]:
    """Every system that images are made of, ``ubuntu 22.04`` …"""
    return list(catalog.images().distributions.images)


def short(system: str) -> str:
    """``ubuntu 22.04`` → ``ubuntu22.04``"""
    return system.replace(" ", "")


def cudas(system: str) -> list[str]:
    """The CUDAs, with their last number, that there are images of this system for; oldest first."""
    name, release = system.split()
    tags = catalog.cuda_images().tags.get(name)
    return sorted((cuda for cuda, releases in tags.releases.items() if release in releases), key=key) if tags else []


def asked(cuda: str) -> str:
    """``--cuda`` as it was given, if it can be meant: ``12.4`` or ``12.4.1``. Raises UsageError."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", cuda):
        raise UsageError(f"--cuda {cuda}: this is no CUDA", hint="write it like 12.4")
    known = catalog.nccl()
    built = {number for builds in known.wheels.builds.values() for number in builds.values()}
    built |= {number for builds in known.repository.builds.values() for number in builds}
    newest = max(built, key=key)
    if key(cuda)[:2] > key(newest):
        raise UsageError(f"--cuda {cuda}: no NCCL is built for it yet; the newest builds are for CUDA {newest}", hint=_nearest(cuda, None))
    return cuda


def for_cuda(system: str, cuda: str) -> str:
    """The full number of the image for this CUDA, ``12.4`` → ``12.4.1``. Raises UsageError, with what exists, where there is none."""
    there = cudas(system)
    fitting = [each for each in there if each == cuda or minor(each) == cuda]
    if fitting:
        return fitting[-1]
    instead = [each for each in there if minor(each) == minor(cuda)]
    if instead:
        raise UsageError(f"--cuda {cuda}: that image does not exist, or no longer; there is {instead[-1]}", hint=f"--cuda {minor(cuda)}")
    raise UsageError(f"--cuda {cuda}: there is no image of {system} for it", hint=_nearest(cuda, system))


def newest_system(cuda: str) -> str:
    """The newest Ubuntu that there is an image for this CUDA of. Raises UsageError where there is none of any."""
    having = [system for system in systems() if system.startswith("ubuntu") and minor(cuda) in map(minor, cudas(system))]
    if not having:
        raise UsageError(f"--cuda {cuda}: there is no image for it", hint=_nearest(cuda, None))
    return max(having, key=key_of)


def key_of(system: str) -> tuple[int, ...]:
    """For sorting: the release's number."""
    return key(system.split()[1])


def base(host_class: HostClass, *, cuda: str | None = None, given: str | None = None) -> Base:
    """What an image for this host class begins with.

    Args:
        cuda: the CUDA that was asked for; without, the newest that the host's driver runs natively.
        given: an image of the user's own, which takes the place of the catalogue's.

    Raises:
        UsageError: there is none; it names the nearest that exists.
    """
    system = _system(host_class)
    if host_class.cuda is None:
        name, full = short(system), None
    else:
        full = _full(system, host_class.cuda, cuda, given)
        name = f"{short(system)}-cuda{minor(full or host_class.cuda)}"
    if given is not None:
        return Base(given, system, full, name)
    if full is None:
        return Base(catalog.images().distributions.images[system], system, None, name)
    known = catalog.cuda_images()
    tag = known.tag.format(cuda=full, flavour=FLAVOUR, system=_in_tags(system))
    digest = known.digests.sha256.get(tag) if host_class.arch == "x86_64" else None
    place = known.registries[0].removeprefix("docker.io/")
    return Base(f"{place}:{tag}" + (f"@sha256:{digest}" if digest else ""), system, full, name)


def _full(system: str, driver: str, cuda: str | None, given: str | None) -> str | None:
    if given is not None:
        return None
    if cuda is not None:
        return for_cuda(system, cuda)
    fitting = [each for each in cudas(system) if key(minor(each)) <= key(driver)]
    if not fitting:
        what = f"there is no CUDA image of {system} for its driver's CUDA {driver}"
        raise UsageError(what, hint=f"{_nearest(driver, system)}; or name an image of yours: --base IMAGE")
    return fitting[-1]


def _system(host_class: HostClass) -> str:
    known = catalog.images()
    name = known.alike.get(host_class.os_id, host_class.os_id)
    candidates = (f"{name} {host_class.os_version}", f"{name} {host_class.os_version.split('.')[0]}")
    for system in candidates:
        if system in known.distributions.images:
            return system
    raise UsageError(f"there is no image of {host_class.system.strip()}", hint="there are " + ", ".join(map(short, systems())))


def _in_tags(system: str) -> str:
    """As NVIDIA's tags call it."""
    return short(system).replace("rocky", "rockylinux")


def _nearest(cuda: str, system: str | None) -> str:
    """The nearest that exists: of the same system, another CUDA; and other systems with this CUDA."""
    ways = []
    if system is not None and cudas(system):
        ways.append(f"--os {short(system)} --cuda {minor(_closest(cuda, cudas(system)))}")
    others = [each for each in systems() if each != system and minor(cuda) in map(minor, cudas(each))]
    if not others and not ways:
        every = {number for each in systems() for number in cudas(each)}
        return f"the nearest that exists: --cuda {minor(_closest(cuda, every))}"
    if others:
        ways.append(f"--os {short(_alike(others, system))} --cuda {minor(cuda)}")
    return "the nearest that exists: " + "  or  ".join(ways)


def _alike(others: Collection[str], system: str | None) -> str:
    """Of these systems the one that is most like this: the same distribution, else the newest Ubuntu."""
    name = (system or "ubuntu").split()[0]
    same = [each for each in others if each.split()[0] == name]
    return max(same or others, key=lambda each: (each.startswith("ubuntu"), key_of(each)))


def _closest(cuda: str, there: Iterable[str]) -> str:
    """The one whose number is nearest: of the same major where there is one, else of the nearest major the one on this side."""
    major, number = key(cuda)[:2]

    def distance(each: str) -> tuple[int, int]:
        its_major, its_number = key(each)[:2]
        apart = abs(its_number - number) if its_major == major else -its_number if its_major < major else its_number
        return abs(its_major - major), apart

    return min(sorted(there, key=key), key=distance)
