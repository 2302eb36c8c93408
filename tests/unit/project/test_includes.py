"""The order of the engine's folders (scripts/check_includes.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import load

ROOT = Path(__file__).parents[3]
CHECK = load("check_includes", ROOT / "scripts/check_includes.py")


def test_the_engine_keeps_the_order() -> None:
    assert CHECK.violations(ROOT / "collective_core/csrc") == []


@pytest.mark.parametrize(
    ("included", "rule"),
    [
        ("engine/engine.h", "base/ must not include engine/"),
        ("core/engine.h", "every file is in, and names, one of"),
        ("engine.h", "every file is in, and names, one of"),
    ],
)
def test_an_include_that_runs_up_or_nowhere_is_named_with_its_line(tmp_path: Path, included: str, rule: str) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/wait.h").write_text(f'#include <vector>\n#include "base/fd.h"\n#include "{included}"\n')
    (problem,) = CHECK.violations(tmp_path)
    assert problem.startswith(f"{tmp_path}/base/wait.h:3: {rule}")
