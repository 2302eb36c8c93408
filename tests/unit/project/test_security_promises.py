"""SECURITY.md names a test for each of its promises: they are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_promise_has_a_test_that_is_there() -> None:
    promises = (ROOT / "SECURITY.md").read_text().partition("\n## Promises")[2]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[^`]*)`", row)
        assert named, row
        for each in named:
            file, _, function = each.partition("::")
            assert re.fullmatch(r"test_\w+", function), f"{each} names no function"
            assert (ROOT / file).is_file(), f"there is no {file}"
            assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {function}"
