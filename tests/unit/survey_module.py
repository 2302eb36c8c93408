"""The survey script as a module, and machines to survey: folders that a test has filled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from provision.base import resources
from provision.survey.model import Drift

survey = ModuleType("survey_script")
exec(compile(resources.script("survey"), "survey", "exec"), survey.__dict__)  # noqa: S102 - our own text


def machine(root: Path, files: dict[str, str] | None = None, **options: Any) -> Any:
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return survey.Machine(root=str(root), env={"PATH": "/nowhere"}, options=options)


def sentences(found: Iterable[object]) -> list[str]:
    """The text of each difference that the script prints, as `provision` shows it."""
    return [str(Drift.model_validate(each)) for each in found]
