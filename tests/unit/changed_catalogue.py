"""The catalogue with some of its facts replaced, for one test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from provision.catalog import OURS
from provision.catalog.models import FILES


def change(monkeypatch: pytest.MonkeyPatch, name: str, changes: Mapping[str, Any]) -> None:
    """Merge ``changes`` over the catalogue's file ``name``."""
    known = getattr(OURS, name)().model_dump(mode="json", by_alias=True, exclude_unset=True)
    changed = FILES[name].model_validate_json(json.dumps(merged(known, changes)))
    monkeypatch.setattr(OURS, name, lambda: changed)


def merged(real: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings of ``changes`` over those of ``real``; all else takes its place."""
    both = {**real, **changes}
    return {
        key: merged(real[key], value) if isinstance(value, dict) and isinstance(real.get(key), dict) else value
        for key, value in both.items()
    }
