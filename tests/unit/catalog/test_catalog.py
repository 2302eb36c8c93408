"""The catalogue: every file matches its model and is consistent; a typo is one clear error with its line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.base import validation
from provision.base.errors import UsageError
from provision.base.versions import key
from provision.catalog import OURS, troubles
from provision.catalog.models import FILES as FILES_OF
from provision.catalog.models import Trouble

FILES = sorted(file.name.removesuffix(".yaml") for file in resources.files("provision.catalog").iterdir() if file.name.endswith(".yaml"))


def text_of(name: str) -> str:
    return resources.files("provision.catalog").joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def known(name: str) -> Any:
    """The file as plain data."""
    return yaml.safe_load(text_of(name))


@pytest.mark.parametrize("name", FILES)
def test_every_file_matches_its_model(name: str) -> None:
    assert name in FILES_OF
    assert getattr(OURS, name)() is OURS.load(name)
    assert isinstance(OURS.load(name), FILES_OF[name])


def groups(data: Any) -> Iterator[dict[str, Any]]:
    """Every mapping that names a source."""
    if isinstance(data, dict) and "source" in data:
        yield data
    for each in data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ():
        yield from groups(each)


def unsourced(data: Any, at: str = "") -> Iterator[str]:
    """What stands in no group that names a source and a date."""
    if isinstance(data, Mapping):
        if not {"source", "date"} <= set(data):
            for name, each in data.items():
                yield from unsourced(each, f"{at}.{name}")
    elif isinstance(data, list):
        for index, each in enumerate(data):
            yield from unsourced(each, f"{at}[{index}]")
    else:
        yield at


@pytest.mark.parametrize("name", FILES)
def test_every_fact_has_a_source_and_a_date(name: str) -> None:
    assert list(unsourced(known(name))) == [".schema"] * ("source" not in known(name))


def complaints(name: str, data: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        validation.validate(FILES_OF[name], data, name, kind="yaml")
    return str(caught.value).splitlines()


@pytest.mark.parametrize("name", FILES)
def test_a_group_without_source_or_date_is_refused(name: str) -> None:
    data = known(name)
    found = list(groups(data))
    assert found
    for group in found:
        for needed in ("source", "date"):
            kept = group.pop(needed)
            (said,) = complaints(name, data)
            assert re.search(rf"{needed}` is missing$", said)
            group[needed] = kept
        group["weak"], kept = "", group.get("weak", "nothing")
        (said,) = complaints(name, data)
        assert "weak` must be a text, not ''" in said
        group["weak"] = kept


def test_weak_evidence_is_named() -> None:
    assert all(system in str(OURS.cuda_repositories().apt.weak) for system in ("ubuntu2004", "ubuntu2604"))


@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("nccl", ', source: "nccl#533", date: 2026-11-21}', ', source: "nccl#533"}', "absent[0].date` is missing"),
        ("cuda", "  date: 2026-11-21", "  date: lately", "must be a date, such as 2026-11-21, not 'lately'"),
        ("nccl", "known_bad:", "known_bat:", "`known_bat` is unknown; did you mean `known_bad`?"),
        ("nccl", '"2.21.5-1":  {"12.2"', '"2.21.5-1":  {"12"', "must be a CUDA version, such as 12.4, not '12'"),
        ("nccl", '{below: "2.15.5", why', '{below: "2.15.5", versions: ["2.1"], why', "exactly one of versions, from (with to) and below"),
        ("nccl", 'from: "2.14.3", to: "2.16"', 'from: "2.14.3", to: "2.13"', "2.13 is older than 2.14.3"),
        ("nccl", '"2.21.5": "12.4"\n', '"2.21.5": 12.4\n', 'must be in quotes, "12.4": as numbers 12.10 and 12.1 are the same'),
        ("nccl", '      "2.17.1": "12.1"\n', '      "2.17.1": "12.1"\n      "2.17.1": "12.0"\n', "occurs twice"),
        ("cuda_repositories", "repos/{system}/{arch}", "repos/{system}/x86_64", "must be an address with {arch} for the architecture"),
        ("openmpi", "value: fb41086b", "value: xb41086b", "must be a SHA-256"),
        ("pytorch", "defaults:", "defaults", "invalid YAML"),
        ("nccl", '{"12.0": "N", "12.1": "N"}', '{"12.0": "N", "12.1": "Q"}', "there is no evidence 'Q'"),
        (
            "nccl",
            '["2.28.3", "2.28.7", "2.28.9", ',
            '["2.28.8", "2.28.3", "2.28.7", "2.28.9", ',
            "2.28.8 is not listed under builds",
        ),
        ("nccl", '"2.27.5": "12.9"\n', '"2.27.5": "12.9"\n      "2.27.8": "12.9"\n', "nvidia-nccl-cu12 2.27.8 is missing under code"),
        ("mnist", "max_learning_rate: 0.16, min_steps: 59", "max_learning_rate: 0.16, min_step: 59", "did you mean `min_steps`?"),
        ("os", "family: debian", "family: debain", "must be debian or rhel, not 'debain'"),
    ],
)
def test_a_typo_is_reported_with_its_line(name: str, right: str, wrong: str, said: str) -> None:
    broken = text_of(name).replace(right, wrong, 1)
    assert broken != text_of(name)
    with pytest.raises(UsageError) as caught:
        validation.parse(FILES_OF[name], broken, f"{name}.yaml", "yaml")
    assert caught.value.exit_code == 2
    place, line, _ = next(each for each in str(caught.value).splitlines() if said in each).split(":", 2)
    assert place == f"{name}.yaml"
    first = next(
        number for number, (old, new) in enumerate(zip(text_of(name).splitlines(), broken.splitlines(), strict=False), 1) if old != new
    )
    assert int(line) in (first, first + 1)


@pytest.mark.parametrize(
    ("wrong", "said"), [(b"what: \x07 a bell", "the character U+0007 is not allowed"), (b"what: \xe9", "not UTF-8 text")]
)
def test_invalid_bytes_are_one_error_with_its_line(wrong: bytes, said: str) -> None:
    content = text_of("nccl").encode()
    broken = content.replace(b"what:", wrong, 1)
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        validation.parse(FILES_OF["nccl"], broken, "nccl.yaml", "yaml")
    assert caught.value.where == f"nccl.yaml:{content[: content.index(b'what:')].count(10) + 1}"


def test_builds_that_are_absent_everywhere_are_not_listed() -> None:
    known = OURS.nccl()
    for entry in known.absent:
        listed = known.repository.builds.get(entry.version, {})
        assert entry.systems or not set(entry.cuda) & set(listed)


def test_every_system_of_a_repository_has_its_key() -> None:
    sums = [value for by_arch in OURS.cuda_repositories().apt.sha256.values() for value in by_arch.values()]
    assert len(set(sums)) == len(sums)  # each package lists its own repository: two equal sums are a slip of copying


def trouble(**ways: Any) -> Trouble:
    return validation.validate(Trouble, {"why": "w", "source": "s", "date": "2026-11-21", **ways}, "test")


@pytest.mark.parametrize(
    ("version", "ways", "covered"),
    [
        ("4.0.2", {"below": "4.0.3"}, True),
        ("4.0.3", {"below": "4.0.3"}, False),
        ("4.0.10", {"below": "4.0.3"}, False),
        ("2.0.0-1", {"versions": ["2.0.0"]}, True),
        ("2.0.1-1", {"versions": ["2.0.0"]}, False),
        ("2.14.2", {"from": "2.14.3", "to": "2.16"}, False),
        ("2.14.3", {"from": "2.14.3", "to": "2.16"}, True),
        ("2.16.5", {"from": "2.14.3", "to": "2.16"}, True),
        ("2.17.1", {"from": "2.14.3", "to": "2.16"}, False),
    ],
)
def test_version_ranges_of_known_problems(version: str, ways: dict[str, Any], covered: bool) -> None:
    assert trouble(**ways).covers(version) is covered


def test_drivers_grow_with_cuda() -> None:
    drivers = OURS.cuda().toolkits.of
    ordered = [key(drivers[cuda]) for cuda in sorted(drivers, key=key)]
    assert ordered == sorted(ordered)


def test_no_default_has_an_nccl_inside_that_is_bad_for_any_network() -> None:
    """Each problem of a default's NCCL on hosts with some network would be met by whoever installs it there and asks for nothing."""
    pytorch, nccl = OURS.pytorch(), OURS.nccl()
    inside = {(each.version, build.nccl) for each in pytorch.defaults for build in pytorch.releases[each.version].builds.values()}
    of_networks = [each for each in nccl.known_weak if {"infiniband", "roce", "efa", "several hosts"} & set(each.when)]
    assert any(each.covers("2.29.7") for each in of_networks)  # that of 2.13.0, the default before
    for version, release in inside:
        assert release is not None
        assert not troubles(release, (*nccl.known_bad, *of_networks)), version


def test_a_default_is_a_listed_release_with_a_reason_a_source_and_builds_that_are_certain() -> None:
    known = OURS.pytorch()
    assert [key(each.version) for each in known.defaults] == sorted((key(each.version) for each in known.defaults), reverse=True)
    for each in known.defaults:
        assert each.why
        assert any(build.weak is None for build in known.releases[each.version].builds.values())
    with pytest.raises(UsageError, match=r"9\.9\.9 is not listed under releases"):
        validation.parse(FILES_OF["pytorch"], text_of("pytorch").replace('version: "2.14.1"', 'version: "9.9.9"'), "pytorch.yaml", "yaml")


def test_every_build_of_pytorch_names_the_nccl_inside() -> None:
    assert all(build.nccl for release in OURS.pytorch().releases.values() for build in release.builds.values())


def test_names_of_architectures() -> None:
    for name, others in (("x86_64", ["amd64", "x64"]), ("aarch64", ["arm64"])):
        assert {OURS.os().kernel_name(each) for each in (name, *others)} == {name}
        assert OURS.os().debian_name(name) == others[0]
    assert OURS.os().kernel_name("riscv64") == OURS.os().debian_name("riscv64") == "riscv64"


def test_uv_can_download_its_pythons() -> None:
    known = OURS.python_packages()
    command = [str(Path(sys.executable).with_name("uv")), "python", "list", "--no-config", "--offline", "--only-downloads"]
    listed = subprocess.run([*command, "--all-versions", "--all-arches"], capture_output=True, text=True, check=True).stdout
    for minor, version in known.uv.pythons.items():
        assert version.startswith(f"{minor}.")
        assert minor in known.numpy.of
        assert all(re.search(rf"^cpython-{version}-linux-{arch}-gnu ", listed, re.M) for arch in known.uv.sha256), version


def test_our_own_catalogue_has_each_wheel_of_nccl_once() -> None:
    """The first entry of a wheel counts, so that a user's entry replaces ours; in ours a second one would be a mistake."""
    listed = [(package, wheel) for each in OURS.nccl().wheels.code for package, wheels in each.wheels.items() for wheel in wheels]
    assert len(listed) == len(set(listed))
