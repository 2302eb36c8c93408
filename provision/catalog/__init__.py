"""What is known of the world, as data: one YAML file per subject, each fact with its source and date. Code asks here, never hard-codes."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def load(name: str) -> dict[str, Any]:
    """The catalogue file ``name`` (without ``.yaml``) as a mapping. Callers must not change it: it is read once."""
    data = yaml.safe_load(resources.files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise TypeError(f"catalogue file {name}.yaml must hold a mapping")
    return data
