"""What a rendered playbook's variables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def unmarked(value: Any) -> Any:
    """A document without the marks that keep Ansible from rendering its texts."""
    if isinstance(value, dict):
        return value["__ansible_unsafe"] if "__ansible_unsafe" in value else {key: unmarked(each) for key, each in value.items()}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


def variables_in(path: Path) -> Any:
    """The variables in a file, as Ansible has them."""
    return unmarked(json.loads(path.read_text()))
