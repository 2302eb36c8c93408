"""NVIDIA's lists: the driver of each CUDA release, the driver's branches, and the images with CUDA."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, Field, RootModel, ValidationError

from provision.base.downloads import Unavailable
from provision.base.terminal import neutral
from provision.base.versions import key
from provision.catalog.update.package_index import Links
from provision.catalog.update.sources import Sources, Update, below


class _Driver(BaseModel):
    version: str = Field(pattern=r"^\d+(\.\d+){1,2}$")


class _Redistributables(BaseModel):
    """What is read of a ``redistrib_*.json``: the CUDA release, and the driver that was packaged with it."""

    release_label: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    nvidia_driver: _Driver


def add_toolkits(made: Update, sources: Sources) -> None:
    """The driver of each CUDA release that the catalogue does not know."""
    place = sources.cuda
    known = sources.catalog.cuda().toolkits.of
    found: dict[str, str] = {}
    for name in _lists(sources):
        cuda = re.fullmatch(r"redistrib_(\d+\.\d+)\.\d+\.json", name)
        if cuda is None:
            continue
        if cuda[1] in known or key(cuda[1]) < min(map(key, known)):
            made.seen.add("cuda")
            continue
        content = sources.content(below(place, name))
        try:
            read = _Redistributables.model_validate_json(content)
        except ValidationError:
            made.unreached.append(f"{name}: it names no CUDA release and driver as NVIDIA's lists do")
            continue
        driver = read.nvidia_driver.version
        found[cuda[1]] = min(driver, found.get(cuda[1], driver), key=key)
    if found:
        made.seen.add("cuda")
        made.rows["cuda"] = {"toolkits": {"of": found}}
        made.found += [f"CUDA {cuda}: driver {driver}" for cuda, driver in found.items()]


def _lists(sources: Sources) -> list[str]:
    if isinstance(sources.cuda, Path):
        return sorted(path.name for path in sources.cuda.glob("redistrib_*.json"))
    return sorted({file.filename for file in Links(sources.content(below(sources.cuda, ""))).files})


class _DriverRelease(BaseModel):
    release_version: str = Field(max_length=30)


class _DriverBranch(BaseModel):
    type: str = Field(max_length=60)
    driver_info: list[_DriverRelease] = Field(max_length=1000)


class _DriverReleases(RootModel[dict[str, _DriverBranch]]):
    """What is read of NVIDIA's releases.json: branch → what it is for, and its releases."""


_KINDS = {"lts branch": "long-term", "production branch": "production", "new feature branch": "feature"}  # NVIDIA's words → ours


def add_branches(made: Update, sources: Sources) -> None:
    """The released driver branches that the catalogue does not know; none of what is older than all that it knows."""
    place = sources.drivers
    if isinstance(place, Path) and not place.exists():
        return  # a folder need not have it
    try:
        branches = _DriverReleases.model_validate_json(sources.content(place)).root
    except ValidationError as error:
        raise Unavailable("it does not name branches and their releases as NVIDIA's list does") from error
    known = sources.catalog.driver().branches.of
    for name, branch in sorted(branches.items()):
        if name in known:
            made.seen.add("driver")
        released = any(each.release_version.startswith(f"{name}.") for each in branch.driver_info)
        if not re.fullmatch(r"[1-9]\d\d", name) or name in known or int(name) < min(map(int, known)) or not released:
            continue
        kind = _KINDS.get(branch.type.strip().lower())
        if kind is None:
            made.unreached.append(f"driver branch {name}: what it is for is unknown: {neutral(branch.type)}")
            continue
        made.rows.setdefault("driver", {"branches": {"of": {}}})["branches"]["of"][name] = kind
        made.found.append(f"driver branch {name}: {kind}")


def add_images(made: Update, sources: Sources) -> None:
    """The images that the catalogue does not know, of the distributions that it knows some of."""
    if isinstance(sources.images, Path) and not sources.images.exists():
        return  # a folder need not have it
    listed = sources.content(sources.images).decode("utf-8", "replace")
    for name, known in sources.catalog.cuda_images().tags.items():
        releases: dict[str, set[str]] = {}
        for cuda, release in re.findall(rf"\b(\d\d\.\d\d?\.\d)-(?:base|cudnn-devel)-{name}(?:linux)?(\d\d?(?:\.\d\d)?)\b", listed):
            if f"{name} {release}" not in sources.catalog.images().distributions.images:
                continue
            made.seen.add("cuda_images")
            releases.setdefault(cuda, set(known.of.get(cuda, ()))).add(release)
        for cuda, found in sorted(releases.items(), key=lambda each: key(each[0])):
            if new := sorted(found - set(known.of.get(cuda, ())), key=key):
                tags = made.rows.setdefault("cuda_images", {"tags": {}})["tags"]
                tags.setdefault(name, {"of": {}})["of"][cuda] = sorted(found, key=key)
                made.found.append(f"image of CUDA {cuda}: {name} {', '.join(new)}")
