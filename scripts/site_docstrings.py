"""Griffe's extension for the site's Python API: docstrings are reStructuredText in a few places, and pages are Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Roles become code, and ``::`` before an example a colon."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
