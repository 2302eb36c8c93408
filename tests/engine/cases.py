"""Cases of parametrized tests. Each starts ranks that import PyTorch: `make test` runs one of a kind, `make test-all` every one."""

from __future__ import annotations

from typing import Any

import pytest


def slow_but_last(*cases: Any) -> list[Any]:
    """The cases, all but the last one marked ``slow``: the last is the one in which most can go wrong, ranks on several hosts."""
    return [*(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases[:-1]), cases[-1]]
