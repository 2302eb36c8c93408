"""Cases of parametrized tests: `make test` runs one of each list, `make test-all` all, because ranks that import PyTorch take seconds."""

from __future__ import annotations

from typing import Any

import pytest


def slow_but_last(*cases: Any) -> list[Any]:
    """The cases, all but the last one marked ``slow``. The last should be the one in which most can go wrong: ranks on several hosts."""
    return [*(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases[:-1]), cases[-1]]
