"""The catalogue: every file holds to its schema, what it says agrees with itself, and a typo is one clear error with its line."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import pytest

from provision import catalog
from provision.base.versions import key, matches
from provision.catalog import architectures, parser, schemas

FILES = sorted(file.name.removesuffix(".yaml") for file in resources.files("provision.catalog").iterdir() if file.name.endswith(".yaml"))


def text_of(name: str) -> str:
    return resources.files("provision.catalog").joinpath(f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_a_schema_and_holds_to_it(name: str) -> None:
    assert name in schemas.FILES
    assert catalog.load(name)


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
    assert list(unsourced(catalog.load(name))) == [".schema"] * ("source" not in catalog.load(name))


@pytest.mark.parametrize("name", FILES)
def test_a_group_without_source_or_date_is_refused(name: str) -> None:
    data = copy.deepcopy(catalog.load(name))
    found = list(groups(data))
    assert found
    for group in found:
        for needed in ("source", "date"):
            kept = group.pop(needed)
            assert [said for _path, said in schemas.FILES[name](data)] == [f"the key '{needed}' is missing"]
            group[needed] = kept
        group["weak"], kept = "", group.get("weak", "nothing")
        assert [path[-1] for path, _said in schemas.FILES[name](data)] == ["weak"]
        group["weak"] = kept


def test_what_the_sources_do_not_confirm_says_so() -> None:
    known = catalog.load("cuda_repositories")
    assert all(system in known["apt"]["weak"] for system in ("ubuntu2004", "ubuntu2604"))
    unnamed = set(known["apt"]["sha256"]) - set(known["keys"]["of"])
    assert all(system in known["keys"]["weak"] for system in unnamed)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("nccl", ', source: "nccl#533", date: 2026-11-21}', ', source: "nccl#533"}', "the key 'date' is missing"),
        ("cuda", "  date: 2026-11-21", "  date: lately", "'lately' is no date such as 2026-11-21"),
        ("nccl", "known_bad:", "known_bat:", "'known_bat' is unknown; is 'known_bad' meant?"),
        ("nccl", '"2.21.5-1":  {"12.2"', '"2.21.5-1":  {"12"', "'12' is no CUDA such as 12.4"),
        ("nccl", '{below: "2.15.5", why', '{below: "2.15.5", versions: ["2.1"], why', "exactly one of versions, from (with to) and below"),
        ("nccl", 'from: "2.14.3", to: "2.16"', 'from: "2.14.3", to: "2.13"', "2.13 is older than 2.14.3"),
        ("nccl", '"2.21.5": "12.4"\n', '"2.21.5": 12.4\n', "12.4 must be in quotes"),
        ("nccl", '      "2.17.1": "12.1"\n', '      "2.17.1": "12.1"\n      "2.17.1": "12.0"\n', "stands there twice"),
        ("cmake", "-linux-{arch}.tar.gz", "-linux-x86_64.tar.gz", "does not say where the architecture goes"),
        ("cmake", "cmake-4.3.3-linux-x86_64.tar.gz:", "cmake-4.3.3-linux.tar.gz:", "names no architecture"),
        ("cuda_repositories", "repos/{system}/{arch}", "repos/{system}/x86_64", "does not say where the architecture goes"),
        ("openmpi", "value: fb41086b", "value: xb41086b", "is no SHA-256"),
        ("pytorch", "index: ", "index ", "this is no catalogue"),
        ("nccl", '{"12.0": "N", "12.1": "N"}', '{"12.0": "N", "12.1": "Q"}', "there is no evidence 'Q'"),
        (
            "nccl",
            '"2.28.9", "2.29.7", "2.30.7", "2.31.2", "2.32.3"]',
            '"2.28.8", "2.28.9", "2.29.7"]',
            "2.28.8 is there twice, or not listed",
        ),
        ("nccl", '"2.27.5": "12.9"\n', '"2.27.5": "12.9"\n      "2.27.6": "12.9"\n', "nvidia-nccl-cu12 2.27.6 is missing under code"),
        ("mnist", "max_learning_rate: 0.16, min_steps: 59", "max_learning_rate: 0.16, min_step: 59", "is 'min_steps' meant?"),
        ("os", "family: debian", "family: debain", "is no family: debian or rhel"),
    ],
)
def test_a_typo_is_one_error_that_names_the_line(name: str, right: str, wrong: str, said: str) -> None:
    broken = text_of(name).replace(right, wrong, 1)
    assert broken != text_of(name)
    with pytest.raises(parser.CatalogError) as caught:
        parser.read(broken.encode(), f"{name}.yaml", schemas.FILES[name])
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    place, _, line = str(caught.value.where).partition(":")
    assert place == f"{name}.yaml"
    first = next(
        number for number, (old, new) in enumerate(zip(text_of(name).splitlines(), broken.splitlines(), strict=False), 1) if old != new
    )
    assert int(line) in (first, first + 1)


@pytest.mark.parametrize(("wrong", "said"), [(b"what: \x07 a bell", "YAML has no character U+0007"), (b"what: \xe9", "this is no UTF-8")])
def test_bytes_that_are_no_text_are_one_error_that_names_the_line(wrong: bytes, said: str) -> None:
    content = text_of("nccl").encode()
    broken = content.replace(b"what:", wrong, 1)
    with pytest.raises(parser.CatalogError, match=re.escape(said)) as caught:
        parser.read(broken, "nccl.yaml", schemas.FILES["nccl"])
    assert caught.value.where == f"nccl.yaml:{content[: content.index(b'what:')].count(10) + 1}"


def test_what_is_reported_absent_everywhere_is_not_listed_as_a_build() -> None:
    known = catalog.load("nccl")
    for entry in known["absent"]:
        listed = known["repository"]["builds"].get(entry["version"], {})
        assert "systems" in entry or not set(entry["cuda"]) & set(listed)


def test_every_system_of_a_repository_has_its_key() -> None:
    known = catalog.load("cuda_repositories")
    for system in known["keys"]["of"]:
        assert known["keys"]["of"][system] in known["keys"]["fingerprints"]
    sums = [value for by_arch in known["apt"]["sha256"].values() for value in by_arch.values()]
    assert len(set(sums)) == len(sums)  # each package lists its own repository: two equal sums are a slip of copying


def test_ranges_cover_what_they_say() -> None:
    entry = {"from": "2.14.3", "to": "2.16"}
    assert [matches(version, entry) for version in ("2.14.2", "2.14.3", "2.16.5", "2.17.1")] == [False, True, True, False]
    assert matches("2.7.3", {"versions": ["2.7.3"]})
    assert matches("2.15.1", {"below": "2.15.5"})


def test_drivers_grow_with_cuda() -> None:
    drivers = catalog.load("cuda")["toolkits"]["drivers"]
    ordered = [key(drivers[cuda]) for cuda in sorted(drivers, key=key)]
    assert ordered == sorted(ordered)


def test_pytorchs_default_is_one_of_its_releases() -> None:
    known = catalog.load("pytorch")
    assert known["default"] in known["releases"]


def test_an_architecture_has_one_name_here_and_another_one_in_packages_and_engines() -> None:
    for name, others in (("x86_64", ["amd64", "x64"]), ("aarch64", ["arm64"])):
        assert {architectures.kernel_name(each) for each in (name, *others)} == {name}
        assert architectures.debian_name(name) == others[0]
    assert architectures.kernel_name("riscv64") == architectures.debian_name("riscv64") == "riscv64"
