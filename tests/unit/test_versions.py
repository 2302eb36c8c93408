"""Version numbers as distributions and wheels write them."""

from __future__ import annotations

import pytest

from provision.base.versions import key, matches, minor


@pytest.mark.parametrize(
    ("written", "numbers"),
    [("4.1.8", (4, 1, 8)), ("2.9.0-1", (2, 9, 0)), ("1:2.0.0-1+b1", (2, 0, 0)), ("2.13.0+cpu", (2, 13, 0)), ("535.104.05", (535, 104, 5))],
)
def test_key(written: str, numbers: tuple[int, ...]) -> None:
    assert key(written) == numbers


def test_a_version_without_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="no number"):
        key("latest")


@pytest.mark.parametrize(
    ("version", "entry", "covered"),
    [
        ("4.0.2", {"below": "4.0.3"}, True),
        ("4.0.3", {"below": "4.0.3"}, False),
        ("4.0.10", {"below": "4.0.3"}, False),
        ("2.0.0-1", {"versions": ["2.0.0"]}, True),
        ("2.0.1-1", {"versions": ["2.0.0"]}, False),
    ],
)
def test_matches(version: str, entry: dict[str, object], covered: bool) -> None:
    assert matches(version, entry) is covered


def test_minor() -> None:
    assert minor("3.11.2") == "3.11"
