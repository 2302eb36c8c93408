"""Version numbers as distributions and wheels write them."""

from __future__ import annotations

import pytest

from provision.base.versions import key, minor


@pytest.mark.parametrize(
    ("written", "numbers"),
    [("4.1.8", (4, 1, 8)), ("2.9.0-1", (2, 9, 0)), ("1:2.0.0-1+b1", (2, 0, 0)), ("2.13.0+cpu", (2, 13, 0)), ("535.104.05", (535, 104, 5))],
)
def test_key(written: str, numbers: tuple[int, ...]) -> None:
    assert key(written) == numbers


def test_a_version_without_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="no number"):
        key("latest")


def test_minor() -> None:
    assert minor("3.11.2") == "3.11"
