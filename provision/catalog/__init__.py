"""What is known of the world, as data: one YAML file per subject, each fact with its source and date. Code asks here, never hard-codes."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from provision.catalog import parser, schemas


@cache
def load(name: str) -> dict[str, Any]:
    """The catalogue file ``name`` (without ``.yaml``) as a mapping. Callers must not change it: it is read once.

    Raises:
        CatalogError: the file is no YAML or does not hold to its schema; it names the line.
    """
    content = resources.files(__name__).joinpath(f"{name}.yaml").read_bytes()
    return parser.read(content, f"provision/catalog/{name}.yaml", schemas.FILES.get(name))


def check() -> None:
    """Read every file once, so that a mistake in one that is needed late, or only after a failure, is said before anything is changed.

    Raises:
        CatalogError: as from `load`.
    """
    for name in schemas.FILES:
        load(name)
