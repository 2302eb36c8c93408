"""Facts of the golden plans, for other tests too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from provision.catalog import OURS
from provision.survey import Facts
from provision.survey.document import load_file

DATA = Path(__file__).parent / "data"
PLANS, DECISIONS = DATA / "plans", DATA / "decisions.yaml"


@functools.cache
def _table() -> dict[str, Any]:
    return dict(yaml.safe_load(DECISIONS.read_text(encoding="utf-8")))


def facts_in_table(name: str) -> dict[str, Facts]:
    return {host: Facts.model_validate(each) for host, each in _table()[name]["hosts"].items()}


def facts_of(name: str) -> dict[str, Facts]:
    """The facts of a golden plan, whole or of the table."""
    whole = PLANS / f"{name}.json"
    return dict(load_file(whole, OURS)) if whole.exists() else facts_in_table(name)
